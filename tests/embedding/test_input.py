"""The input of a transformer: the shapes of the worked examples, the sum of its parts, and what is refused."""

from __future__ import annotations

import json
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings

from locant import (
    InputEmbedding,
    InputError,
    Learned,
    LocantError,
    NGramEmbedding,
    PerLayerEmbedding,
    PositionEncoding,
    Positions,
    RangeError,
    ShapeError,
    Sinusoidal,
)
from locant.embedding import NGramHash, table_sizes
from locant.positions.base import ModelShape
from locant.positions.registry import encodings
from tests.minilm import MINILM
from tests.refusal import refuses
from tests.tolerances import assert_close


def test_eight_rows_of_four_tokens() -> None:
    """The worked example: ``[8, 4] -> [8, 4, 256] + [4, 256] -> [8, 4, 256]``."""
    embedding = InputEmbedding(50_257, 256, encoding=Learned(4, 256))
    ids = torch.randint(50_257, (8, 4))
    rows, table = embedding.token(ids), embedding.encoding.weight
    assert (ids.shape, rows.shape, table.shape) == ((8, 4), (8, 4, 256), (4, 256))
    assert torch.equal(embedding(ids), rows + table)


def test_parameters_of_a_large_table_with_two_segments() -> None:
    with torch.device("meta"):
        embedding = InputEmbedding(128_000, 8_192, num_segments=2)
    assert sum(size.num_parameters for size in table_sizes(embedding)) == 1_048_592_384
    assert embedding(torch.zeros(8, 4, dtype=torch.long, device="meta")).shape == (8, 4, 8_192)


