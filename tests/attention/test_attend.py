"""`attend`, against attention written out in NumPy with float64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from locant import (
    ALiBi,
    KVCache,
    LocantError,
    PositionEncoding,
    Positions,
    RangeError,
    Rotary,
    ShapeError,
    T5Bias,
    attend,
)
from tests import oracles
from tests.refusal import refuses
from tests.tolerances import assert_close

BACKENDS = ["sdpa", "tiled", "eager"]
BATCH, HEADS, HEAD_DIM, VALUE_DIM = 2, 6, 5, 7

ENCODINGS: dict[str, Callable[[], PositionEncoding | None]] = {
    "none": lambda: None,
    "nope": PositionEncoding,
    "alibi": lambda: ALiBi(HEADS),
    "t5": lambda: T5Bias(HEADS, num_buckets=8, max_distance=11, bidirectional=True),
}


@dataclass(frozen=True)
class Case:
    """Who attends to whom."""

    positions: Positions
    k_positions: Positions | None = None
    causal: bool = True
    window: int | None = None

    @property
    def keys(self) -> Positions:
        return self.positions if self.k_positions is None else self.k_positions


LEFT = Positions.from_mask(torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]]))
CASES: dict[str, Case] = {
    "causal": Case(Positions.arange(8)),
    "everything": Case(Positions.arange(8), causal=False),
    "window": Case(Positions.arange(8), window=3),
    "window both ways": Case(Positions.arange(8, batch=2), window=3, causal=False),
    "packed": Case(Positions.packed([[3, 0, 1, 4], [6, 1]], length=9)),
    "packed both ways": Case(Positions.packed([[3, 0, 1, 4], [6, 1]], length=9), causal=False),
    "left padding": Case(LEFT),
    "left padding both ways": Case(LEFT, causal=False),
    "holes": Case(Positions.from_mask(torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 0, 1]]))),
    "nothing but padding": Case(Positions.from_mask(torch.tensor([[0, 0, 0, 0], [1, 1, 0, 1]]))),
    "behind a cache": Case(Positions.after(5, 3), Positions.arange(8)),
    "one query": Case(Positions.after(7, 1), Positions.arange(8)),
    "behind caches of two lengths": Case(Positions.after([2, 5], 3), Positions.arange(8)),
    "fewer keys than queries": Case(Positions.arange(5), Positions.arange(3)),
    "more keys than queries": Case(Positions.arange(3), Positions.arange(5)),
    "keys that come later": Case(Positions.arange(3), Positions.after(2, 5)),
    "keys all later": Case(Positions.arange(3), Positions.after(3, 5)),
    "cross attention": Case(Positions.arange(4), Positions.arange(9), causal=False),
    "cross attention to padded keys": Case(
        Positions.after(3, 2), Positions.from_mask(LEFT.document >= 0), causal=False
    ),
    "backwards": Case(Positions.of([[4, 3, 2, 1, 0]])),
    "one token": Case(Positions.arange(1)),
}


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def draw(cls, case: Case, kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> Inputs:
        def random(heads: int, seq_len: int, width: int) -> Tensor:
            return torch.randn(BATCH, heads, seq_len, width, dtype=torch.float64).to(dtype).requires_grad_()

        keys = case.keys.seq_len
        return cls(
            random(HEADS, case.positions.seq_len, HEAD_DIM),
            random(kv_heads, keys, HEAD_DIM),
            random(kv_heads, keys, VALUE_DIM),
        )

    def arrays(self) -> list[np.ndarray]:
        return [t.detach().double().numpy() for t in (self.q, self.k, self.v)]


def seen_by(case: Case) -> np.ndarray:
    wide, keys = case.positions.expand(BATCH), case.keys.expand(BATCH)
    return oracles.is_allowed(
        wide.index.numpy(), wide.document.numpy(), keys.index.numpy(), keys.document.numpy(),
        causal=case.causal, window=case.window,
    )  # fmt: skip


def bias_of(name: str, encoding: PositionEncoding | None, case: Case) -> np.ndarray:
    """The bias entry by entry, from its definition (buckets from the encoding, which `test_t5` holds against T5)."""
    wide, keys = case.positions.expand(BATCH), case.keys.expand(BATCH)
    steps = wide.index[:, :, None] - keys.index[:, None, :]
    if name == "alibi":
        slopes = np.array(oracles.alibi_slopes(HEADS))
        return -slopes[None, :, None, None] * np.abs(steps.numpy())[:, None]
    if isinstance(encoding, T5Bias):
        return encoding.weight.detach().double().numpy()[encoding.buckets(steps).numpy()].transpose(0, 3, 1, 2)
    return np.zeros((BATCH, HEADS, *steps.shape[1:]))


def run(case: Case, inputs: Inputs, encoding: PositionEncoding | None, backend: str, **options: object) -> Tensor:
    return attend(
        inputs.q, inputs.k, inputs.v, encoding=encoding, positions=case.positions, k_positions=case.k_positions,
        causal=case.causal, window=case.window, backend=backend, **options,
    )  # fmt: skip


def built(name: str, dtype: torch.dtype) -> PositionEncoding | None:
    encoding = ENCODINGS[name]()
    if isinstance(encoding, T5Bias):
        torch.nn.init.normal_(encoding.weight)
    return encoding if encoding is None else encoding.to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("encoding_name", ENCODINGS)
@pytest.mark.parametrize("case_name", CASES)
def test_outputs_and_gradients_are_those_of_numpy(case_name: str, encoding_name: str, backend: str) -> None:
    case, encoding = CASES[case_name], built(encoding_name, torch.float64)
    inputs = Inputs.draw(case)
    bias, seen = bias_of(encoding_name, encoding, case), seen_by(case)
    arrays, scale = inputs.arrays(), HEAD_DIM**-0.5
    y = run(case, inputs, encoding, backend)
    assert_close(y, torch.from_numpy(oracles.attention(*arrays, bias, seen, scale)[0]))
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    expected = oracles.attention_gradients(*arrays, bias, seen, scale, cotangent.numpy())
    for tensor, wanted in zip((inputs.q, inputs.k, inputs.v), (expected.q, expected.k, expected.v), strict=True):
        assert tensor.grad is not None
        assert_close(tensor.grad, torch.from_numpy(wanted))
    if isinstance(encoding, T5Bias):
        steps = case.positions.expand(BATCH).index[:, :, None] - case.keys.expand(BATCH).index[:, None, :]
        table = torch.zeros_like(encoding.weight)
        by_pair = torch.from_numpy(expected.bias).permute(0, 2, 3, 1).reshape(-1, HEADS)
        table.index_add_(0, encoding.buckets(steps).flatten(), by_pair)
        assert_close(encoding.weight.grad, table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("encoding_name", ["none", "alibi", "t5"])
@pytest.mark.parametrize("case_name", ["causal", "packed", "left padding", "behind a cache"])
def test_narrower_dtypes_agree_as_far_as_they_can(
    case_name: str, encoding_name: str, backend: str, dtype: torch.dtype
) -> None:
    case, encoding = CASES[case_name], built(encoding_name, dtype)
    inputs = Inputs.draw(case, dtype=dtype)
    bias = bias_of(encoding_name, encoding, case)
    y = run(case, inputs, encoding, backend)
    assert y.dtype == dtype
    expected, _ = oracles.attention(*inputs.arrays(), bias, seen_by(case), HEAD_DIM**-0.5)
    assert_close(y, torch.from_numpy(expected))
    y.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == dtype for t in (inputs.q, inputs.k, inputs.v))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("encoding_name", ["none", "alibi"])
def test_query_heads_share_key_heads_in_groups(encoding_name: str, kv_heads: int, backend: str) -> None:
    case, encoding = CASES["causal"], built(encoding_name, torch.float64)
    inputs = Inputs.draw(case, kv_heads)
    expected, _ = oracles.attention(
        *inputs.arrays(), bias_of(encoding_name, encoding, case), seen_by(case), HEAD_DIM**-0.5
    )
    assert_close(run(case, inputs, encoding, backend), torch.from_numpy(expected))
    if kv_heads > 1:
        flipped = Inputs(inputs.q, inputs.k.flip(1), inputs.v.flip(1))
        assert not torch.allclose(run(case, flipped, encoding, backend), torch.from_numpy(expected))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [None, 1.0, 0.25, 0.0])
def test_scores_are_scaled_before_the_bias_is_added(scale: float | None, backend: str) -> None:
    case, encoding = CASES["packed"], built("t5", torch.float64)
    inputs = Inputs.draw(case)
    factor = HEAD_DIM**-0.5 if scale is None else scale
    expected, _ = oracles.attention(*inputs.arrays(), bias_of("t5", encoding, case), seen_by(case), factor)
    assert_close(run(case, inputs, encoding, backend, scale=scale), torch.from_numpy(expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("scale", [0.0, -0.25])
@pytest.mark.parametrize("case_name", ["causal", "everything", "one query"])
def test_a_scale_may_be_zero_or_less(case_name: str, scale: float, backend: str, dtype: torch.dtype) -> None:
    """Where torch's kernels hide later tokens by minus infinity before they scale, too."""
    case = CASES[case_name]
    drawn = Inputs.draw(case, HEADS, dtype)
    inputs = Inputs(drawn.q, drawn.k, drawn.v.detach()[..., :HEAD_DIM].requires_grad_())  # as the fused kernel has them
    seen, cotangent = seen_by(case), torch.randn_like(inputs.q)
    y = run(case, inputs, None, backend, scale=scale)
    bias = bias_of("none", None, case)
    assert_close(y, torch.from_numpy(oracles.attention(*inputs.arrays(), bias, seen, scale)[0]))
    truth = oracles.attention_gradients(*inputs.arrays(), bias, seen, scale, cotangent.double().numpy())
    found = torch.autograd.grad(y, [inputs.q, inputs.k, inputs.v], cotangent)
    for gradient, wanted in zip(found, (truth.q, truth.k, truth.v), strict=True):
        if dtype in (torch.float64, torch.float32):
            assert_close(gradient, torch.from_numpy(wanted))
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("encoding_name", ["none", "alibi", "t5"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents_are_each_document_alone(backend: str, encoding_name: str) -> None:
    lengths = [3, 0, 1, 4]
    case, encoding = Case(Positions.packed(lengths)), built(encoding_name, torch.float64)
    inputs = Inputs.draw(case)
    y = run(case, inputs, encoding, backend)
    first = 0
    for n in lengths:
        part = Inputs(*(t[:, :, first : first + n] for t in (inputs.q, inputs.k, inputs.v)))
        assert_close(y[:, :, first : first + n], run(Case(Positions.arange(n)), part, encoding, backend))
        first += n


@pytest.mark.parametrize("encoding_name", ["none", "rotary", "alibi", "t5"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_rows_are_the_unpadded_rows(backend: str, side: str, encoding_name: str) -> None:
    """Whatever stands in the padding, huge numbers included."""
    encoding = Rotary(HEAD_DIM - 1) if encoding_name == "rotary" else built(encoding_name, torch.float64)
    lengths, width = [5, 8], 11
    mask = torch.stack([torch.arange(width) < n for n in lengths])
    mask = mask.flip(1) if side == "left" else mask
    x = torch.randn(BATCH, HEADS, width, HEAD_DIM - 1, dtype=torch.float64)
    x = torch.where(mask[:, None, :, None], x, 1e30)

    def through(x: Tensor, positions: Positions) -> Tensor:
        q, k = (x, x) if encoding is None else encoding.rotate(x, x, positions)
        return attend(q, k, x, encoding=encoding, positions=positions, backend=backend)

    y = through(x, Positions.from_mask(mask))
    for row, n in enumerate(lengths):
        alone = through(x[row : row + 1][:, :, mask[row]], Positions.arange(n))
        assert_close(y[row][:, mask[row]], alone[0])
        assert torch.equal(y[row][:, ~mask[row]], torch.zeros(HEADS, width - n, HEAD_DIM - 1, dtype=torch.float64))


@pytest.mark.parametrize("encoding_name", ["none", "alibi", "t5"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_that_see_nothing_give_zeros_and_finite_gradients(
    dtype: torch.dtype, backend: str, encoding_name: str
) -> None:
    case, encoding = CASES["nothing but padding"], built(encoding_name, dtype)
    inputs = Inputs.draw(case, dtype=dtype)
    y = run(case, inputs, encoding, backend)
    assert torch.equal(y[0], torch.zeros_like(y[0]))
    assert torch.equal(y[1, :, 2], torch.zeros_like(y[1, :, 2]))
    assert bool((y[1, :, [0, 1, 3]] != 0).all())
    y.backward(torch.randn_like(y))
    for tensor in (inputs.q, inputs.k, inputs.v):
        assert tensor.grad is not None
        assert bool(torch.isfinite(tensor.grad).all())
        assert torch.equal(tensor.grad[0], torch.zeros_like(tensor.grad[0]))
        assert bool((tensor.grad[1, :, 0] != 0).any()) or tensor is inputs.q


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_keys_at_all_give_zeros(backend: str) -> None:
    q, nothing = torch.randn(2, 3, 4, 5), torch.zeros(2, 3, 0, 5)
    y = attend(q, nothing, nothing, positions=Positions.arange(4), k_positions=Positions.arange(0), backend=backend)
    assert torch.equal(y, torch.zeros(2, 3, 4, 5))


@pytest.mark.parametrize("shape", [(0, 6, 3), (2, 6, 0)])
@pytest.mark.parametrize("encoding_name", ["none", "alibi", "t5"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_in_gives_nothing_out(backend: str, encoding_name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, 4, requires_grad=True)
    y = attend(
        x, x, x, encoding=built(encoding_name, torch.float32), positions=Positions.arange(shape[2]), backend=backend
    )
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("case_name", ["causal", "packed", "cross attention", "behind caches of two lengths"])
def test_weights_are_numpys_and_rows_sum_to_one(case_name: str) -> None:
    case, encoding = CASES[case_name], built("t5", torch.float64)
    inputs = Inputs.draw(case)
    y, weights = run(case, inputs, encoding, "auto", return_weights=True)
    seen = seen_by(case)
    expected, expected_weights = oracles.attention(
        *inputs.arrays(), bias_of("t5", encoding, case), seen, HEAD_DIM**-0.5
    )
    assert_close(y, torch.from_numpy(expected))
    assert_close(weights, torch.from_numpy(expected_weights))
    sums = torch.from_numpy(seen.any(-1)).double()[:, None].expand(BATCH, HEADS, -1)
    assert_close(weights.sum(-1), sums)
    assert (
        run(case, Inputs.draw(case, dtype=torch.bfloat16), built("t5", torch.bfloat16), "eager", return_weights=True)[
            1
        ].dtype
        == torch.float32
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("encoding_name", ["none", "alibi"])
def test_dropout_drops_that_share_and_scales_the_rest(encoding_name: str, backend: str) -> None:
    """With the identity as values the output is the weights, as dropped."""
    n, p = 64, 0.25
    q = torch.randn(2, 4, n, n)
    v = torch.eye(n).expand(2, 4, n, n)
    options = {
        "encoding": ALiBi(4) if encoding_name == "alibi" else None,
        "positions": Positions.arange(n),
        "causal": False,
    }
    plain = attend(q, q, v, backend=backend, **options)
    dropped = attend(q, q, v, backend=backend, dropout_p=p, **options)
    solid = plain > 1e-12  # beyond that, exp underflows and zero is not a sign of dropout
    kept = dropped != 0
    share = 1 - float(kept[solid].double().mean())
    sigma = (p * (1 - p) / int(solid.sum())) ** 0.5
    assert abs(share - p) < 5 * sigma
    assert_close(dropped[kept], plain[kept] / (1 - p))
    torch.manual_seed(7)
    first = attend(q, q, v, backend=backend, dropout_p=p, **options)
    torch.manual_seed(7)
    assert torch.equal(first, attend(q, q, v, backend=backend, dropout_p=p, **options))
    assert not torch.equal(first, dropped)


# ---------------------------------------------------------------------- decoding


@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("encoding_name", ["nope", "rotary", "interleaved", "alibi", "t5"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_decoding_through_a_cache_equals_one_shot(
    backend: str, encoding_name: str, window: int | None, chunk: int
) -> None:
    n, head_dim = 17, 6
    encoding = {"rotary": Rotary(head_dim), "interleaved": Rotary(head_dim, layout="interleaved")}.get(encoding_name)
    encoding = built(encoding_name, torch.float32) if encoding is None else encoding
    assert encoding is not None
    q, k, v = torch.randn(2, 6, n, head_dim), torch.randn(2, 2, n, head_dim), torch.randn(2, 2, n, head_dim)
    positions = Positions.arange(n)
    turned_q, turned_k = encoding.rotate(q, k, positions)
    with torch.no_grad():
        at_once = attend(turned_q, turned_k, v, encoding=encoding, positions=positions, window=window, backend=backend)
        cache, steps = KVCache(), []
        for first in range(0, n, chunk):
            part = slice(first, first + chunk)
            where = cache.next_positions(min(chunk, n - first))
            new_q, new_k = encoding.rotate(q[:, :, part], k[:, :, part], where)
            keys, values, k_positions = cache.append(new_k, v[:, :, part], where)
            assert torch.equal(keys, turned_k[:, :, : len(cache)])
            steps.append(attend(new_q, keys, values, encoding=encoding, positions=where, k_positions=k_positions,
                                window=window, backend=backend))  # fmt: skip
    assert_close(torch.cat(steps, dim=2), at_once)


@pytest.mark.parametrize("side", ["left", "right", "holes"])
@pytest.mark.parametrize("encoding_name", ["rotary", "alibi", "t5"])
def test_padded_prompts_decode_as_each_row_alone(encoding_name: str, side: str) -> None:
    """Padding, cache and chunks at once."""
    lengths, width, more, d = [3, 7], 9, 4, 6
    encoding = Rotary(d) if encoding_name == "rotary" else built(encoding_name, torch.float32)
    assert encoding is not None
    mask = torch.stack([torch.arange(width) < n for n in lengths])
    mask = {"left": mask.flip(1), "right": mask, "holes": mask[:, torch.tensor([8, 0, 7, 1, 2, 3, 4, 5, 6])]}[side]
    rows = [torch.randn(1, 6, n + more, d) for n in lengths]
    prompt = torch.full((2, 6, width, d), 9.0)
    for b, n in enumerate(lengths):
        prompt[b][:, mask[b]] = rows[b][0, :, :n]

    def step(x: Tensor, cache: KVCache, positions: Positions) -> Tensor:
        q, k = encoding.rotate(x, x, positions)
        keys, values, k_positions = cache.append(k, x, positions)
        return attend(q, keys, values, encoding=encoding, positions=positions, k_positions=k_positions)

    with torch.no_grad():
        cache = KVCache(max_len=width + more)
        first = step(prompt, cache, Positions.from_mask(mask))
        together = []
        for chunk in (slice(0, 1), slice(1, 4)):
            x = torch.cat([rows[b][:, :, lengths[b] :][:, :, chunk] for b in range(2)])
            where = cache.next_positions(x.shape[2])
            assert where.index[:, 0].tolist() == [n + chunk.start for n in lengths]
            together.append(step(x, cache, where))
        for b, n in enumerate(lengths):
            alone = step(rows[b], KVCache(), Positions.arange(n + more))
            assert_close(first[b][:, mask[b]], alone[0, :, :n])
            assert_close(torch.cat(together, 2)[b], alone[0, :, n:])


# ---------------------------------------------------------------------- what is refused


def test_shapes_that_do_not_fit_are_refused() -> None:
    good = torch.zeros(2, 6, 5, 4)
    positions = Positions.arange(5)
    for q, k, v in [
        (good[0], good, good), (good, good[0], good), (good, good, good[0]),
        (good, good[:1], good[:1]), (good, good, good[:, :, :4]), (good, good, good[:, :3]),
        (good, torch.zeros(2, 6, 5, 3), good),
    ]:  # fmt: skip
        with refuses(ShapeError, f"q {tuple(q.shape)}", f"k {tuple(k.shape)}", f"v {tuple(v.shape)}"):
            attend(q, k, v, positions=positions)


@pytest.mark.parametrize("kv_heads", [0, 4, 12])
def test_heads_that_do_not_divide_are_refused(kv_heads: int) -> None:
    k = torch.zeros(2, kv_heads, 5, 4)
    with refuses(ShapeError, "6 query heads", f"{kv_heads} key heads"):
        attend(torch.zeros(2, 6, 5, 4), k, k, positions=Positions.arange(5))


def test_mixed_dtypes_and_devices_are_refused() -> None:
    x, positions = torch.zeros(2, 6, 5, 4), Positions.arange(5)
    for k, v in ((x.bfloat16(), x), (x, x.double())):
        with refuses(ShapeError, "torch.float32", "one dtype"):
            attend(x, k, v, positions=positions)
    with refuses(ShapeError, "meta", "cpu"):
        attend(x, x.to("meta"), x, positions=positions)
    with refuses(ShapeError, "meta", "cpu"):
        attend(x, x, x, positions=positions.to("meta"))


def test_positions_of_other_tokens_are_refused() -> None:
    x = torch.zeros(2, 6, 5, 4)
    with refuses(ShapeError, "1 x 4", "q has 2 x 5"):
        attend(x, x, x, positions=Positions.arange(4))
    with refuses(ShapeError, "1 x 6", "k has 2 x 5"):
        attend(x, x, x, positions=Positions.arange(5), k_positions=Positions.arange(6))
    with refuses(ShapeError, "3 x 5"):
        attend(x, x, x, positions=Positions.arange(5, batch=3))


@pytest.mark.parametrize("backend", ["Eager", "cudnn", "", "flash"])
def test_an_unknown_backend_is_refused(backend: str) -> None:
    x = torch.zeros(2, 6, 5, 4)
    with refuses(RangeError, f"got {backend!r} for backend", "'auto', 'sdpa', 'flex', 'tiled' or 'eager'"):
        attend(x, x, x, positions=Positions.arange(5), backend=backend)


def test_weights_cannot_be_had_from_a_fused_backend() -> None:
    x = torch.zeros(2, 6, 5, 4)
    with refuses(LocantError, "backend='sdpa'", "return_weights", "eager"):
        attend(x, x, x, positions=Positions.arange(5), backend="sdpa", return_weights=True)


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, 1.5, float("nan")])
def test_a_dropout_that_is_no_probability_is_refused(dropout_p: float) -> None:
    x = torch.zeros(2, 6, 5, 4)
    with refuses(RangeError, f"got {dropout_p} for dropout_p"):
        attend(x, x, x, positions=Positions.arange(5), dropout_p=dropout_p)


@pytest.mark.parametrize("window", [0, -1])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_below_one_is_refused(causal: bool, window: int) -> None:
    x = torch.zeros(2, 6, 5, 4)
    with refuses(RangeError, f"got {window} for window"):
        attend(x, x, x, positions=Positions.arange(5), window=window, causal=causal)


def test_an_encoding_with_other_heads_is_refused() -> None:
    x = torch.zeros(2, 6, 5, 4)
    for encoding in (ALiBi(4), T5Bias(12)):
        with refuses(ShapeError, "(2, 6, 5, 4)", f"num_heads={encoding.num_heads}"):
            attend(x, x, x, encoding=encoding, positions=Positions.arange(5))
