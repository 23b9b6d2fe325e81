"""What does it cost to norm the heads of q and k, rotate them and append them to a cache, in one pass?

Beside a copy of the same bytes, torch's three steps and `transformers`' three. The heads are those of Qwen3-8B, in
memory as projections leave them. It refuses to report where a contender's result differs.

    PYTHONPATH=src python -m benchmarks norm_rotary
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import Row, measure
from locant import HeadNorm, KVCache, Positions, Rotary
from locant.kernels.norm_rotary import norm_and_rotate_into

__all__ = ["rows"]

HEADS, KV_HEADS, HEAD_DIM, EPS = 32, 8, 128, 1e-6
NEAR = {torch.float32: 2e-3, torch.bfloat16: 6e-2}
"""How far results may differ: others' angles are off by 1.4e-4 at position 4,095, and they round more often."""
APPENDED = {(1, 4_096, torch.bfloat16): 1.8, (1, 4_096, torch.float32): 1.6, (32, 1, torch.bfloat16): 2.5}
"""Batch, tokens and dtype, and how many copies the norm, the rotation and the cache may cost."""

CACHED = [(1, 4_096, torch.bfloat16), (32, 1, torch.bfloat16), (32, 1, torch.float32), (1, 1, torch.bfloat16)]
"""Batch, tokens and dtype of the rows with `KVCache`, whose calls also check their arguments."""
CALLS = 20
"""Calls in one turn if there is one token."""

Contender = Callable[[], Any]


def rows() -> list[Row]:
    """Norm, rotate and append without gradients, and a forward with its backward."""
    if torch.cuda.is_available():
        return importlib.import_module("benchmarks.gpu_norm_rotary").rows()
    found = []
    for (batch, seq, dtype), wanted in APPENDED.items():
        found += _appended(_Case(batch, seq, dtype), wanted)
    for case in CACHED:
        found += _in_a_cache(_Case(*case))
    return found + _with_gradients(_Case(1, 4_096, torch.bfloat16)) + _with_gradients(_Case(1, 4_096, torch.float32))


class _Case:
    def __init__(self, batch: int, seq: int, dtype: torch.dtype) -> None:
        self.q, self.k, self.v = (
            torch.randn(batch, seq, heads, HEAD_DIM).to(dtype).transpose(1, 2) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.weights = [(1 + torch.randn(HEAD_DIM) / 4).to(dtype) for _ in range(2)]
        self.positions = Positions.after(1_024 if seq == 1 else 0, seq)
        self.rotary, self.norm = Rotary(HEAD_DIM, base=1e6), HeadNorm(*self.weights, eps=EPS)
        cos, sin = self.rotary.cos_sin(self.positions)
        self.cos, self.sin = (torch.cat([part, part], -1).to(dtype) for part in (cos, sin))
        self.words = f"{batch} x {HEADS} + {KV_HEADS} heads x {seq} x {HEAD_DIM}, {dtype}"

    def copying(self, out: Tensor, keys: Tensor, values: Tensor) -> Contender:
        """Return a function that copies q, k and v, with which the others are compared."""

        def copy() -> tuple[Tensor, Tensor]:
            values.copy_(self.v)
            return out.copy_(self.q), keys.copy_(self.k)

        return copy

    def torch_steps(self) -> tuple[Tensor, Tensor]:
        q, k = (F.rms_norm(x, (HEAD_DIM,), w, EPS) for x, w in zip((self.q, self.k), self.weights, strict=True))
        return _apply(q, self.cos, self.sin), _apply(k, self.cos, self.sin)


def _apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]


def _of_transformers(case: _Case) -> Contender | None:
    if not importlib.util.find_spec("transformers"):
        return None
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    norms = [Qwen3RMSNorm(HEAD_DIM, EPS).to(case.q.dtype) for _ in range(2)]
    for norm, weight in zip(norms, case.weights, strict=True):
        norm.weight = torch.nn.Parameter(weight)
    return lambda: apply_rotary_pos_emb(norms[0](case.q), norms[1](case.k), case.cos, case.sin)


def _require(case: _Case, results: dict[str, tuple[Tensor, Tensor]]) -> None:
    first, *others = results.values()
    for name, result in zip(list(results)[1:], others, strict=True):
        for ours, theirs in zip(first, result, strict=True):
            off = float(((ours - theirs).double() / (1 + theirs.double().abs())).abs().max())
            assert off < NEAR[case.q.dtype], f"{name} is off by {off:.2g}: nothing is reported"


