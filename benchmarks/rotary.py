"""What does turning queries and keys cost, beside copying them and beside what others do?

On a CPU; where there is a GPU, `gpu_rotary` asks it instead. Peers that are not installed are named and left out. It
refuses to report where a contender's result is not the rotation. What one token costs is asked by `decoding`.

    PYTHONPATH=src python -m benchmarks rotary
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import BUSY, Row, busy_processes, measure
from locant import Positions, Rotary

__all__ = ["rows"]

LENGTH, HEAD_DIM = 4_096, 128
SHAPE = (1, 32, 8, LENGTH, HEAD_DIM)  # batch, heads, kv_heads, seq, head_dim
PEERS = {
    "transformers": "transformers.models.llama.modeling_llama",
    "rotary-embedding-torch": "rotary_embedding_torch",
    "x-transformers": "x_transformers",
}
NEAR = {torch.float32: 2e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}
"""How far from the truth a contender may be: others' angles are off by 1.4e-4 at position 4,095, and q by 5 of that."""
WANTED = {torch.float32: (1.1, 1.25, 20), torch.bfloat16: (1.2, 1.3, 8), torch.float16: (1.2, 1.3, 8)}
"""Of the copy in place, of the clone in new memory; and how often transformers' eager function may be slower."""

Contender = Callable[[], Any]


def rows() -> list[Row]:
    """Forward and backward, beside the copy and beside others, in three dtypes; and the angles alone."""
    if torch.cuda.is_available():
        return importlib.import_module("benchmarks.gpu_rotary").rows()
    absent = [name for name, module in PEERS.items() if importlib.util.find_spec(module.split(".")[0]) is None]
    if absent:
        print(f"not installed, and so not measured: {', '.join(absent)}")
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found += _forward(dtype)
        found += _backward(dtype)
    return [*found, *_angles()]


class _Case:
    """One shape in one dtype: the tokens, and what they are turned to."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        batch, heads, kv_heads, self.seq, self.head_dim = shape
        self.q = torch.randn(batch, heads, self.seq, self.head_dim).to(dtype)
        self.k = torch.randn(batch, kv_heads, self.seq, self.head_dim).to(dtype)
        self.words = f"q {'x'.join(map(str, self.q.shape))}, k with {kv_heads} heads, {dtype}"
        self.positions = Positions.arange(self.seq)
        self.half, self.interleaved = Rotary(self.head_dim), Rotary(self.head_dim, layout="interleaved")
        first = 2.0 * torch.arange(self.head_dim // 2) / self.head_dim
        angle = torch.arange(self.seq)[:, None].double() / 10_000.0 ** first.double()
        self.cos, self.sin = angle.cos(), angle.sin()  # the truth, by a way of its own
        torch.compiler.reset()  # torch compiles a function for 8 shapes and dtypes, and then runs it as it is

    def usual(self) -> tuple[Tensor, Tensor]:
        """The cosine and sine of the usual code, twice as wide, in the dtype of q."""
        wide = (torch.cat([part, part], -1).to(self.q.dtype)[None] for part in (self.cos, self.sin))
        cos, sin = wide
        return cos, sin

    def require(self, turned: tuple[Tensor, Tensor], name: str) -> None:
        """The rotation in either layout; or there is nothing to report."""
        for x, out in zip((self.q, self.k), turned, strict=True):
            step = max(1, x.numel() // 2**22)  # some heads are enough
            some, result = x[:, ::step].double(), out[:, ::step].double()
            errors = []
            for a, b, ours_a, ours_b in (
                (*some.chunk(2, -1), *result.chunk(2, -1)),
                (some[..., ::2], some[..., 1::2], result[..., ::2], result[..., 1::2]),
            ):
                off = torch.stack([ours_a - (a * self.cos - b * self.sin), ours_b - (b * self.cos + a * self.sin)])
                errors.append(float(off.abs().max()) if off.numel() else 0.0)
            assert min(errors) < NEAR[x.dtype], f"{name} is off by {min(errors):.2g}: nothing is reported"


def _rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


def _usual(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What most models do, cosine and sine at hand."""
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _peers(case: _Case) -> dict[str, Contender]:
    """Other people's functions, with what they need made beforehand: that is in their favour."""
    q, k = case.q, case.k
    cos, sin = case.usual()
    compiled = torch.compile(_usual, fullgraph=True)
    found: dict[str, Contender] = {
        "usual code, eager": lambda: _usual(q, k, cos, sin),
        "usual code, torch.compile": lambda: compiled(q, k, cos, sin),
    }
    if importlib.util.find_spec("transformers"):
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        found["transformers, eager"] = lambda: apply_rotary_pos_emb(q, k, cos, sin)
    if importlib.util.find_spec("rotary_embedding_torch"):
        from rotary_embedding_torch import apply_rotary_emb

        angle = torch.atan2(case.sin, case.cos).float().repeat_interleave(2, -1)
        found["rotary-embedding-torch"] = lambda: (apply_rotary_emb(angle, q), apply_rotary_emb(angle, k))
    if importlib.util.find_spec("x_transformers"):
        from x_transformers.x_transformers import apply_rotary_pos_emb as apply_x

        angles = torch.atan2(case.sin, case.cos).float().repeat_interleave(2, -1)[None]
        found["x-transformers"] = lambda: (apply_x(q, angles), apply_x(k, angles))
    return found


