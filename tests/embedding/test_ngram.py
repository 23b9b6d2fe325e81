"""`NGramEmbedding`: the rows of published models; a row that is packed, padded, cut or reordered has its own bits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from torch.nn import functional as F
from transformers import BltConfig, Qwen4ExpTextConfig
from transformers.models.blt.modeling_blt import compute_hash_embeddings

from locant import (
    InputEmbedding,
    InputError,
    LocantError,
    NGramEmbedding,
    Positions,
    RangeError,
    ShapeError,
    TokenEmbedding,
)
from locant.embedding import NGramHash, TokenHistory, compressed_ids
from locant.models.ngram_tables import ngram_tables
from tests.embedding.ngram_models import BLT, ENGRAM, LONGCAT, QWEN, blt, engram_rows, longcat_rows, qwen
from tests.refusal import refuses, shapes_unchecked
from tests.tolerances import assert_close

VOCAB, END = 13, 4
HASHING = NGramHash.of(orders=(2, 3, 5), heads=2, size=20, vocab_size=VOCAB, fill=7, end=END, seed=3)
TABLE = NGramEmbedding(HASHING, 3)
texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)


def alone(text: list[int]) -> Tensor:
    return TABLE(torch.tensor([text]), Positions.arange(len(text)))[0]


# ---------------------------------------------------------------------- equal to published models


@pytest.mark.parametrize("index", [0, 1])
def test_qwen4_has_these_rows(index: int) -> None:
    theirs = qwen().layers[(0, 2)[index]].ple.ple_embedding
    ours = NGramEmbedding.from_config(Qwen4ExpTextConfig(**QWEN), index)
    assert ours.weight.shape == theirs.ngram_embedding.weight.shape
    ours.weight = theirs.ngram_embedding.weight
    ids = torch.randint(97, (3, 19))
    ids[0, 4] = ids[1, 6] = ids[1, 7] = ids[2, 0] = ids[2, -1] = 5
    assert torch.equal(ours(ids), theirs(ids, None))


def test_qwen4_reads_its_padding_as_the_end_of_a_text() -> None:
    """Its model replaces padding by the token that ends a text, and real tokens get the same rows here."""
    theirs = qwen().layers[0].ple.ple_embedding
    ours = NGramEmbedding.from_config(Qwen4ExpTextConfig(**QWEN))
    ours.weight = theirs.ngram_embedding.weight
    ids, mask = torch.randint(97, (2, 9)), torch.tensor([[0] * 3 + [1] * 6, [1] * 5 + [0] * 4])
    expected = theirs(torch.where(mask.bool(), ids, 5), None)
    found = ours(ids, Positions.from_mask(mask))
    assert torch.equal(found[mask.bool()], expected[mask.bool()])
    assert not found[~mask.bool()].any()


def test_blt_adds_these_rows() -> None:
    theirs, config = blt(), BltConfig(**BLT)
    ours = NGramEmbedding.from_config(config)
    ours.weight = theirs.encoder_hash_tok_embedding.weight
    ids = torch.randint(260, (2, 23))
    options = (config.encoder_hash_byte_group_nb_functions, config.encoder_hash_byte_group_size, 101)
    expected = compute_hash_embeddings(ids, theirs.local_encoder, theirs.encoder_hash_tok_embedding, *options)
    assert torch.equal(ours.add_to(theirs.local_encoder.embed_tokens(ids), ids), expected)
    theirs.local_encoder.embed_tokens.weight.data.zero_()
    expected = compute_hash_embeddings(ids, theirs.local_encoder, theirs.encoder_hash_tok_embedding, *options)
    assert torch.equal(ours(ids), expected)


@pytest.mark.parametrize("index", [0, 1])
def test_engram_has_the_rows_of_its_paper(index: int) -> None:
    ids = torch.randint(61, (2, 11))
    found = NGramEmbedding.from_config(ENGRAM, index).rows_of(ids)
    assert found.tolist() == [engram_rows(row, index, 61, 2) for row in ids.tolist()]


def test_engram_hashes_the_numbers_of_a_map() -> None:
    """The padding token is mapped, too, and the multipliers follow the number of numbers."""
    token_map = np.random.default_rng(0).integers(0, 40, 61)
    config = {**ENGRAM, "engram_compressed_vocab_size": 40}
    ids = torch.randint(61, (1, 11))
    found = NGramEmbedding.from_config(config, 1, token_map=token_map).rows_of(ids)
    assert found[0].tolist() == engram_rows(token_map[ids[0].numpy()].tolist(), 1, 40, int(token_map[2]))
    with refuses(InputError, "token_map=locant.embedding.compressed_ids(tokenizer)"):
        NGramEmbedding.from_config(config)


def test_longcat_has_the_rows_of_its_formula() -> None:
    ids = torch.randint(61, (2, 11))
    ids[0, 4] = 3
    assert NGramEmbedding.from_config(LONGCAT).rows_of(ids).tolist() == [longcat_rows(row) for row in ids.tolist()]


def test_tokens_of_one_meaning_share_a_number() -> None:
    words = ["the", " The", "THÉ", "cat", " ", "\n \t", "ﬁ", "fi", "", "\ufffd", "a  b", "a b"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "the"))
    tokenizer.decoder = decoders.Fuse()
    assert compressed_ids(tokenizer).tolist() == [0, 0, 0, 1, 2, 2, 3, 3, 4, 5, 6, 6]
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert compressed_ids(fast).tolist() == compressed_ids(tokenizer).tolist()
    with refuses(InputError, "fast tokenizer"):
        compressed_ids(words)


# ---------------------------------------------------------------------- folders


def test_a_folder_of_qwen4_has_its_tables(tmp_path: Path) -> None:
    theirs = qwen()
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(97, (2, 9))
    for index, layer in enumerate((0, 2)):
        ours, reference = NGramEmbedding.from_pretrained(tmp_path, index), theirs.layers[layer].ple.ple_embedding
        assert torch.equal(ours(ids), reference(ids, None))
    assert torch.equal(InputEmbedding.from_pretrained(tmp_path)(ids), theirs.embed_tokens(ids))
    assert NGramEmbedding.from_pretrained(tmp_path, dtype="bfloat16").weight.dtype == torch.bfloat16
    with refuses(RangeError, "index=0"):
        NGramEmbedding.from_pretrained(tmp_path, 2)


def test_multipliers_in_the_file_replace_those_of_the_seed(tmp_path: Path) -> None:
    theirs = qwen()
    theirs.layers[0].ple.ple_embedding.layer_multipliers += 2
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(97, (2, 9))
    again = transformers.AutoModel.from_pretrained(tmp_path).layers[0].ple.ple_embedding
    assert torch.equal(NGramEmbedding.from_pretrained(tmp_path)(ids), again(ids, None))


def test_a_missing_part_of_a_table_is_an_error(tmp_path: Path) -> None:
    qwen().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    part = "layers.0.ple.ple_embedding.ngram_embedding.shard_2.weight"
    save_file({name: each for name, each in tensors.items() if name != part}, tmp_path / "model.safetensors")
    with refuses(InputError, "without all parts of layers.0"):
        NGramEmbedding.from_pretrained(tmp_path)
    save_file({**tensors, part: tensors[part][:-1].clone()}, tmp_path / "model.safetensors")
    with refuses(InputError, "4 tensors", "expected (256, 6)"):
        NGramEmbedding.from_pretrained(tmp_path)


def test_the_input_of_blt_is_bytes_and_their_hashes(tmp_path: Path) -> None:
    theirs, ids = blt(), torch.randint(260, (2, 12))
    theirs.save_pretrained(tmp_path)
    config = theirs.config
    expected = compute_hash_embeddings(
        ids, theirs.local_encoder, theirs.encoder_hash_tok_embedding, config.encoder_hash_byte_group_nb_functions,
        config.encoder_hash_byte_group_size, config.encoder_hash_byte_group_vocab,
    )  # fmt: skip
    ours = InputEmbedding.from_pretrained(tmp_path)
    assert torch.equal(ours(ids), expected)
    assert torch.equal(TokenEmbedding.from_pretrained(tmp_path).weight, theirs.local_encoder.embed_tokens.weight)
    history = TokenHistory()
    pieces = [ours(piece, history=history) for piece in ids.split([5, 1, 6], 1)]
    assert torch.equal(torch.cat(pieces, 1), expected)


# ---------------------------------------------------------------------- configurations


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": "qwen4_exp_text", "vocab_size": 9}])
def test_a_model_without_such_tables_is_an_error(config: dict[str, Any]) -> None:
    assert ngram_tables(config) == ()
    with refuses(InputError, "without n-gram tables"):
        NGramEmbedding.from_config(config)


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (QWEN, {"eos_token_id": None}, ["eos_token_id"]),
        (QWEN, {"ple_embed_dim": 25}, ["expected a multiple"]),
        (QWEN, {"ple_layer_ids": 3}, ["expected a list of layers"]),
        (QWEN, {"vocab_size": None}, ["without vocab_size"]),
        (ENGRAM, {"engram_num_embeddings": [12, 13]}, ["engram_num_embeddings=12", "layer 1"]),
        ({**BLT, "model_type": "blt"}, {"encoder_config": None}, ["without encoder_config"]),
        (LONGCAT, {"emb_split_num": None}, ["without emb_split_num"]),
    ],
)
def test_a_configuration_that_does_not_fit_is_an_error(
    config: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    NGramEmbedding.from_config(config)
    with refuses(InputError, *words):
        NGramEmbedding.from_config({**config, **change})


def test_a_table_of_a_hundred_gigabytes_costs_nothing_on_the_meta_device() -> None:
    with torch.device("meta"):
        table = NGramEmbedding.from_config({**QWEN, "ngram_vocab_size_base": 20_000_000, "heads_per_ngram": 8,
                                            "hidden_size": 2048, "ple_embed_dim": 2048})  # fmt: skip
    assert (table.weight.shape, table.output_width) == ((320_001_536, 128), 2048)


# ---------------------------------------------------------------------- the same bits in every row


@given(st.lists(st.lists(texts, max_size=4), min_size=1, max_size=3), st.integers(0, 3))
def test_packed_documents_have_the_bits_of_each_alone(rows: list[list[list[int]]], more: int) -> None:
    length = max(1, *(sum(map(len, row)) for row in rows)) + more
    ids = torch.tensor([[x for text in row for x in text] + [0] * (length - sum(map(len, row))) for row in rows])
    found = TABLE(ids, Positions.packed([[*map(len, row)] for row in rows], length=length))
    for row, given_row in zip(found, rows, strict=True):
        expected = [*map(alone, given_row), row.new_zeros(length - sum(map(len, given_row)), row.shape[1])]
        assert torch.equal(row, torch.cat(expected))


@given(st.lists(st.tuples(st.integers(0, VOCAB - 1), st.booleans()), min_size=1, max_size=14))
def test_padding_anywhere_changes_nothing(row: list[tuple[int, bool]]) -> None:
    ids, is_real = torch.tensor([[x for x, _ in row]]), torch.tensor([[real for _, real in row]])
    found = TABLE(ids, Positions.from_mask(is_real))
    real = ids[is_real].tolist()
    assert torch.equal(found[is_real], alone(real) if real else found[is_real])
    assert not found[~is_real].any()


@given(st.data())
def test_pieces_have_the_bits_of_the_whole(data: st.DataObject) -> None:
    """Documents and padding in any order, cut anywhere; a piece may also have no token."""
    length = data.draw(st.integers(1, 16))
    ids = torch.tensor(data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=length, max_size=length),
                                          min_size=2, max_size=2)))  # fmt: skip
    steps = data.draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=length, max_size=length))
    document = torch.tensor(steps).cumsum(0).expand(2, -1)
    padded = torch.tensor(data.draw(st.lists(st.booleans(), min_size=2 * length, max_size=2 * length)))
    document = document.masked_fill(padded.view(2, -1), -1)
    positions = Positions.of(torch.arange(length).expand(2, -1), document)
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
    history, pieces = TokenHistory(data.draw(st.integers(0, 3))), list[Tensor]()
    for first, last in zip([0, *cuts], [*cuts, length], strict=True):
        pieces.append(TABLE(ids[:, first:last], positions.slice(first, last), history=history))
        assert len(history) == last
    assert torch.equal(torch.cat(pieces, 1), TABLE(ids, positions))


@given(st.data())
def test_drafts_and_beams_have_the_bits_of_their_own_texts(data: st.DataObject) -> None:
    """Each step reads tokens, takes some back, by one number or one for each row, or chooses beams."""
    rows = [data.draw(texts) for _ in range(2)]
    width = max(map(len, rows))
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    history = TokenHistory(spare=4)
    TABLE(ids, Positions.from_mask(mask), history=history)
    slots = [[None] * (width - len(row)) + list[int | None](row) for row in rows]
    for _ in range(data.draw(st.integers(1, 5))):
        drafted = data.draw(st.lists(texts.map(lambda x: (x * 4)[:4]), min_size=2, max_size=2))
        found = TABLE(torch.tensor(drafted), history=history)
        slots = [row + list[int | None](new) for row, new in zip(slots, drafted, strict=True)]
        for row, out in zip(slots, found, strict=True):
            assert torch.equal(out, alone([x for x in row if x is not None])[-4:])
        removed = data.draw(st.lists(st.integers(0, 4), min_size=2, max_size=2))
        if data.draw(st.booleans()):
            removed = removed[:1] * 2
            history.truncate(len(history) - removed[0])
        else:
            history.truncate(torch.tensor([len(history) - each for each in removed]))
        end = len(slots[0]) - min(removed)
        slots = [
            [x if place < len(row) - gone else None for place, x in enumerate(row)][:end]
            for row, gone in zip(slots, removed, strict=True)
        ]
        assert len(history) == end
        beams = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=2))
        history.reorder(torch.tensor(beams))
        slots = [slots[beam] for beam in beams]


def test_more_tokens_cannot_be_taken_back_than_the_history_keeps() -> None:
    history = TokenHistory(spare=3)
    TABLE(torch.randint(VOCAB, (1, 12)), history=history)
    history.truncate(10)
    with refuses(RangeError, "2 tokens to remove from row 0", "holds 1 tokens that it can remove", "spare=4"):
        history.truncate(8)
    with refuses(RangeError, "length 11", "from 0 to 10"):
        history.truncate(11)
    history.clear()
    history.truncate(0)
    TABLE(torch.randint(VOCAB, (1, 3)), history=history)
    history.truncate(0)  # a text that was kept from its beginning
    text = [1, 2]
    assert torch.equal(TABLE(torch.tensor([text]), history=history)[0], alone(text))


def test_a_history_belongs_to_one_module_and_batch() -> None:
    history = TokenHistory()
    with refuses(LocantError, "read the prompt first"):
        history.reorder(torch.tensor([0]))
    TABLE(torch.randint(VOCAB, (2, 3)), history=history)
    with refuses(RangeError, "got rows with 2", "0 to 1"):
        history.reorder(torch.tensor([0, 2]))
    for rows in (torch.tensor([0.0]), torch.tensor([True, False]), [0]):
        with refuses(ShapeError, "rows"):
            history.reorder(rows)  # type: ignore[arg-type]
    with refuses(RangeError, "True for length"):
        history.truncate(True)
    with refuses(ShapeError, "one TokenHistory() per module"):
        TABLE(torch.randint(VOCAB, (1, 3)), history=history)


def test_single_tokens_need_no_history() -> None:
    table = NGramEmbedding(NGramHash.of(orders=(1,), heads=2, size=5, vocab_size=VOCAB), 3)
    ids, history = torch.randint(VOCAB, (2, 4)), TokenHistory(spare=0)
    pieces = [table(piece, history=history) for piece in ids.split(2, 1)]
    assert torch.equal(torch.cat(pieces, 1), table(ids))
    assert torch.equal(table(ids[:, 3:], Positions.after(3, 1)), table(ids)[:, 3:])


def test_tokens_without_those_before_them_are_an_error() -> None:
    with refuses(LocantError, "from position 5", "history"):
        TABLE(torch.tensor([[1]]), Positions.after(5, 1))
    with refuses(LocantError, "single token"):
        TABLE(torch.tensor([[1]]))
    assert torch.equal(TABLE(torch.tensor([[1]]), Positions.arange(1))[0], alone([1]))


# ---------------------------------------------------------------------- as a module


def test_ids_have_these_forms_and_no_others() -> None:
    ids = torch.randint(VOCAB, (1, 5))
    for form in (ids[0], ids[0].tolist(), ids[0].numpy(), ids.int()):
        assert torch.equal(TABLE(form), TABLE(ids))
    with refuses(RangeError, "got id 13", "vocab_size=13"):
        TABLE(torch.tensor([[0, 13]]))
    with refuses(ShapeError, "(batch, seq)"):
        TABLE(ids[None])
    with refuses(ShapeError, "positions for 1 x 4 tokens"):
        TABLE(ids, Positions.arange(4))


def test_the_gradient_of_a_row_is_the_sum_over_its_tokens() -> None:
    table, ids = NGramEmbedding(HASHING, 3, combine="sum"), torch.randint(VOCAB, (2, 7))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    positions = Positions.from_mask(mask)
    out = table(ids, positions)
    cotangent = torch.randn_like(out)
    out.backward(cotangent)
    expected = torch.zeros_like(table.weight)
    for place in mask.nonzero().tolist():
        for row in table.rows_of(ids, positions)[tuple(place)].tolist():
            expected[row] += cotangent[tuple(place)]
    assert_close(table.weight.grad, expected)


@pytest.mark.parametrize("kind", ["prime", "power_of_two"])
def test_the_sizes_are_primes_or_powers_of_two(kind: Any) -> None:
    hashing = NGramHash.of(orders=(2, 3), heads=2, size=1_000, vocab_size=9, kind=kind)
    assert hashing.sizes == ((1009, 1013, 1019, 1021) if kind == "prime" else (1024,) * 4)
    rows = NGramEmbedding(hashing, 1).rows_of(torch.randint(9, (4, 500)))
    first = 0
    for column, size in zip(rows.unbind(-1), hashing.sizes, strict=True):
        assert first <= int(column.min())
        assert int(column.max()) < first + size
        first += size
    assert rows[..., -1].unique().numel() > 300, "of 729 triples"


def test_conversions_of_a_model_do_not_change_the_hash() -> None:
    with torch.device("meta"):
        table = NGramEmbedding(HASHING, 3)
    ids = torch.randint(VOCAB, (1, 9))
    assert torch.equal(table.rows_of(ids), TABLE.rows_of(ids)), "no memory is needed for the rows of a batch"
    with refuses(ShapeError, "rows on cpu of a table on meta"):
        table(ids)
    table.to_empty(device="cpu")
    table.load_state_dict({"weight": TABLE.weight})
    assert torch.equal(table(ids), TABLE(ids))
    assert torch.equal(table.half().rows_of(ids), TABLE.rows_of(ids))


@pytest.mark.unchecked
def test_the_look_up_compiles_in_one_piece() -> None:
    ids, mask = torch.randint(VOCAB, (2, 9)), torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    compiled = torch.compile(TABLE, fullgraph=True, backend="aot_eager")
    for positions in (None, Positions.from_mask(mask)):
        assert torch.equal(compiled(ids, positions), TABLE(ids, positions))


def test_the_input_embedding_adds_a_table_of_its_width() -> None:
    table = NGramEmbedding(HASHING, 4, combine="sum")
    embedding, ids = InputEmbedding(VOCAB, 4, ngrams=table), torch.randint(VOCAB, (1, 6))
    expected = F.embedding(ids, embedding.token.weight)
    for column in table.read(table.rows_of(ids)).unbind(-2):
        expected = expected + column
    assert torch.equal(embedding(ids), expected)
    assert {name for name, _ in embedding.named_parameters()} == {"token.weight", "ngrams.weight"}
    with refuses(ShapeError, "n-grams of width 18", "combine='sum'"):
        InputEmbedding(VOCAB, 4, ngrams=TABLE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"orders": (2,)}, ["1 orders, 2 sizes"]),
        ({"multipliers": ((1,), (1, 2, 3))}, ["1 multipliers for an order of 2"]),
        ({"sizes": (5, 0)}, ["a size"]),
        ({"operation": "product"}, ["expected 'xor' or 'sum'"]),
    ],
)
def test_a_hash_that_does_not_fit_is_an_error(change: dict[str, Any], words: list[str]) -> None:
    right: dict[str, Any] = {"orders": (2, 3), "sizes": (5, 7), "multipliers": ((1, 2), (1, 2, 3)), "vocab_size": 9}
    NGramHash(**right)
    with refuses(RangeError, *words):
        NGramHash(**{**right, **change})


def test_a_table_that_does_not_fit_its_hash_is_an_error() -> None:
    with refuses(RangeError, "num_rows"):
        NGramEmbedding(HASHING, 3, num_rows=HASHING.num_rows - 1)
    with refuses(RangeError, "expected an NGramHash"):
        NGramEmbedding(3, 3)  # type: ignore[arg-type]
    with refuses(RangeError, "in token_map"):
        NGramEmbedding(HASHING, 3, token_map=np.array([0, VOCAB]))
    with refuses(ShapeError, "one integer for each id"):
        NGramEmbedding(HASHING, 3, token_map=np.zeros((2, 2)))


def test_explain_prints_the_tables(tmp_path: Path) -> None:
    from locant.checkpoints.explanation import explain

    (tmp_path / "config.json").write_text(json.dumps({**QWEN, "model_type": "qwen4_exp_text"}), encoding="utf-8")
    sizes = {size.name: size.shape for size in explain({**QWEN, "model_type": "qwen4_exp_text"}).tables}
    assert sizes["n-grams of layer 0"] == (256, 6)
    assert sizes["n-grams of layer 2"] == (384, 6)
    assert {size.name for size in explain({**BLT, "model_type": "blt"}).tables} == {"tokens", "n-grams"}


def test_a_map_of_ids_keeps_its_values_on_the_meta_device() -> None:
    token_map = np.arange(VOCAB)[::-1]
    with torch.device("meta"):
        table = NGramEmbedding(HASHING, 3, token_map=token_map)
    ids = torch.randint(VOCAB, (1, 9))
    assert torch.equal(table.rows_of(ids), TABLE.rows_of(VOCAB - 1 - ids))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"multipliers": ((1, 2**63),)}, "a multiplier"),
        ({"multipliers": ((1, 2.5),)}, "2.5 for a multiplier"),
        ({"multipliers": (1, 2)}, "multipliers"),
        ({"orders": 2}, "2 for orders"),
        ({"fill": 1.5}, "1.5 for fill"),
        ({"fill": 2**63}, "for fill"),
        ({"end": "x"}, "'x' for end"),
    ],
)
def test_a_hash_of_other_numbers_is_refused(wrong: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {"orders": (2,), "sizes": (5,), "multipliers": ((1, 3),), "vocab_size": 9}
    with shapes_unchecked(), pytest.raises(LocantError, match=re.escape(words)):
        NGramHash(**options | wrong)


def test_a_hash_may_come_from_json_whose_lists_are_not_tuples() -> None:
    options: dict[str, Any] = {"orders": [2], "sizes": [5], "multipliers": [[1, 3]], "vocab_size": 9}
    windows = torch.tensor([[[7, 3]]])
    expected = NGramHash(orders=(2,), sizes=(5,), multipliers=((1, 3),), vocab_size=9)
    with shapes_unchecked():
        found = NGramHash(**options)
    assert found == expected
    assert torch.equal(found.rows(windows), expected.rows(windows))