def randomize(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()


def test_a_published_checkpoint_gives_what_bert_gives() -> None:
    """The real weights of all-MiniLM-L6-v2, from the package that ships them; small models: `test_pretrained`."""
    weights = {name.removeprefix("embeddings."): w for name, w in load_file(MINILM / "model.safetensors").items()}
    theirs = BertEmbeddings(BertConfig(**json.loads((MINILM / "config.json").read_text(encoding="utf-8")))).eval()
    theirs.load_state_dict({name: weights[name] for name in theirs.state_dict()})
    ours = InputEmbedding.from_pretrained(MINILM)
    assert [tuple(s.shape) for s in table_sizes(ours)[:3]] == [(30_522, 384), (512, 384), (2, 384)]
    ids, late = torch.randint(30_522, (2, 61)), Positions.after(451, 61)
    with torch.no_grad():
        assert_close(ours(ids), theirs(ids))
        assert_close(ours(ids, late), theirs(ids, position_ids=late.index))


def test_the_parts_are_added_in_the_documented_order() -> None:
    """Scale on the token rows alone, then segment, position, norm, dropout."""
    embedding = InputEmbedding(
        11, 6, encoding=Sinusoidal(6), num_segments=3, scale="sqrt_d_model", norm="layer_norm", padding_idx=2
    ).double()
    randomize(embedding)
    ids, segments, positions = torch.randint(11, (2, 5)), torch.randint(3, (2, 5)), Positions.after([3, 1000], 5)
    total = embedding.token.weight[ids] * 6**0.5 + embedding.encoding.vectors(positions, torch.float64)
    total = total + embedding.segment.weight[segments]
    mean, variance = total.mean(-1, keepdim=True), total.var(-1, unbiased=False, keepdim=True)
    norm = embedding.norm
    assert isinstance(norm, nn.LayerNorm)
    expected = (total - mean) / (variance + 1e-5).sqrt() * norm.weight + norm.bias
    assert_close(embedding(ids, positions, segments), expected)


def test_without_positions_rows_count_from_zero_and_without_segments_all_are_in_the_first() -> None:
    embedding = InputEmbedding(11, 6, encoding=Learned(9, 6), num_segments=2)
    ids = torch.randint(11, (2, 5))
    assert torch.equal(embedding(ids), embedding(ids, Positions.arange(5), torch.zeros(2, 5, dtype=torch.long)))
    assert not torch.equal(embedding(ids), embedding(ids, Positions.after(1, 5)))
    assert not torch.equal(embedding(ids), embedding(ids, segments=torch.ones(2, 5, dtype=torch.long)))
    embedding(ids).sum().backward()
    assert embedding.segment.weight.grad.any(1).tolist() == [True, False]


def test_segments_may_be_called_token_type_ids() -> None:
    embedding, ids, segments = (
        InputEmbedding(11, 6, num_segments=2),
        torch.randint(11, (2, 5)),
        torch.randint(2, (2, 5)),
    )
    assert torch.equal(
        embedding(ids, token_type_ids=segments), embedding.token(ids) + embedding.segment.weight[segments]
    )
    with refuses(LocantError, "both segments and token_type_ids"):
        embedding(ids, segments=segments, token_type_ids=segments)


@pytest.mark.parametrize("encoding", [None, PositionEncoding(), "nope"], ids=repr)
def test_without_positions_the_token_rows_are_all_there_is(encoding: PositionEncoding | str | None) -> None:
    embedding, ids = InputEmbedding(11, 6, encoding=encoding), torch.randint(11, (2, 5))
    assert torch.equal(embedding(ids), embedding.token(ids))


class OnlyScores(PositionEncoding):
    def score_bias(self, q, k, queries, keys, heads=None):
        raise NotImplementedError


ATTENDING = [kind for kind in encodings().values() if kind.methods() and "embed" not in kind.methods()]


@pytest.mark.parametrize("kind", [*ATTENDING, OnlyScores], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("combine", ["add", "concat"])
def test_an_encoding_that_acts_in_attention_alone_is_refused_with_what_to_do(
    kind: type[PositionEncoding], combine: Literal["add", "concat"]
) -> None:
    shape = ModelShape(d_model=48, num_heads=4, max_seq_len=16)
    rotates = kind.rotate is not PositionEncoding.rotate
    with pytest.raises(RangeError, match="adds nothing to embeddings, but acts in attention") as refused:
        InputEmbedding(11, 48, encoding=kind.for_model(shape), combine=combine)
    assert "attend(q, k, v, encoding=encoding" in refused.value.remedy
    assert ("rotate=True" in refused.value.remedy) == rotates


def test_an_encoding_that_acts_in_attention_is_refused_by_its_name() -> None:
    assert len(ATTENDING) > 20
    with pytest.raises(RangeError, match="got encoding=Rotary, which adds nothing"):
        InputEmbedding(11, 48, encoding="rope")


def test_gradients_reach_every_table() -> None:
    embedding = InputEmbedding(5, 4, encoding=Learned(3, 4), num_segments=2, scale=1.7, norm="layer_norm").double()
    randomize(embedding)
    names = [name for name, _ in embedding.named_parameters()]
    ids, segments, positions = torch.tensor([[0, 4, 4]]), torch.tensor([[0, 1, 1]]), Positions.of([[2, 2, 0]])

    def through(*weights: Tensor) -> Tensor:
        return torch.func.functional_call(embedding, dict(zip(names, weights, strict=True)), (ids, positions, segments))

    assert torch.autograd.gradcheck(through, tuple(embedding.parameters()))


def test_vectors_embedded_elsewhere_get_everything_but_the_scale() -> None:
    options = {"encoding": Sinusoidal(6), "num_segments": 2, "norm": "layer_norm"}
    embedding = InputEmbedding(11, 6, scale=100.0, **options)
    x, positions, segments = torch.randn(2, 5, 6), Positions.packed([2, 3]), torch.randint(2, (2, 5))
    ids = torch.randint(11, (2, 5))
    assert torch.equal(
        embedding.combine(embedding.token(ids), positions, segments), embedding(ids, positions, segments)
    )
    unscaled = InputEmbedding(11, 6, **options)
    unscaled.load_state_dict(embedding.state_dict())
    assert torch.equal(embedding.combine(x, positions, segments), unscaled.combine(x, positions, segments))


def test_any_module_may_be_the_norm() -> None:
    norm = nn.RMSNorm(6)
    embedding, ids = InputEmbedding(11, 6, norm=norm), torch.randint(11, (2, 5))
    assert torch.equal(embedding(ids), norm(embedding.token(ids)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_cast_model_stays_in_its_dtype(dtype: torch.dtype) -> None:
    embedding = InputEmbedding(
        11, 6, encoding=Sinusoidal(6), num_segments=2, scale="sqrt_d_model", norm="layer_norm"
    ).to(dtype)
    assert embedding(torch.randint(11, (2, 5))).dtype == dtype


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (2, 1)])
def test_empty_and_single_tokens_are_embedded(shape: tuple[int, int]) -> None:
    embedding = InputEmbedding(11, 6, encoding=Learned(9, 6), num_segments=2, norm="layer_norm")
    x = embedding(torch.zeros(shape, dtype=torch.long), Positions.after(3, shape[1]))
    assert x.shape == (*shape, 6)
    x.sum().backward()


@pytest.mark.parametrize("shape", [(), (2, 3, 5)])
def test_ids_without_batch_and_sequence_are_refused(shape: tuple[int, ...]) -> None:
    with refuses(ShapeError, str(shape), "(batch, seq)"):
        InputEmbedding(11, 6)(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("shape", [(5, 6), (6,), (2, 3, 5, 6)])
def test_vectors_without_batch_and_sequence_are_refused(shape: tuple[int, ...]) -> None:
    with refuses(ShapeError, str(shape)):
        InputEmbedding(11, 6).combine(torch.zeros(shape))


def test_positions_and_segments_of_other_tokens_are_refused() -> None:
    embedding, ids = InputEmbedding(11, 6, num_segments=2), torch.zeros(2, 5, dtype=torch.long)
    with refuses(ShapeError, "1 x 4", "2 x 5"):
        embedding(ids, Positions.arange(4))
    with refuses(ShapeError, "meta", "cpu"):
        embedding(ids, Positions.arange(5, device="meta"))
    with refuses(ShapeError, "(1, 5)", "(2, 5)"):
        embedding(ids, segments=torch.zeros(1, 5, dtype=torch.long))
    with refuses(RangeError, "id 2 at (1, 3)", "num_segments=2"):
        embedding(ids, segments=torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 2, 0]]))


