"""Positions that are left out are 0, 1, 2, ..., and refused where they could be others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.export import Dim

from locant import (
    ALiBi,
    GridBias,
    InputEmbedding,
    Learned,
    LearnedGrid,
    LocantError,
    PositionEncoding,
    Positions,
    RangeError,
    Rotary,
    ShapeError,
    Sinusoidal,
    attend,
)
from locant.positions import ModelShape
from locant.positions.base import reads_hidden_states
from locant.positions.registry import encodings
from tests import oracles
from tests.refusal import refuses
from tests.tolerances import assert_close

SHAPE = ModelShape(d_model=12, num_heads=3, max_seq_len=8)
LENGTH = 5


def built(name: str) -> PositionEncoding:
    encoding = encodings()[name].for_model(SHAPE)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_()
    return encoding


TEXT = [name for name, kind in encodings().items() if name != "rotary_by_head"]  # its groups are of three axes
BLIND = [name for name in TEXT if not reads_hidden_states(built(name))]


def queries(n: int = LENGTH) -> Tensor:
    return torch.randn(2, 3, n, 4)


def same(left_out: Any, given: Any) -> None:
    parts = zip(left_out, given, strict=True) if isinstance(given, tuple) else [(left_out, given)]
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in parts)


@pytest.mark.parametrize("name", BLIND)
def test_every_method_of_every_encoding_counts_from_0(name: str) -> None:
    encoding, q, k, x = built(name), queries(), queries(), torch.randn(2, LENGTH, 12)
    where, embeds = Positions.arange(LENGTH), "embed" in encoding.methods()
    same(encoding.embed(x), encoding.embed(x, where))
    same(encoding.bias(q, k), encoding.bias(q, k, where))
    same(encoding.rotate(q, k), encoding.rotate(q, k, where))
    same(attend(q, k, k, encoding=encoding), attend(q, k, k, encoding=encoding, positions=where))
    assert (encoding.score_mod(q, k) is None) is (encoding.score_mod(q, k, where) is None)
    if "unrotate" in encoding.methods():
        same(encoding.unrotate(q), encoding.unrotate(q, where))
    if "rotate" in encoding.methods() and hasattr(encoding, "rotate_one") and name != "xpos":
        same(encoding.rotate_one(q), encoding.rotate_one(q, where))  # type: ignore[operator]
    if embeds and len(encoding.methods()) == 1:
        same(encoding(x), encoding.embed(x, where))


@pytest.mark.parametrize("name", BLIND)
def test_a_single_token_needs_positions(name: str) -> None:
    """Every method that looks at positions refuses it, in the same words."""
    encoding, q = built(name), queries(1)
    methods = {
        "embed": lambda: encoding.embed(torch.randn(2, 1, 12)),
        "rotate": lambda: encoding.rotate(q, q),
        "bias": lambda: encoding.bias(q, q),
        "unrotate": lambda: encoding.unrotate(q),
    }
    for method in encoding.methods():
        with refuses(LocantError, "it may be anywhere", "Positions.after(cache_len, 1)"):
            methods[method]()
    with refuses(LocantError, "it may be anywhere"):
        attend(q, q, q, encoding=encoding)


@pytest.mark.parametrize("name", [name for name in BLIND if {"rotate", "bias"} & {*encodings()[name].methods()}])
@pytest.mark.parametrize("lengths", [(1, 5), (4, 5), (6, 5)])
def test_unequal_numbers_of_queries_and_keys_need_positions(name: str, lengths: tuple[int, int]) -> None:
    encoding, (q, k) = built(name), map(queries, lengths)
    (method,) = {"rotate", "bias"} & {*encoding.methods()} or {"bias"}
    for call in (getattr(encoding, method), lambda q, k: attend(q, k, k, encoding=encoding)):
        with refuses(LocantError, f"{lengths[0]} queries and {lengths[1]} keys", "queries may be anywhere"):
            call(q, k)


def test_positions_of_keys_alone_are_not_enough() -> None:
    q, where = queries(), Positions.after(2, LENGTH)
    for call in (Rotary(4).rotate, ALiBi(3).bias, ALiBi(3).score_mod):
        with refuses(LocantError, "k_positions without positions"):
            call(q, q, k_positions=where)
    with refuses(LocantError, "k_positions without positions"):
        attend(q, q, q, k_positions=where)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: Rotary(4, sections=(1, 1)).rotate(x, x),
        lambda x: Rotary(4, sections=(1, 1), axial=True).rotate_one(x),
        lambda x: Rotary(4, sections=(1, 1)).unrotate(x),
        lambda x: built("rotary_by_head").rotate(x, x),
        lambda x: GridBias(3, 2, 8).bias(x, x),
        lambda x: attend(x, x, x, encoding=GridBias(3, 2, 8)),
        lambda x: encodings()["rope_mixed"](4, 3, num_axes=2).rotate_one(x),
    ],
)
def test_encodings_with_several_axes_need_positions(call: Callable[[Tensor], Any]) -> None:
    with refuses(LocantError, "axes", "Positions.grid("):
        call(queries())


def test_a_table_of_cells_asks_for_its_grid() -> None:
    with refuses(ShapeError, "without a grid", "Positions.grid("):
        LearnedGrid(2, 3, 12).embed(torch.zeros(1, 6, 12))


def test_errors_for_wrong_tensors_without_positions() -> None:
    for call in (Rotary(4).rotate, ALiBi(3).bias):
        with refuses(ShapeError, "q of type list", "expected a tensor"):
            call([1.0], queries())  # type: ignore[arg-type]
        with refuses(ShapeError, "got k of shape (2, 3)"):
            call(queries(), torch.zeros(2, 3))
    with refuses(ShapeError, "got None for k", "rotate_one"):
        Rotary(4).rotate(queries(), None)  # type: ignore[arg-type]
    with refuses(ShapeError, "got a tensor of int64, expected token embeddings", "TokenEmbedding for ids"):
        Learned(8, 12)(torch.arange(4))
    with refuses(ShapeError, "x of type list"):
        Sinusoidal(12)([1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("positions", [5, torch.arange(5), [0, 1, 2, 3, 4]])
def test_a_number_of_positions_is_not_accepted_with_tensors(positions: Any) -> None:
    with refuses(LocantError, "expected Positions"):
        Rotary(4).rotate(queries(), queries(), positions)


# ---------------------------------------------------------------------- beside formulas


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("heads", [3, None])
def test_rotations_are_those_of_the_paper_forward_and_backward(layout: str, heads: int | None) -> None:
    """With heads, and without: ``batch seq head_dim``."""
    shape = (2, LENGTH, 6) if heads is None else (2, heads, LENGTH, 6)
    q, k, of_q, of_k = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(4))
    rotary, (cos, sin) = Rotary(6, layout=layout), oracles.angles(np.arange(LENGTH), 6, 10_000.0)
    rotated = rotary.rotate(q, k)
    expected = functools.partial(_rotate_tensor, cos=cos, sin=sin, layout=layout)
    for ours, x in zip((*rotated, rotary.rotate_one(q)), (q, k, q), strict=True):
        assert ours.shape == x.shape
        assert_close(ours, expected(x))
    assert_close(rotary.unrotate(rotated[0]), q)
    # The matrix is orthogonal, so the gradient is the cotangent turned back.
    gradients = torch.autograd.grad(rotated, (q, k), (of_q, of_k))
    for ours, cotangent in zip(gradients, (of_q, of_k), strict=True):
        assert_close(ours, _rotate_tensor(cotangent, cos, -sin, layout))


def _rotate_tensor(x: Tensor, cos: np.ndarray, sin: np.ndarray, layout: str) -> Tensor:
    four = x.detach().numpy().reshape(2, -1, LENGTH, 6)
    return torch.from_numpy(oracles.rotate(four, cos, sin, layout)).view(x.shape)


def test_tensors_without_heads_equal_one_head() -> None:
    where, encoding = Positions.packed([[2, 3], [5]]), Rotary(8, rotary_dim=4, scaling="yarn:4")
    q, k = torch.randn(2, LENGTH, 8), torch.randn(2, LENGTH, 8)
    expected = [x[:, 0] for x in encoding.rotate(q[:, None], k[:, None], where)]
    same(encoding.rotate(q, k, where), tuple(expected))
    memory = q.clone(), k.clone()
    same(encoding.rotate(*memory, where, inplace=True), tuple(expected))
    same(memory, tuple(expected))
    with refuses(ShapeError, "(batch, heads, seq, head_dim=8)"):
        encoding.rotate(q, k[:, None], where)
    with refuses(LocantError, "it may be anywhere"):
        encoding.rotate_one(q[:, :1])


def test_attention_is_that_of_the_formula() -> None:
    q, k, v = (torch.randn(2, 4, LENGTH, 6, dtype=torch.float64) for _ in range(3))
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    bias = -np.array(oracles.alibi_slopes(4))[:, None, None] * np.abs(distance)
    seen = np.broadcast_to(distance >= 0, (2, LENGTH, LENGTH))
    expected, _ = oracles.attention(q.numpy(), k.numpy(), v.numpy(), np.stack([bias, bias]), seen, 6**-0.5)
    assert_close(attend(q, k, v, encoding=ALiBi(4)), torch.from_numpy(expected))


@pytest.mark.parametrize("lengths", [(1, 5), (4, 5), (5, 5), (6, 5), (1, 1)])
def test_cross_attention_without_a_bias_needs_no_positions(lengths: tuple[int, int]) -> None:
    """Cross-attention: every query sees every key."""
    q, k = (torch.randn(2, 3, length, 4, dtype=torch.float64, requires_grad=True) for length in lengths)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k)
    y, cotangent = attend(q, k, k, causal=False), torch.randn(2, 3, lengths[0], 4, dtype=torch.float64)
    assert_close(y, expected)
    for mine, theirs in zip(*(torch.autograd.grad(each, (q, k), cotangent) for each in (y, expected)), strict=True):
        assert_close(mine, theirs)
    if lengths[0] != lengths[1]:
        for option in ({}, {"causal": False, "window": 9}, {"causal": False, "encoding": ALiBi(3)}):
            with refuses(LocantError, "queries may be anywhere"):
                attend(q, k, k, **option)


def test_a_number_is_a_length_in_methods_without_tokens() -> None:
    vectors = Sinusoidal(6).vectors(10, torch.float64)[0]
    assert_close(vectors, torch.from_numpy(oracles.sinusoidal(range(10), 6)))
    angles = Rotary(6).cos_sin(10, torch.float64), oracles.angles(np.arange(10), 6, 10_000.0)
    for ours, wanted in zip(*angles, strict=True):
        assert_close(ours[0], torch.from_numpy(wanted))
    same(Rotary(6).cos_sin(1, torch.float64), Rotary(6).cos_sin(Positions.arange(1), torch.float64))
    for wrong in (-1, True, 2**40):
        with refuses(RangeError, str(wrong)):
            Sinusoidal(6).vectors(wrong)
    for wrong in (None, 2.0, torch.arange(3)):
        with refuses(LocantError, "expected Positions"):
            Rotary(6).cos_sin(wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- an author's own


class Even(PositionEncoding):
    """As the documentation has one write it: it is given positions."""

    def embed(self, x: Tensor, positions: Positions) -> Tensor:  # type: ignore[override]
        return x + (positions.index % 2)[..., None]


def test_a_new_encoding_receives_positions() -> None:
    x = torch.zeros(1, 3, 2)
    assert Even()(x)[0, :, 0].tolist() == [0, 1, 0]
    embedding = InputEmbedding(7, 2, encoding=Even())
    same(embedding([1, 1, 1])[0, 1], embedding.token.weight[1] + 1)
    with refuses(LocantError, "it may be anywhere"):
        Even()(x[:, :1])


# ---------------------------------------------------------------------- in graphs


class Model(nn.Module):
    """Every method, without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.learned, self.rotary, self.alibi = Learned(64, 12), Rotary(4), ALiBi(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.learned.embed(x)
        heads = x.unflatten(-1, (3, 4)).transpose(1, 2)
        q, k = self.rotary.rotate(heads, self.rotary.rotate_one(heads))
        y = attend(q, k, self.rotary.unrotate(heads), encoding=self.alibi)
        return y.transpose(1, 2).flatten(2) + self.alibi.bias(q, k).sum()


@pytest.fixture
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.unchecked
@pytest.mark.usefixtures("_fresh")
def test_all_lengths_take_two_graphs_without_a_break() -> None:
    model, counter = Model(), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for n in (5, 7, 2, 30):
            x = torch.randn(2, n, 12)
            same(compiled(x), model(x))
    assert 1 <= counter.frame_count <= 2


@pytest.mark.unchecked
def test_an_exported_program_counts_any_number_of_tokens() -> None:
    sizes = ({0: Dim("batch"), 1: Dim("seq", min=2, max=64)},)
    program = torch.export.export(Model(), (torch.randn(2, 5, 12),), dynamic_shapes=sizes, strict=False)
    model = Model()
    model.load_state_dict(program.state_dict)
    for batch, n in ((2, 5), (3, 2), (1, 64)):
        x = torch.randn(batch, n, 12)
        assert_close(program.module()(x), model(x))
