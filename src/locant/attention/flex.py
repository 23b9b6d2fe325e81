"""Attention through FlexAttention: the bias is a function that the compiler puts into the kernel, and no tensor.

On CUDA with every gradient, parameters of the bias included. On a CPU only forward. Always compiled: without the
compiler FlexAttention holds all scores, which is what it is chosen to avoid. The first call of a kind takes seconds.

A kernel for CPUs is compiled for its sizes alone (with symbolic ones torch 2.13 writes C++ that does not compile), so
there queries and keys are filled up with padding to powers of two. Blocks of padding cost no arithmetic.

The backward is torch's own. It takes the mean of a row from the output, rounded to the dtype of the queries: in
bfloat16 the gradient of a learned bias is drawn towards that of plain distances, the more so the farther the mean of
the values lies from zero. Written out with 300 tokens and values of deviation 1, gradients of slopes so computed were
off by 0.4 percent around a mean of 0, by 20 percent around 4. In float32, and with ``backend="eager"``, they are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from locant.attention.block_mask import BLOCK, block_mask
from locant.errors import LocantError
from locant.positions import PositionEncoding, Positions
from locant.positions.base import ScoreMod, has_bias
from locant.positions.documents import PADDING

__all__ = ["flex_attention"]

KINDS = 256
"""How many kernels may be compiled in one process: encodings times sizes. torch would stop after 8."""


def flex_attention(
    q: Float[Tensor, "batch heads query head_dim"],
    k: Float[Tensor, "batch kv_heads key head_dim"],
    v: Float[Tensor, "batch kv_heads key value_dim"],
    encoding: PositionEncoding | None,
    positions: Positions,
    k_positions: Positions | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> Float[Tensor, "batch heads query value_dim"]:
    """The output in the dtype of `q`; the bias is the encoding's `score_mod`."""
    keys = positions if k_positions is None else k_positions
    if not q.shape[2] or not v.shape[3]:
        return q.new_zeros(*q.shape[:3], v.shape[3]) + q[:, :, :0].sum()
    queries = q.shape[2]
    if q.device.type == "cpu":
        q, positions = _filled(q, positions)
        (k, keys), v = _filled(k, keys), _filled(v, keys)[0]
    score_mod = None if encoding is None else _function_of(encoding, q, k, positions, keys)
    mask = block_mask(positions, keys, causal, window)
    y = _run(q, k, v, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return y[:, :, :queries]


def _function_of(
    encoding: PositionEncoding, q: Tensor, k: Tensor, positions: Positions, keys: Positions
) -> ScoreMod | None:
    """Its `score_mod`; without one there must be no bias either."""
    score_mod = encoding.score_mod(q, k, positions, keys) if has_bias(encoding) else None
    if score_mod is None and encoding.bias(q[:, :, :1], k[:, :, :1], positions.slice(0, 1), keys.slice(0, 1)) is None:
        return None
    if score_mod is None:
        raise LocantError(f"got {type(encoding).__name__} with a bias but no score_mod", "backend='tiled'")
    return score_mod


def _filled(x: Tensor, positions: Positions) -> tuple[Tensor, Positions]:
    """With padding up to the next power of two, a block at least."""
    more = max(1 << (x.shape[2] - 1).bit_length(), BLOCK) - x.shape[2]
    if not more:
        return x, positions
    batch = positions.batch
    nowhere = torch.zeros(batch, more, dtype=torch.int64, device=x.device)
    padding = Positions(nowhere, torch.full_like(nowhere, PADDING), min_index=0, max_index=0)
    return F.pad(x, (0, 0, 0, more)), Positions.cat([positions, padding])


def _run(*tensors: Tensor, **options: Any) -> Tensor:
    if torch.compiler.is_compiling():
        from torch.nn.attention import flex_attention

        return flex_attention.flex_attention(*tensors, **options)  # type: ignore[return-value]
    from torch._dynamo import config
    from torch._dynamo.exc import TorchDynamoException

    try:
        with config.patch(recompile_limit=KINDS):
            return _compiled(tensors[0].device.type)(*tensors, **options)
    except TorchDynamoException as error:
        cause = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise LocantError(f"torch could not compile FlexAttention here: {cause}", "backend='tiled'") from error


@functools.cache
def _compiled(device: str) -> Callable[..., Tensor]:
    from torch.nn.attention import flex_attention

    return torch.compile(flex_attention.flex_attention, fullgraph=True, dynamic=False if device == "cpu" else None)
