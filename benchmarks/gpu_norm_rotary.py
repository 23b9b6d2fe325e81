"""On a GPU: what do the norm of each head, the rotation and the append to a cache cost, beside copying the same bytes?

`python -m benchmarks gpu` runs it with the other benchmarks. Shapes and the way to measure are those of `gpu_rotary`.
Every contender gets q, k and v as a projection leaves them, and its cosines ready made, except locant, FlashInfer and
TransformerEngine, which make them from positions or angles. vLLM's kernel takes one tensor of q, k and v and overwrites
it. The backward is measured for contenders that have one. A contender that is not installed is named, and not measured.

This has not yet been run on a GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_rotary import BASE, ROUNDS, SHAPES, Shape, measure_on_gpu
from benchmarks.timing import Row
from locant import HeadNorm, Positions, Rotary
from locant.kernels.norm_rotary import norm_and_rotate_into

__all__ = ["contenders", "rows"]

EPS = 1e-6
PEERS = {
    "FlashInfer": "flashinfer",
    "Liger": "liger_kernel",
    "vLLM": "vllm",
    "TransformerEngine": "transformer_engine",
}
Parts = tuple[Tensor, Tensor, Tensor]
Way = Callable[[Tensor, Tensor, Tensor], Parts]
"""From q, k and v to the rotated queries, and the keys and values in a cache."""


class _Case:
    """The tokens of a shape, the weights of their norms, and a cache."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        heads = shape.heads, shape.kv_heads, shape.kv_heads
        self.qkv = torch.randn(shape.batch, shape.seq, sum(heads) * shape.head_dim, device=device).bfloat16()
        self.q, self.k, self.v = (
            part.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
            for part in self.qkv.split([n * shape.head_dim for n in heads], dim=-1)
        )
        self.weights = [torch.randn(shape.head_dim, device=device).bfloat16() for _ in range(2)]
        self.positions = Positions.after(shape.offset, shape.seq).to(torch.device(device))
        self.rotary = Rotary(shape.head_dim, base=BASE)
        self.cos, self.sin = self.rotary.cos_sin(self.positions)
        size = (shape.batch, shape.kv_heads, shape.seq, shape.head_dim)
        self.cache = torch.empty(2, *size, device=device, dtype=torch.bfloat16)

    def append(self, q: Tensor, k: Tensor, v: Tensor) -> Parts:
        return q, self.cache[0].copy_(k), self.cache[1].copy_(v)


def rows(device: str = "cuda", rounds: int = ROUNDS) -> list[Row]:
    """The forward with the append, and the backward, of every contender at every shape."""
    absent = [name for name, module in PEERS.items() if importlib.util.find_spec(module) is None]
    if absent:
        print(f"not installed, and so not measured: {', '.join(absent)}")
    found = []
    for shape in SHAPES:
        case = _Case(shape, device)
        ways = contenders(case)
        for name, way in ways.items():
            _require_right(name, way, case)
        q_into = torch.empty_like(case.q)
        copy = {
            "copy of q, k and v into existing memory (the limit)": lambda case=case, into=q_into: (
                into.copy_(case.q), case.append(case.q, case.k, case.v)
            )
        }  # fmt: skip
        runs = {name: lambda way=way, case=case: way(case.q, case.k, case.v) for name, way in ways.items()}
        question = f"norm, rotation and append, {shape.words}"
        found += measure_on_gpu(question, copy | runs, device, rounds)
        found += measure_on_gpu(f"backward of norm and rotation, {shape.words}", _backwards(case), device, rounds)
    return found


def contenders(case: _Case) -> dict[str, Way]:
    """Every way to norm, rotate and append that is installed."""
    rotary, norm, out = case.rotary, HeadNorm(*case.weights, eps=EPS), torch.empty_like(case.q)
    tables = rotary.angles.tables(case.q.device, case.positions.max_index)

    def in_one_launch(q: Tensor, k: Tensor, v: Tensor) -> Parts:
        keys, values = case.cache
        norm_and_rotate_into(q, k, v, out, keys, values, case.positions.index, tables, "half", norm)
        return out, keys, values

    torch.compiler.reset()
    eager: Way = lambda q, k, v: case.append(*_usual(case, q, k), v)  # noqa: E731
    found: dict[str, Way] = {
        "locant, one launch": in_one_launch,
        "torch, eager": eager,
        "torch.compile": torch.compile(eager, dynamic=False, fullgraph=True),
    }
    if case.device == "cuda":
        for name, module in PEERS.items():
            if importlib.util.find_spec(module) is not None:
                found[name] = {
                    "FlashInfer": _flashinfer, "Liger": _liger, "vLLM": _vllm, "TransformerEngine": _transformer_engine,
                }[name](case)  # fmt: skip
    return found


def _usual(case: _Case, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The three steps of models: torch's norm, and the rotation with cosines in the dtype of the tokens."""
    cos, sin = (torch.cat([x, x], dim=-1)[:, None].to(q.dtype) for x in (case.cos, case.sin))
    normed = (F.rms_norm(x, x.shape[-1:], weight, EPS) for x, weight in zip((q, k), case.weights, strict=True))
    rotated = (x * cos + torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], dim=-1) * sin for x in normed)
    return next(rotated), next(rotated)