def _appended(case: _Case, wanted: float) -> list[Row]:
    past = int(case.positions.index[0, 0])
    batch, _, seq, _ = case.q.shape
    keys, values = (torch.zeros(batch, KV_HEADS, past + seq + 8, HEAD_DIM, dtype=case.q.dtype) for _ in range(2))
    keys, values, out = keys[:, :, past : past + seq], values[:, :, past : past + seq], torch.empty_like(case.q)
    index, tables = case.rotary._index_and_tables(case.positions)  # pyright: ignore[reportPrivateUsage]

    def one_pass() -> tuple[Tensor, Tensor]:
        norm_and_rotate_into(case.q, case.k, case.v, out, keys, values, index, tables, "half", case.norm)
        return out, keys

    def append(steps: Contender) -> Contender:
        def three() -> tuple[Tensor, Tensor]:
            q, k = steps()
            values.copy_(case.v)
            return q, keys.copy_(k)

        return three

    contenders = {"locant, one pass": one_pass, "torch's rms_norm, usual rotation, copy": append(case.torch_steps)}
    if (theirs := _of_transformers(case)) is not None:
        contenders["transformers' norm, rotation, copy"] = append(theirs)
    with torch.no_grad():
        _require(case, {name: (run()[0].clone(), run()[1].clone()) for name, run in contenders.items()})
        title = f"norm, rotate and append, {case.words} (wanted: {wanted} of the copy)"
        return measure(title, {"copy of q, k and v": case.copying(out, keys, values)} | contenders, rounds=5)


def _in_a_cache(case: _Case) -> list[Row]:
    """Measure `KVCache.rotate_and_append` beside separate calls. `truncate`, which moves nothing, ends each of them."""
    q, k, v, positions, norm, rotary = case.q, case.k, case.v, case.positions, case.norm, case.rotary
    past = int(positions.index[0, 0])
    cache, out = KVCache(past + q.shape[2]), torch.empty_like(q)
    if past:
        zeros = torch.zeros(len(k), KV_HEADS, past, HEAD_DIM, dtype=k.dtype)
        cache.append(zeros, zeros, Positions.arange(past))
    keys, values = torch.empty(2, len(k), KV_HEADS, past + q.shape[2], HEAD_DIM, dtype=k.dtype)

    def append(rotated_q: Tensor, rotated_k: Tensor) -> tuple[Tensor, Tensor]:
        all_keys, _, _ = cache.append(rotated_k, v, positions)
        cache.truncate(past)
        return rotated_q, all_keys[:, :, past:]

    def three_calls() -> tuple[Tensor, Tensor]:
        normed = (F.rms_norm(x, (HEAD_DIM,), w, EPS) for x, w in zip((q, k), case.weights, strict=True))
        return append(*rotary.rotate(*normed, positions=positions, inplace=True))

    def one_call(norm: HeadNorm | None) -> tuple[Tensor, Tensor]:
        rotated_q, all_keys, _, _ = cache.rotate_and_append(rotary, q, k, v, positions, norm=norm)
        cache.truncate(past)
        return rotated_q, all_keys[:, :, past:]

    contenders: dict[str, Contender] = {
        "one call": lambda: one_call(norm),
        "two calls: norm and rotate, append": lambda: append(*rotary.rotate(q, k, positions, norm=norm)),
        "three calls, torch's rms_norm": three_calls,
    }
    others: dict[str, Contender] = {
        "one call without a norm": lambda: one_call(None),
        "append alone": lambda: append(q, k),
        "truncate alone": lambda: cache.truncate(past),
    }
    with torch.no_grad():
        _require(case, {name: (run()[0].clone(), run()[1].clone()) for name, run in contenders.items()})
        calls = CALLS if q.shape[2] == 1 else 1
        copy = case.copying(out, keys[:, :, past:], values[:, :, past:])
        all_runs = {"copy of q, k and v": copy} | contenders | others
        title = f"norm, rotate and append with KVCache, {case.words}, {calls} call{'s' * (calls > 1)}"
        return measure(title, {name: _repeat(run, calls) for name, run in all_runs.items()})


def _repeat(run: Contender, calls: int) -> Contender:
    def repeat() -> None:
        for _ in range(calls):
            run()

    return repeat


def _with_gradients(case: _Case) -> list[Row]:
    for x in (case.q, case.k, *case.weights):
        x.requires_grad_()
    cotangents = torch.randn_like(case.q), torch.randn_like(case.k)
    contenders: dict[str, Contender] = {
        "torch's rms_norm, usual rotation": case.torch_steps,
        "locant, one pass": lambda: case.rotary.rotate(case.q, case.k, case.positions, norm=case.norm),
    }
    if (theirs := _of_transformers(case)) is not None:
        contenders["transformers' norm and rotation"] = theirs

    def there_and_back(forward: Contender) -> Contender:
        return lambda: torch.autograd.backward(forward(), cotangents)

    title = f"norm and rotate, there and back, {case.words} (wanted: 0.2 of torch's steps)"
    return measure(title, {name: there_and_back(run) for name, run in contenders.items()}, rounds=5)
