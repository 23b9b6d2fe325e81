"""On a GPU: what does turning queries and keys cost, beside copying them and beside other people's kernels?

A ratio of 1.18 to the copy is 85 % of its bandwidth, one of 1.25 is 80 %. Every contender gets the memory that a
projection leaves behind (``batch seq heads head_dim``, seen as ``batch heads seq head_dim``), and its cosines ready
made, except locant, which makes its angles in the kernel, and TransformerEngine, which is given angles. A memory fill
of 1 GiB before every run empties the L2 cache and gives Python the time to queue the run, so that events measure the
device and not the launch.

Contenders that are not installed are left out, and said so. flash-attention's kernel is one file that needs nothing but
Triton: ``LOCANT_FLASH_ROTARY=/path/to/flash_attn/ops/triton/rotary.py`` is enough where the package is not built.

This has not yet been run on a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.timing import Row
from locant import Positions, Rotary

__all__ = ["SHAPES", "Shape", "contenders", "measure_on_gpu", "rows"]

BASE = 10_000.0
ROUNDS, WARMUP = 25, 3
FLUSH = 2**30
Turned = tuple[Tensor, Tensor]
Turn = Callable[[Tensor, Tensor], Turned]


class Shape(NamedTuple):
    """A batch of queries and keys, `offset` tokens behind a cache."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    seq: int
    head_dim: int
    offset: int = 0

    def tokens(self, heads: int, dtype: torch.dtype, device: str) -> Tensor:
        return torch.randn(self.batch, self.seq, heads, self.head_dim, device=device).to(dtype).transpose(1, 2)

    @property
    def words(self) -> str:
        k = f"k with {self.kv_heads}"
        return f"{self.name}: q {self.batch}x{self.heads}x{self.seq}x{self.head_dim} and {k} heads, bfloat16"


SHAPES = (
    Shape("prefill", 1, 32, 8, 4_096, 128),
    Shape("prefill of a batch", 8, 32, 8, 2_048, 128),
    Shape("long", 1, 32, 8, 131_072, 128),
    Shape("long, partial heads of 96", 2, 24, 8, 32_768, 96),
    Shape("decode", 64, 32, 8, 1, 128, offset=4_096),
    Shape("decode, one of eight ranks", 256, 8, 1, 1, 128, offset=4_096),
)


def rows(device: str = "cuda", rounds: int = ROUNDS) -> list[Row]:
    """Forward and backward of every contender at every shape."""
    found = []
    for shape in SHAPES:
        turns = contenders(shape, device)
        q, k = shape.tokens(shape.heads, torch.bfloat16, device), shape.tokens(shape.kv_heads, torch.bfloat16, device)
        for name, turn in turns.items():
            _require_right(name, turn, q, k, shape)
        found += measure_on_gpu(f"forward, {shape.words}", _forwards(turns, q, k), device, rounds)
        found += measure_on_gpu(f"backward, {shape.words}", _backwards(turns, q, k), device, rounds)
    return found


def measure_on_gpu(
    question: str, runs: Mapping[str, Callable[[], object]], device: str = "cuda", rounds: int = ROUNDS
) -> list[Row]:
    """Median times on the device, in turns; the first is what the others are compared with."""
    flush = torch.empty(FLUSH, dtype=torch.int8, device=device)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(WARMUP + rounds):
        for name, run in runs.items():
            flush.zero_()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            run()
            ended.record()
            ended.synchronize()
            if turn >= WARMUP:
                times[name].append(began.elapsed_time(ended))
    medians = {name: statistics.median(values) for name, values in times.items()}
    first = next(iter(medians.values()))
    return [
        Row(question=question, contender=name, milliseconds=round(median, 4), ratio=round(median / first, 3))
        for name, median in medians.items()
    ]


def _forwards(turns: Mapping[str, Turn], q: Tensor, k: Tensor) -> dict[str, Callable[[], object]]:
    q_into, k_into = torch.empty_like(q), torch.empty_like(k)
    runs: dict[str, Callable[[], object]] = {
        "copy of q and k into existing memory (the limit)": lambda: (q_into.copy_(q), k_into.copy_(k))
    }

    def running(turn: Turn) -> Callable[[], object]:
        q_own, k_own = q.clone(), k.clone()  # some turn in place, again and again
        return lambda: turn(q_own, k_own)

    return runs | {name: running(turn) for name, turn in turns.items()}


def _backwards(turns: Mapping[str, Turn], q: Tensor, k: Tensor) -> dict[str, Callable[[], object]]:
    q_into, k_into = torch.empty_like(q), torch.empty_like(k)
    runs: dict[str, Callable[[], object]] = {
        "copy of both gradients into existing memory (the limit)": lambda: (q_into.copy_(q), k_into.copy_(k))
    }

    def running(turn: Turn) -> Callable[[], object] | None:
        q_leaf, k_leaf = q.clone().requires_grad_(), k.clone().requires_grad_()
        try:
            out = turn(q_leaf, k_leaf)
        except (RuntimeError, ValueError):  # in place on a leaf: such a contender has no backward of its own
            return None
        if not all(x.requires_grad for x in out):
            return None
        cotangents = torch.randn_like(q), torch.randn_like(k)
        return lambda: torch.autograd.grad(out, (q_leaf, k_leaf), cotangents, retain_graph=True)

    found = {name: running(turn) for name, turn in turns.items()}
    return runs | {name: run for name, run in found.items() if run is not None}


