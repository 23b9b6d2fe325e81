"""Selective RoPE: against the paper's formula and `Rotary`, alone and in rows, caches, ranks and attention."""

from __future__ import annotations

import itertools
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from locant import KVCache, LocantError, Positions, RangeError, Rotary, attend, encoding
from locant.positions.encodings.selective_rope import RunningAngles, SelectiveRoPE
from tests.positions.claims import DTYPES, shaken
from tests.positions.oracles_of_biases import numerical_gradients
from tests.refusal import refuses
from tests.tolerances import assert_close

HEADS, KV_HEADS, HEAD_DIM, D_MODEL = 4, 2, 6, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"gate": True, "offset": True, "activation": "silu", "learn_temperature": True},
    "full rank, no neighbours": {"rank": None, "kernel_size": 1, "gate": True},
}


def made(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    given: dict[str, Any] = {"rank": 3, "base": 50.0, **options}
    return shaken(SelectiveRoPE(HEAD_DIM, KV_HEADS, D_MODEL, **given)).to(dtype)


def formula(x: np.ndarray, q: np.ndarray, kernel: np.ndarray, silu: bool = False, **given: np.ndarray) -> np.ndarray:
    """Movahedi et al. 2025, section 3, and the authors' options; ``heads token head_dim``."""
    parts = x.reshape(len(x), KV_HEADS, -1)
    scaled = parts / np.sqrt((parts**2).sum(-1, keepdims=True) + 1e-6)
    pairs, out, angle = HEAD_DIM // 2, np.empty_like(q), np.zeros((KV_HEADS, HEAD_DIM // 2))
    temperature = given.get("temperature", 50.0 ** (-2 * np.arange(pairs) / HEAD_DIM))
    if "up" in given:
        projected = (scaled.reshape(len(x), -1) @ given["down"].T @ given["up"].T).reshape(len(x), KV_HEADS, pairs)
    else:
        rows = given["weight"] / np.sqrt((given["weight"] ** 2).sum(-1, keepdims=True)) * given["length"][:, None, None]
        projected = np.einsum("thd,hpd->thp", scaled, rows)
    for token in range(len(x)):
        step = sum(kernel[k] * projected[token - k] for k in range(min(len(kernel), token + 1)))
        step = step / (1 + np.exp(-step)) if silu else step
        step = step + (np.exp(given["log_offset"]) if "log_offset" in given else 0)
        if "gate_weight" in given:
            gates = given["gate_weight"] @ scaled[token].reshape(-1) + given["gate_offset"]
            step = step / (1 + np.exp(-gates))[:, None]
        angle = angle + step * temperature
        for head in range(len(q)):
            turned = q[head, token, :pairs] + 1j * q[head, token, pairs:]
            turned = turned * np.exp(1j * angle[head // (len(q) // KV_HEADS)])
            out[head, token] = np.concatenate([turned.real, turned.imag])
    return out


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients_are_those_of_the_formula(options: dict[str, Any]) -> None:
    """By the hidden states, the queries and every parameter, with a random cotangent."""
    selective, x, q = made(**options), torch.randn(1, 7, D_MODEL), torch.randn(1, HEADS, 7, HEAD_DIM)
    leaves = {"x": x.requires_grad_(), "q": q.requires_grad_(), **dict(selective.named_parameters())}
    places = Positions.of(torch.arange(900, 907), order=torch.arange(7))
    rotated, _ = selective.rotate(q, q, selective.read(x, places))
    given = {name: (leaf[0] if name in "xq" else leaf).detach().double().numpy() for name, leaf in leaves.items()}

    def truth_of(**values: np.ndarray) -> np.ndarray:
        return formula(silu=bool(options.get("activation")), **values)

    assert_close(rotated[0].detach(), torch.from_numpy(truth_of(**given)))
    cotangent = torch.randn(rotated.shape)
    truth = numerical_gradients(truth_of, given, cotangent[0].double().numpy())
    for name, ours in zip(leaves, torch.autograd.grad(rotated, list(leaves.values()), cotangent), strict=True):
        assert_close(ours[0] if name in "xq" else ours, torch.from_numpy(truth[name]))


def test_with_angles_of_one_it_is_rope() -> None:
    selective = SelectiveRoPE(HEAD_DIM, KV_HEADS, D_MODEL, offset=True, base=50.0)
    torch.nn.init.zeros_(selective.kernel)
    q, k = torch.randn(2, HEADS, 300, HEAD_DIM), torch.randn(2, KV_HEADS, 300, HEAD_DIM)
    counts = Positions.of(torch.arange(1, 301), order=torch.arange(300))  # the first token is at angle 1
    read = selective.read(torch.randn(2, 300, D_MODEL), counts)
    for ours, expected in zip(
        selective.rotate(q, k, read), Rotary(HEAD_DIM, base=50.0).rotate(q, k, read), strict=True
    ):
        assert_close(ours, expected)


class Constant(RunningAngles):
    """Each pair of the only head adds the first numbers of the hidden state, in radians."""

    def of_hidden(self, x: Tensor) -> Tensor:
        return x[:, :, None, : self.head_dim // 2].double()


def test_sums_of_a_million_angles_are_those_of_decimal_numbers() -> None:
    """In float64, in float32 and in units of 2**-30 of a turn, the last sums are off by more."""
    count, turn = 2**20, Decimal(2) * Decimal("3.14159265358979323846264338327950288")
    steps = torch.tensor([0.7, 3e-6, -2.9])
    x = steps.expand(1, count, 3)
    read = Constant(6, 1, 3).read(x, Positions.arange(count)).read.of_key
    assert read is not None
    for ours, step in zip(read[0, -1, 0, :3].tolist(), steps.tolist(), strict=True):
        turns = Decimal(step) * count / turn
        off = (turns - Decimal(ours)) % 1
        assert min(off, 1 - off) < Decimal(2) ** -53 * count  # half a unit for each token
    assert abs(float(x.cumsum(1)[0, -1, 0]) - 0.7 * count) > 1e-3  # a plain sum in float32 is off


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_padded_in_any_order_and_in_pieces_are_alone(dtype: torch.dtype, options: dict[str, Any]) -> None:
    selective, lengths = made(dtype, **options), [5, 1, 13]
    x, q = torch.randn(1, 22, D_MODEL, dtype=dtype), torch.randn(1, KV_HEADS, 22, HEAD_DIM, dtype=dtype)
    x[:, 19:] = torch.nan  # padding
    packed = Positions.packed([lengths], length=22)
    shuffled = torch.randperm(22)
    moved = Positions.of(packed.index[:, shuffled], packed.document[:, shuffled])
    with torch.no_grad():
        whole = selective.rotate_one(q, selective.read(x, packed))
        other = selective.rotate_one(q[:, :, shuffled], selective.read(x[:, shuffled], moved))
        assert torch.equal(other[:, :, shuffled.argsort()][:, :, :19], whole[:, :, :19])
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            alone = selective.rotate_one(q[:, :, part], selective.read(x[:, part], Positions.arange(length)))
            assert torch.equal(whole[:, :, part], alone)
            start += length
        for ends in ((0, 3, 19), (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 19), (0, 19)):
            for counts in (Positions.arange(19), Positions.packed([[5, 14]])):
                past, parts = None, []
                for begin, end in itertools.pairwise(ends):
                    read = selective.read(x[:, begin:end], counts.slice(begin, end), past)
                    parts.append(selective.rotate_one(q[:, :, begin:end], read))
                    past = read if past is None else Positions.cat([past, read])
                expected = selective.rotate_one(q[:, :, :19], selective.read(x[:, :19], counts))
                assert torch.equal(torch.cat(parts, 2), expected)


def test_two_documents_go_on_behind_one_cache() -> None:
    """Each new token continues from the last token of its own document, wherever that is in the cache."""
    selective, lengths = made(), (6, 2)
    x, q = torch.randn(1, 12, D_MODEL), torch.randn(1, KV_HEADS, 12, HEAD_DIM)
    document = torch.tensor([[0] * 6 + [1] * 2 + [0, 1, 1, 0]])
    index = torch.tensor([[*range(6), *range(2), 6, 2, 3, 7]])
    with torch.no_grad():
        before = selective.read(x[:, :8], Positions.packed([lengths]))
        after = selective.rotate_one(
            q[:, :, 8:], selective.read(x[:, 8:], Positions.of(index, document).slice(8, 12), before)
        )
        for number in (0, 1):
            mine = (document[0] == number).nonzero().flatten()
            alone = selective.rotate_one(q[:, :, mine], selective.read(x[:, mine], Positions.arange(len(mine))))
            assert torch.equal(after[:, :, document[0, 8:] == number], alone[:, :, mine >= 8])


def test_a_cache_keeps_the_sums() -> None:
    selective, cache, outputs = made(), KVCache(), []
    x, q, k = torch.randn(2, 9, D_MODEL), torch.randn(2, HEADS, 9, HEAD_DIM), torch.randn(2, KV_HEADS, 9, HEAD_DIM)
    with torch.no_grad():
        for begin, end in ((0, 4), (4, 5), (5, 9)):
            read = selective.read(x[:, begin:end], Positions.after(begin, end - begin), cache.positions)
            _, key = selective.rotate(q[:, :, begin:end], k[:, :, begin:end], read)
            keys, _, _ = cache.append(key, k[:, :, begin:end], read)
            outputs.append(keys)
        expected = selective.rotate_one(k, selective.read(x, Positions.arange(9)))
    assert torch.equal(outputs[-1], expected)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "tiled"])
def test_attention_is_right_forward_and_every_gradient(backend: Any) -> None:
    """Against float64 attention through the eager backend, of rows that are padded and packed."""
    places = Positions.packed([[7, 1, 9], [4, 11]], length=17)
    shapes = [(2, 17, D_MODEL), (2, HEADS, 17, HEAD_DIM), *[(2, KV_HEADS, 17, HEAD_DIM)] * 2]
    leaves, cotangent = [torch.randn(shape) for shape in shapes], torch.randn(2, HEADS, 17, HEAD_DIM)
    selective = made(**OPTIONS["all"])

    def through(backend: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        module, (x, q, k, v) = selective.to(dtype), (leaf.to(dtype).requires_grad_() for leaf in leaves)
        read = module.read(x, places)
        rotated_q, rotated_k = module.rotate(q, k, read)
        y = attend(rotated_q, rotated_k, v, encoding=module, positions=read, backend=backend)
        return y.detach(), *torch.autograd.grad(y, [x, q, k, v, *module.parameters()], cotangent.to(dtype))

    for ours, expected in zip(through(backend, torch.float32), through("eager", torch.float64), strict=True):
        assert_close(ours, expected, torch.float32)


def test_gradients_are_finite_in_bfloat16() -> None:
    selective = made(torch.bfloat16, **OPTIONS["all"])
    x = torch.randn(1, 2048, D_MODEL, dtype=torch.bfloat16) * 1e4
    x[:, ::3] = 0
    q = torch.randn(1, HEADS, 2048, HEAD_DIM, dtype=torch.bfloat16)
    y = selective.rotate_one(q, selective.read(x.requires_grad_(), Positions.packed([1500, 548])))
    y.float().square().sum().backward()
    for leaf in (x, *selective.parameters()):
        assert leaf.grad is not None
        assert bool(leaf.grad.isfinite().all())


@pytest.mark.parametrize("requires_grad", [False, True])
def test_numbers_that_are_not_finite_spoil_the_rest_of_their_document(requires_grad: bool) -> None:
    """In one piece, and behind a cache."""
    selective, x = made().requires_grad_(requires_grad), torch.randn(1, 9, D_MODEL)
    x[0, 3] = torch.nan
    places = Positions.packed([6, 3])
    whole = selective.read(x, places)
    first = selective.read(x[:, :5], places.slice(0, 5))
    second = selective.read(x[:, 5:], places.slice(5, 9), first)
    for read in (whole, Positions.cat([first, second])):
        y = selective.rotate_one(torch.ones(1, KV_HEADS, 9, HEAD_DIM), read)
        expected = torch.tensor([True] * 3 + [False] * 3 + [True] * 3)
        assert torch.equal(y.isfinite().all(-1)[0, 0], expected)
        assert torch.equal(y.isnan().all(-1)[0, 0], ~expected)


def test_it_unrotates_and_rotates_in_place() -> None:
    selective = made(torch.float64)
    x, y = torch.randn(2, 7, D_MODEL, dtype=torch.float64), torch.randn(2, HEADS, 7, HEAD_DIM, dtype=torch.float64)
    positions = selective.read(x, Positions.arange(7))
    rotated, _ = selective.rotate(y, y, positions)
    assert_close(selective.unrotate(rotated, positions), y)
    q, k = y.clone(), y.clone()
    with torch.no_grad():
        assert selective.rotate(q, k, positions, inplace=True)[0] is q
    assert torch.equal(q, rotated)
    assert torch.equal(k, rotated)


def test_mistakes_are_named() -> None:
    selective, q = made(), torch.zeros(1, HEADS, 3, HEAD_DIM)
    with refuses(LocantError, "positions = encoding.read(x, positions)", "without the features that SelectiveRoPE"):
        selective.rotate(q, q, Positions.arange(3))
    with refuses(LocantError, "positions = encoding.read(x, positions)", "got past without the features"):
        selective.read(torch.zeros(1, 1, D_MODEL), Positions.after(3, 1), Positions.arange(3))
    with refuses(RangeError, "d_model=14", "expected a multiple"):
        SelectiveRoPE(HEAD_DIM, KV_HEADS, 15)
    with refuses(RangeError, "activation='silu'", "got 'relu' for activation"):
        SelectiveRoPE(HEAD_DIM, KV_HEADS, D_MODEL, activation="relu")  # type: ignore[arg-type]
    with refuses(LocantError, "def of_hidden(self, x)"):
        RunningAngles(HEAD_DIM, KV_HEADS, D_MODEL).read(torch.zeros(1, 3, D_MODEL), Positions.arange(3))
    built = encoding("selective-rope", head_dim=6, num_heads=2, d_model=16, gate=True)
    assert repr(built).endswith("rank=16, kernel_size=4, base=500000, gate=True)")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward mode calls it
@pytest.mark.parametrize("learns", [True, False])
def test_forward_mode_and_mapped_samples_have_the_gradients_of_backward(learns: bool) -> None:
    """Neither shows in ``requires_grad``, and rounded sums alone have no derivative."""
    selective, q = made(torch.float64, **OPTIONS["all"]).requires_grad_(learns), torch.randn(1, HEADS, 5, HEAD_DIM)
    q, x, tangent = q.double(), *torch.randn(2, 3, 1, 5, D_MODEL, dtype=torch.float64)
    cotangent = torch.randn(3, 1, HEADS, 5, HEAD_DIM, dtype=torch.float64)

    def rotated(x: Tensor) -> Tensor:
        return selective.rotate_one(q, selective.read(x, Positions.packed([2, 3])))

    leaf = x.clone().requires_grad_()
    (truth,) = torch.autograd.grad(torch.stack([rotated(each) for each in leaf]), leaf, cotangent)
    assert truth.abs().min() > 0
    (mapped,) = torch.autograd.grad(torch.func.vmap(rotated)(leaf), leaf, cotangent)
    assert_close(mapped, truth)
    moved = [torch.func.jvp(rotated, (one,), (way,))[1] for one, way in zip(x, tangent, strict=True)]
    assert_close((torch.stack(moved) * cotangent).sum(), (truth * tangent).sum())
