"""What a beginner types first: ids as they come, encodings by name, both ways to scale, both ways to begin."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from locant import (
    InputEmbedding,
    InputError,
    Learned,
    LocantError,
    Positions,
    RangeError,
    ShapeError,
    Sinusoidal,
    TokenEmbedding,
)
from locant.embedding import QuantisedEmbedding
from locant.text import Tokenizer
from tests.refusal import refuses
from tests.tolerances import DRAWN, assert_close

ROW = [3, 0, 10, 3]
FORMS = [
    ROW,
    tuple(ROW),
    np.array(ROW),
    np.array(ROW, dtype=np.int32),
    np.array(ROW, dtype=np.uint8),
    torch.tensor(ROW),
]


@pytest.mark.parametrize("ids", FORMS, ids=lambda ids: f"{type(ids).__name__} {getattr(ids, 'dtype', '')}")
def test_ids_of_one_row_may_come_as_they_are(ids: Any) -> None:
    embedding = InputEmbedding(11, 6, encoding=Learned(9, 6))
    rows = F.embedding(torch.tensor(ROW), embedding.token.weight)
    assert torch.equal(embedding.token(ids), rows)
    assert torch.equal(embedding(ids), (rows + embedding.encoding.weight[:4])[None])
    cotangent = torch.randn(1, 4, 6)
    embedding(ids).backward(cotangent)
    expected = torch.zeros(11, 6).index_add(0, torch.tensor(ROW), cotangent[0])
    assert_close(embedding.token.weight.grad, expected)
    assert torch.equal(embedding.encoding.weight.grad[:4], cotangent[0])


def test_several_rows_and_none_come_as_lists_too() -> None:
    embedding = InputEmbedding(11, 6, encoding=Sinusoidal(6))
    rows = [[1, 2, 3], [4, 5, 6]]
    assert torch.equal(embedding(rows), embedding(torch.tensor(rows)))
    assert torch.equal(embedding(np.array(rows)), embedding(torch.tensor(rows)))
    assert embedding([]).shape == (1, 0, 6)
    assert embedding.token([]).shape == (0, 6)
    text = Tokenizer.bytes().encode("né")
    assert InputEmbedding(257, 6, encoding="sinusoidal")(text).shape == (1, 3, 6)
    embedding.token = QuantisedEmbedding(embedding.token, "int8")  # type: ignore[assignment]
    assert torch.equal(embedding(rows), embedding(torch.tensor(rows)))


@pytest.mark.parametrize("where", ["mapped", "reversed", "every other"])
def test_arrays_that_torch_does_not_take_are_copied(where: str, tmp_path: Path) -> None:
    np.array(ROW, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    mapped = np.memmap(tmp_path / "ids.bin", dtype=np.uint16, mode="r")  # may not be written to, of which torch warns
    ids = {"mapped": mapped, "reversed": np.array(ROW)[::-1], "every other": np.repeat(ROW, 2)[::2]}[where]
    embedding = InputEmbedding(11, 6, encoding=Learned(9, 6))
    assert torch.equal(embedding(ids), embedding(torch.tensor(ids.tolist())))


def test_a_batch_of_encoded_texts_of_one_length_is_a_batch_of_ids() -> None:
    texts = ["one", "two"]
    embedding, ids = TokenEmbedding(257, 6), Tokenizer.bytes().encode_batch(texts)
    assert torch.equal(embedding(ids), embedding(torch.tensor([[*text.encode()] for text in texts])))


def test_texts_of_several_lengths_are_told_how_to_become_a_batch() -> None:
    """What the remedy says gives every text the bits it has alone."""
    embedding = InputEmbedding(257, 6, encoding=Learned(9, 6))
    encoded = Tokenizer.bytes().encode_batch(["three", "one"])
    for rows in (encoded, [row.tolist() for row in encoded], [torch.as_tensor(row) for row in encoded]):
        with refuses(ShapeError, "rows of one length", "pad_sequence", "positions=Positions.packed([[5], [3]])"):
            embedding(rows)
    padded = nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in encoded], batch_first=True)
    x = embedding(padded, positions=Positions.packed([[5], [3]]))
    for row, alone in zip(x, encoded, strict=True):
        assert torch.equal(row[: len(alone)], embedding(alone)[0])


@pytest.mark.parametrize("text", ["ab", ["a", "b"]])
def test_a_text_is_sent_to_a_tokenizer(text: Any) -> None:
    with refuses(ShapeError, "try: Tokenizer.encode(text)"):
        TokenEmbedding(11, 6)(text)


def test_segments_come_in_the_forms_of_ids() -> None:
    embedding = InputEmbedding(11, 6, encoding=Learned(9, 6), num_segments=2)
    segments = [0, 0, 1, 1]
    expected = embedding(torch.tensor([ROW]), segments=torch.tensor([segments]))
    for form in (segments, [segments], np.array(segments), torch.tensor(segments)):
        assert torch.equal(embedding(ROW, segments=form), expected)
    with refuses(ShapeError, "segments of shape (1, 4)", "(2, 4)"):
        embedding([ROW, ROW], segments=segments)


def test_a_table_in_the_place_of_a_folder_is_told_where_it_goes() -> None:
    """`torch.nn.Embedding.from_pretrained` takes one, and its rows are then not trained."""
    table = torch.randn(3, 4)
    for given in (table, table.numpy()):
        with refuses(InputError, "TokenEmbedding(*table.shape).load_state_dict({'weight': table})"):
            TokenEmbedding.from_pretrained(given)  # type: ignore[arg-type]
    embedding = TokenEmbedding(*table.shape)
    embedding.load_state_dict({"weight": table})
    assert torch.equal(embedding([2, 0]), table[[2, 0]])


@pytest.mark.parametrize("wrong", [[1.0, 2.0], [[1, 2], [3]], ["a", "b"], "ab", [True, False], None, 5.0])
def test_what_are_no_ids_are_refused(wrong: Any) -> None:
    for embedding in (InputEmbedding(11, 6), TokenEmbedding(11, 6)):
        with refuses(ShapeError, "ids", "integers"):
            embedding(wrong)


def test_an_id_without_a_row_is_named_in_a_list_as_well() -> None:
    with refuses(RangeError, "id 11 at (0, 1)"):
        InputEmbedding(11, 6)([3, 11])
    with refuses(LocantError, "it may be anywhere"):
        InputEmbedding(11, 6, encoding=Sinusoidal(6))([3])
    assert InputEmbedding(11, 6)([3]).shape == (1, 1, 6)  # nothing is added that a position could change
    assert InputEmbedding(11, 6, encoding=Sinusoidal(6))([3], Positions.after(7, 1)).shape == (1, 1, 6)


# ---------------------------------------------------------------------- encodings


def test_an_encoding_by_name_is_the_one_of_these_sizes() -> None:
    torch.manual_seed(3)
    by_name = InputEmbedding(11, 6, encoding="learned", max_seq_len=9)
    torch.manual_seed(3)
    encoding = Learned(9, 6)
    assert repr(by_name.encoding) == repr(encoding)
    assert torch.equal(by_name.encoding.weight, encoding.weight)
    assert repr(InputEmbedding(11, 6, encoding="sin").encoding) == repr(Sinusoidal(6))
    assert InputEmbedding(11, 6, encoding="nope").encoding.methods() == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"encoding": "learned"}, ("requires max_seq_len", "max_seq_len=1024", "max_seq_len=..., d_model=...")),
        ({"encoding": "rope"}, ("adds nothing to embeddings", "attend(q, k, v, encoding=encoding, rotate=True)")),
        ({"encoding": "alibi", "max_seq_len": 9}, ("adds nothing to embeddings",)),
        ({"encoding": "vit"}, ("requires height and width",)),
        ({"encoding": "sinusoidl"}, ("sinusoidal",)),
        ({"encoding": Learned(9, 6), "max_seq_len": 9}, ("max_seq_len", "only with the name of an encoding")),
        ({"encoding": "sinusoidal", "combine": "concat"}, ("room for the tokens",)),
    ],
)
def test_what_does_not_follow_from_the_sizes_is_asked_for(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with refuses(RangeError, *words):
        InputEmbedding(11, 6, **options)


@pytest.mark.parametrize("width", [5, 7])
def test_an_encoding_of_another_width_is_refused_before_any_text(width: int) -> None:
    with refuses(ShapeError, f"d_model={width}", "d_model=6", "Learned(d_model=6)"):
        InputEmbedding(11, 6, encoding=Learned(9, width))
    InputEmbedding(11, 12, encoding=Learned(9, width), combine="concat")


def test_two_sizes_that_were_swapped_are_told_in_their_order() -> None:
    """A table of 6 positions for rows of 9, where 9 positions for rows of 6 were meant."""
    with refuses(ShapeError, "Learned(max_seq_len=9, d_model=6), in this order"):
        InputEmbedding(11, 6, encoding=Learned(6, 9))
    with refuses(ShapeError, "x of shape (2, 4, 6)", "Learned(max_seq_len=9, d_model=6), in this order"):
        Learned(6, 9).embed(torch.zeros(2, 4, 6))
    assert InputEmbedding(11, 6, encoding=Learned(6, 6))([1, 2]).shape == (1, 2, 6)


# ---------------------------------------------------------------------- scales, and fresh rows


@pytest.mark.parametrize("combine", ["add", "concat"])
@pytest.mark.parametrize(("scale", "factor"), [(2.5, 2.5), ("sqrt_d_model", math.sqrt(10)), (None, 1.0)])
def test_the_sum_is_scaled_and_its_gradients_with_it(combine: Any, scale: Any, factor: float) -> None:
    encoding = Learned(9, 10 if combine == "add" else 4)
    options = {"encoding": encoding, "combine": combine, "num_segments": 2, "scale": 3.0}
    embedding = InputEmbedding(11, 10, scale_sum=scale, **options).double()
    ids, segments = torch.tensor([[1, 7, 3]]), torch.tensor([[0, 1, 1]])
    tokens, rows, parts = embedding.token.weight, encoding.weight, embedding.segment.weight
    place = rows[:3][None]
    whole = 3.0 * tokens[ids] + place if combine == "add" else torch.cat([3.0 * tokens[ids], place], -1)
    expected = factor * (whole + parts[segments])
    ours = embedding(ids, segments=segments)
    assert_close(ours, expected)
    cotangent = torch.randn(1, 3, 10, dtype=torch.float64)
    weights = (tokens, rows, parts)
    for a, b in zip(
        torch.autograd.grad(ours, weights, cotangent), torch.autograd.grad(expected, weights, cotangent), strict=True
    ):
        assert_close(a, b)


def test_the_sum_is_scaled_before_the_norm() -> None:
    embedding = InputEmbedding(11, 6, encoding=Sinusoidal(6), scale_sum=1e-4, norm="layer_norm")
    ids = torch.tensor([[1, 2]])
    x = 1e-4 * (embedding.token.weight[ids] + Sinusoidal(6).vectors(2))
    assert_close(embedding(ids), F.layer_norm(x, (6,)))


def test_xavier_rows_are_those_of_torch() -> None:
    torch.manual_seed(5)
    embedding = TokenEmbedding(300, 20, init="xavier", padding_idx=7)
    torch.manual_seed(5)
    expected = nn.init.xavier_uniform_(torch.empty(300, 20))
    expected[7] = 0
    assert torch.equal(embedding.weight, expected)
    embedding.resize(20_300)
    bound = math.sqrt(6 / 320)
    fresh = embedding.weight.detach()[300:]
    assert bound * 0.99 < float(fresh.abs().max()) <= bound
    assert float(fresh.std()) == pytest.approx(bound / math.sqrt(3), rel=DRAWN, abs=0)
    assert InputEmbedding(300, 20, init="xavier").token.init_std == embedding.init_std


def test_two_ways_to_begin_at_once_are_refused() -> None:
    with refuses(RangeError, "init_std and init='xavier'"):
        TokenEmbedding(11, 6, init="xavier", init_std=0.02)
    with refuses(RangeError, "'glorot' for init", "'xavier'"):
        TokenEmbedding(11, 6, init="glorot")