def _forward(dtype: torch.dtype) -> list[Row]:
    case = _Case(SHAPE, dtype)
    q, k, positions = case.q, case.k, case.positions
    half, interleaved = case.half, case.interleaved
    q_into, k_into = q.clone(), k.clone()
    in_place: dict[str, Contender] = {
        "locant, half layout": lambda: half.rotate(q_into, k_into, positions, inplace=True),
        "locant, interleaved layout": lambda: interleaved.rotate(q_into, k_into, positions, inplace=True),
    }
    ours: dict[str, Contender] = {
        "locant, half layout": lambda: half.rotate(q, k, positions),
        "locant, interleaved layout": lambda: interleaved.rotate(q, k, positions),
    }
    peers = _peers(case)
    copy: dict[str, Contender] = {"copy of q and k into existing memory": lambda: (q_into.copy_(q), k_into.copy_(k))}
    clone: dict[str, Contender] = {"clone of q and k": lambda: (q.clone(), k.clone())}
    of_copy, of_clone, eager = WANTED[dtype]
    with torch.no_grad():
        for contender, run in {**ours, **peers}.items():
            case.require(run(), contender)
        for contender, run in in_place.items():
            q_into.copy_(q)
            k_into.copy_(k)
            case.require(run(), f"{contender}, in place")
        found = measure(f"rotate in place, {case.words} (wanted: {of_copy})", copy | in_place)
        found += measure(f"rotate into new memory, {case.words} (wanted: {of_clone})", clone | ours)
        wanted = f"(wanted: 3 of torch.compile, {eager} of transformers)"
        found += measure(f"others' rotation into new memory, {case.words} {wanted}", ours | peers, rounds=5)
        with busy_processes():
            found += measure(f"in place beside {BUSY} busy processes, {case.words} (wanted: 4)", copy | in_place)
            found += measure(f"into new memory beside {BUSY} busy processes, {case.words}", clone | ours)
    return found


def _backward(dtype: torch.dtype) -> list[Row]:
    """Back through the rotation, the forward not counted."""
    case = _Case(SHAPE, dtype)
    q, k = case.q.requires_grad_(), case.k.requires_grad_()
    cotangents = torch.randn_like(q), torch.randn_like(k)
    cos, sin = case.usual()
    compiled = torch.compile(_usual, fullgraph=True)
    ours: dict[str, Contender] = {
        "locant, half layout": lambda: case.half.rotate(q, k, case.positions),
        "locant, interleaved layout": lambda: case.interleaved.rotate(q, k, case.positions),
    }
    usual: dict[str, Contender] = {
        "usual code, eager": lambda: _usual(q, k, cos, sin),
        "usual code, torch.compile": lambda: compiled(q, k, cos, sin),
    }

    def back(forward: dict[str, Contender]) -> dict[str, Contender]:
        graphs = {name: run() for name, run in forward.items()}
        return {
            name: lambda out=out: torch.autograd.grad(out, (q, k), cotangents, retain_graph=True)
            for name, out in graphs.items()
        }

    clone: dict[str, Contender] = {"clone of q and k": lambda: (q.detach().clone(), k.detach().clone())}
    return [
        *measure(f"back through it, {case.words} (wanted: {WANTED[dtype][1]})", clone | back(ours)),
        *measure(f"back through others', {case.words} (wanted: 3 of torch.compile)", back(ours | usual), rounds=5),
    ]


def _angles() -> list[Row]:
    exact, usual = Rotary(HEAD_DIM), Rotary(HEAD_DIM, angles="float32")
    near, far = Positions.arange(LENGTH), Positions.after(1_000_000, LENGTH)
    contenders = {
        "float32 product, cos, sin": lambda: usual.cos_sin(near),
        "exact, around position 0": lambda: exact.cos_sin(near),
        "exact, around position 1 000 000": lambda: exact.cos_sin(far),
    }
    return measure(f"cos and sin of {LENGTH} positions x {HEAD_DIM // 2} pairs", contenders)