def contenders(shape: Shape, device: str) -> dict[str, Turn]:
    """Every way to turn q and k that there is here.

    What was compiled for another shape is forgotten: torch compiles a function 8 times, and then runs it as it is.
    """
    torch.compiler.reset()
    where = Positions.after(shape.offset, shape.seq).to(torch.device(device))
    half, interleaved = Rotary(shape.head_dim), Rotary(shape.head_dim, layout="interleaved")
    usual = Rotary(shape.head_dim, angles="float32")
    cos, sin = half.cos_sin(where)
    return {
        "locant": lambda q, k: half.rotate(q, k, where),
        "locant, in place": lambda q, k: half.rotate(q, k, where, inplace=True),
        "locant, interleaved layout": lambda q, k: interleaved.rotate(q, k, where),
        "locant, float32 angles": lambda q, k: usual.rotate(q, k, where),
        "usual code, eager": _usual(cos, sin),
        "usual code, torch.compile": torch.compile(_usual(cos, sin), dynamic=False, fullgraph=True),
        "TransformerEngine's formula, torch.compile": torch.compile(
            _transformer_engine(cos, sin), dynamic=False, fullgraph=True
        ),
        **_flash_attention(cos, sin, device),
        **_liger(cos, sin, device),
    }


def _usual(cos: Tensor, sin: Tensor) -> Turn:
    """What models of the half layout do, with cosines and sines in the dtype of the tokens."""
    cos, sin = (torch.cat([x, x], dim=-1)[:, None].bfloat16() for x in (cos, sin))

    def one(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-b, a], dim=-1) * sin

    return lambda q, k: (one(q), one(k))


def _transformer_engine(cos: Tensor, sin: Tensor) -> Turn:
    """By its documentation: float32 angles are given, from which the kernel makes cosines and sines every time."""
    angles = torch.cat([torch.atan2(sin, cos)] * 2, dim=-1)[:, None]

    def one(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        return (x.float() * angles.cos() + torch.cat([-b, a], dim=-1) * angles.sin()).to(x.dtype)

    return lambda q, k: (one(q), one(k))


def _flash_attention(cos: Tensor, sin: Tensor, device: str) -> dict[str, Turn]:
    """Two launches, one for q and one for k; it wants the tokens before the heads, and cosines in their dtype."""
    apply = _apply_rotary() if device == "cuda" else None
    if apply is None:
        print("flash-attention's kernel is not here: set LOCANT_FLASH_ROTARY to its file", file=sys.stderr)
        return {}
    cos, sin = cos[0].bfloat16(), sin[0].bfloat16()

    class Turning(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor) -> Turned:
            return tuple(apply(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))  # type: ignore[return-value]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Turned:
            turned = (apply(x.transpose(1, 2), cos, sin, conjugate=True).transpose(1, 2) for x in grads)
            return tuple(turned)  # type: ignore[return-value]

    return {"flash-attention's kernel": Turning.apply}


def _apply_rotary() -> Callable[..., Tensor] | None:
    path = os.environ.get("LOCANT_FLASH_ROTARY")
    if path is not None:
        spec = importlib.util.spec_from_file_location("flash_rotary", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.apply_rotary
    if importlib.util.find_spec("flash_attn") is None:
        return None
    from flash_attn.ops.triton.rotary import apply_rotary  # pyright: ignore[reportMissingImports]

    return apply_rotary


def _liger(cos: Tensor, sin: Tensor, device: str) -> dict[str, Turn]:
    """One launch, in place where the tokens come before the heads in memory, as they do here."""
    if device != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        print("Liger's kernel is not here: pip install liger-kernel", file=sys.stderr)
        return {}
    from liger_kernel.ops.rope import LigerRopeFunction  # pyright: ignore[reportMissingImports]

    cos, sin = (torch.cat([x, x], dim=-1).bfloat16() for x in (cos, sin))
    return {"Liger's kernel, in place": lambda q, k: LigerRopeFunction.apply(q, k, cos, sin)}


def _require_right(name: str, turn: Turn, q: Tensor, k: Tensor, shape: Shape) -> None:
    """A benchmark of something wrong is worth nothing: within two roundings of bfloat16, relative to the pair."""
    index = torch.arange(shape.offset, shape.offset + shape.seq, device=q.device, dtype=torch.float64)
    frequency = BASE ** (-torch.arange(0, shape.head_dim, 2, device=q.device, dtype=torch.float64) / shape.head_dim)
    some = slice(-64, None)  # float64 copies of all of it would not fit beside it
    cos, sin = (index[some, None] * frequency).cos(), (index[some, None] * frequency).sin()
    turned = turn(q.clone(), k.clone())
    for x, out in zip((q, k), turned, strict=True):
        x, out = x[:1, :, some].double(), out[:1, :, some].double()
        if "interleaved" in name:
            x, out = (t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for t in (x, out))
        a, b = x.chunk(2, dim=-1)
        off = out - torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        size = torch.cat([(a * a + b * b).sqrt()] * 2, dim=-1)
        worst = float((off.abs() / size).max())
        assert worst <= 2.0**-6, f"{name} is off by {worst:.3g} of the length of a pair"