def test_segments_without_a_table_are_refused() -> None:
    with refuses(LocantError, "segments", "num_segments=2"):
        InputEmbedding(11, 6)(torch.zeros(2, 5, dtype=torch.long), segments=torch.zeros(2, 5, dtype=torch.long))


def test_an_encoding_of_another_width_is_refused() -> None:
    with refuses(ShapeError, "d_model=8", "d_model=6", "Sinusoidal(d_model=6)"):
        InputEmbedding(11, 6, encoding=Sinusoidal(8))


def test_an_unknown_norm_or_encoding_is_refused() -> None:
    with refuses(RangeError, "got 'rms' for norm", "'layer_norm'"):
        InputEmbedding(11, 6, norm="rms")
    with refuses(RangeError, "int", "PositionEncoding"):
        InputEmbedding(11, 6, encoding=6)


@pytest.mark.parametrize("encoding", [Sinusoidal(6), Learned(9, 6)])
def test_position_can_be_concatenated(encoding: PositionEncoding) -> None:
    embedding = InputEmbedding(11, 10, encoding=encoding, combine="concat", num_segments=2, scale=3.0)
    ids, segments = torch.tensor([[1, 7, 3], [0, 0, 10]]), torch.tensor([[0, 1, 1], [0, 0, 0]])
    positions = Positions.from_mask(torch.tensor([[0, 1, 1], [1, 1, 1]]))
    tokens = 3.0 * embedding.token.weight[ids]
    place = encoding.embed(torch.zeros(2, 3, 6), positions)
    expected = torch.cat([tokens, place], -1) + embedding.segment.weight[segments]
    assert embedding.token.d_model == 4
    assert torch.equal(embedding(ids, positions, segments), expected)


@pytest.mark.parametrize("encoding", [None, Sinusoidal(10), PositionEncoding()])
def test_what_cannot_be_concatenated_is_refused(encoding: PositionEncoding | None) -> None:
    with refuses(RangeError, "combine='concat'"):
        InputEmbedding(11, 10, encoding=encoding, combine="concat")


def test_init_std_is_that_of_fresh_rows_and_of_resized_ones() -> None:
    embedding = InputEmbedding(2_000, 64, init_std=0.02)
    embedding.token.resize(4_000)
    assert all(0.0197 < float(rows.detach().std()) < 0.0203 for rows in embedding.token.weight.split(2_000))
    with refuses(RangeError, "init_std"):
        InputEmbedding(5, 4, init_std=-1.0)


def test_resize_warns_of_a_weight_that_another_module_shares() -> None:
    embedding, head = InputEmbedding(10, 4), nn.Linear(4, 10, bias=False)
    state = embedding.state_dict(keep_vars=True)  # holds the weight too, and is no module
    embedding.token.resize(11)
    assert len(state["token.weight"]) == 10
    head.weight = embedding.token.weight  # type: ignore[assignment]
    with pytest.warns(
        UserWarning, match="Linear shares this weight, and keeps the old weight of 11 rows; try: give it"
    ):
        embedding.token.resize(12)


@torch.no_grad()
@pytest.mark.parametrize("outside_row", [None, 0])
def test_resize_grows_every_table_of_tokens_and_changes_no_output(outside_row: int | None) -> None:
    """A per-layer table may have fewer rows than the token table (Gemma 3n). Then some old ids get rows, too."""
    hashing = NGramHash.of(orders=(2, 3), heads=2, size=50, vocab_size=11)
    embedding = InputEmbedding(
        11, 8, ngrams=NGramEmbedding(hashing, 8, combine="sum"),
        per_layer=PerLayerEmbedding(11 if outside_row is None else 9, 2, 3, 8, outside_row=outside_row),
    )  # fmt: skip
    assert embedding.per_layer is not None
    ids = torch.randint(0, 11, (2, 9))
    before = embedding(ids), embedding.per_layer(ids, embedding(ids))
    embedding.resize(13)
    after = embedding(ids), embedding.per_layer(ids, embedding(ids))
    assert all(map(torch.equal, after, before))
    assert (embedding.token.vocab_size, len(embedding.per_layer.weight)) == (13, 13)
    fresh = embedding.per_layer.weight[-2:]
    assert torch.equal(fresh, fresh[:1].expand_as(fresh)) == (outside_row is not None)
    new = torch.tensor([[12, 3, 11]])
    assert bool(embedding.per_layer(new, embedding(new)).isfinite().all())
    with refuses(RangeError, "13 or more"):
        embedding.resize(12)


def test_resize_refuses_ids_that_a_token_map_does_not_have() -> None:
    hashing = NGramHash.of(orders=(2,), heads=2, size=50, vocab_size=5)
    ngrams = NGramEmbedding(hashing, 8, combine="sum", token_map=torch.arange(11) % 5)
    embedding = InputEmbedding(11, 8, ngrams=ngrams)
    embedding.resize(11)
    with refuses(InputError, "token_map", "new tokenizer"):
        embedding.resize(12)
    assert embedding.token.vocab_size == 11