def _flashinfer(case: _Case) -> Way:
    """Two norms, a rotation of both in place, and the copies."""
    import flashinfer  # pyright: ignore[reportMissingImports]

    index = case.positions.index.expand(case.shape.batch, -1).flatten().int()

    def way(q: Tensor, k: Tensor, v: Tensor) -> Parts:
        rows = (x.transpose(1, 2).reshape(-1, x.shape[-1]) for x in (q, k))
        normed = [flashinfer.norm.rmsnorm(x, w, EPS) for x, w in zip(rows, case.weights, strict=True)]
        flat = [x.view(-1, each.shape[1], each.shape[3]) for x, each in zip(normed, (q, k), strict=True)]
        flashinfer.rope.apply_rope_pos_ids_inplace(*flat, index, rope_theta=BASE)
        turned = [x.unflatten(0, (len(q), -1)).transpose(1, 2) for x in flat]
        return case.append(*turned, v=v)

    return way


def _liger(case: _Case) -> Way:
    """Two norms, a rotation of both, and the copies."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]
    from liger_kernel.ops.rope import LigerRopeFunction  # pyright: ignore[reportMissingImports]

    cos, sin = (torch.cat([x, x], dim=-1).bfloat16() for x in (case.cos, case.sin))

    def way(q: Tensor, k: Tensor, v: Tensor) -> Parts:
        rows = (x.transpose(1, 2) for x in (q, k))
        normed = [
            LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False) for x, w in zip(rows, case.weights, strict=True)
        ]
        return case.append(*LigerRopeFunction.apply(*(x.transpose(1, 2) for x in normed), cos, sin), v=v)

    return way


def _vllm(case: _Case) -> Way:
    """One launch for norms and rotation in place, and the copies. When it is timed, it overwrites one tensor again."""
    import vllm._custom_ops  # noqa: F401  # registers the operators  # pyright: ignore[reportMissingImports]

    cache = torch.cat([*map(torch.Tensor.bfloat16, (x[0] for x in (case.cos, case.sin)))], dim=-1)
    own = case.qkv.clone().flatten(0, 1)
    shape, index = case.shape, torch.arange(case.shape.seq, device=case.device).repeat(case.shape.batch)

    def way(q: Tensor, k: Tensor, v: Tensor) -> Parts:
        qkv = own
        if q is not case.q:
            qkv = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], dim=-1).flatten(0, 1)
        heads = shape.heads, shape.kv_heads, shape.kv_heads
        torch.ops._C.fused_qk_norm_rope(qkv, *heads, shape.head_dim, EPS, *case.weights, cache, True, index)
        parts = qkv.view(shape.batch, shape.seq, -1, shape.head_dim).transpose(1, 2).split(heads, dim=1)
        return case.append(*parts)

    return way


def _transformer_engine(case: _Case) -> Way:
    """Two norms, two rotations from angles, and the copies."""
    import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb  # pyright: ignore[reportMissingImports]

    angles = torch.cat([torch.atan2(case.sin, case.cos)] * 2, dim=-1)[0, :, None, None]
    norms = [te.RMSNorm(case.shape.head_dim, EPS, device=case.device, dtype=torch.bfloat16) for _ in range(2)]
    for norm, weight in zip(norms, case.weights, strict=True):
        norm.weight.data.copy_(weight)

    def way(q: Tensor, k: Tensor, v: Tensor) -> Parts:
        turned = [
            apply_rotary_pos_emb(norm(x.transpose(1, 2)), angles, tensor_format="bshd", fused=True).transpose(1, 2)
            for x, norm in zip((q, k), norms, strict=True)
        ]
        return case.append(*turned, v=v)

    return way


def _backwards(case: _Case) -> dict[str, Callable[[], object]]:
    """The gradients of q, k and both weights, by locant and by torch's steps."""
    leaves = [x.detach().clone().requires_grad_() for x in (case.q, case.k, *case.weights)]
    cotangents = [torch.randn_like(x) for x in leaves[:2]]
    into = [torch.empty_like(x) for x in leaves[:2]]
    norm = HeadNorm(*leaves[2:], eps=EPS)
    compiled = torch.compile(lambda q, k: _usual(case, q, k), dynamic=False, fullgraph=True)

    def running(out: tuple[Tensor, Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(out, leaves, cotangents, retain_graph=True)

    case.weights = leaves[2:]
    return {
        "copy of both gradients into existing memory (the limit)": lambda: [
            x.copy_(y) for x, y in zip(into, cotangents, strict=True)
        ],
        "locant": running(case.rotary.rotate(*leaves[:2], positions=case.positions, norm=norm)),
        "torch, eager": running(_usual(case, *leaves[:2])),
        "torch.compile": running(compiled(*leaves[:2])),
    }


def _require_right(name: str, way: Way, case: _Case) -> None:
    """Raise unless the results are those of float64 formulas, within five roundings of bfloat16."""
    found = way(*(x.clone() for x in (case.q, case.k, case.v)))
    some = slice(-64, None)  # float64 copies of all of it would not fit beside it
    for x, out, weight in zip((case.q, case.k), found, case.weights, strict=False):
        x, out = x[:1, :, some].double(), out[:1, :, some].double()
        x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
        index = case.positions.index[0, some, None].double()
        frequency = BASE ** (-torch.arange(0, x.shape[-1], 2, device=x.device, dtype=torch.float64) / x.shape[-1])
        cos, sin = (index * frequency).cos(), (index * frequency).sin()
        a, b = x.chunk(2, dim=-1)
        off = out - torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        worst = float((off.abs() / torch.cat([(a * a + b * b).sqrt()] * 2, dim=-1)).max())
        assert worst <= 5 * 2.0**-8, f"{name} is off by {worst:.3g} of the length of a pair"
    assert torch.equal(found[2], case.v), f"{name} changes the values"
