"""What `kernels.kernelize` puts into models of `transformers`: `self` is the module that is replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from locant.positions.angles import Angles

__all__ = ["apply_rotary_transformers", "exact_angles"]

TRAINED = "original_max_position_embeddings"


class apply_rotary_transformers(nn.Module):  # noqa: N801 -- the name by which transformers ask for it
    """For functions that are decorated as ``rotary_pos_emb``, with their bits, forward and backward."""

    has_backward = True
    can_torch_compile = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, ...]:
        """Queries and keys, rotated by cosines and sines as wide as a head, or half of it."""
        backwards, narrow = _convention(type(self).forward)
        cos, sin = (
            each[..., : q.shape[-1] // 2].unsqueeze(unsqueeze_dim) for each in (cos, -sin if backwards else sin)
        )
        learned = cos.requires_grad or sin.requires_grad
        rotate = _rotated if learned or torch.compiler.is_compiling() else _Rotation.apply
        rotated = ((x, rotate(x, cos, sin)) for x in (q, k))
        return tuple(y.to(x.dtype) if narrow else y for x, y in rotated)


class exact_angles(nn.Module):  # noqa: N801 -- beside the name above
    """For a rotary embedding that has one ``config.rope_parameters``: angles that are exact at every position.

    The name of its class is given to `kernels` by `replace_kernel_forward_from_hub(LlamaRotaryEmbedding, NAME)`.
    """

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Cosines and sines of every position, each twice, in the dtype of `x`."""
        rope = _rope(self.config)
        follows = rope["rope_type"] in ("dynamic", "longrope") and position_ids.numel()
        length = int(position_ids.max()) + 1 if follows else None
        if rope["rope_type"] == "longrope":  # which asks no more than whether it is longer
            length = min(length or 1, rope[TRAINED] + 1)
        found = _angles(2 * self.inv_freq.numel(), tuple(sorted(rope.items())), length)
        if abs(found.attention_factor / self.attention_scaling - 1) > 1e-6:
            raise ValueError(f"got a factor {self.attention_scaling:g} on cosines, expected {found.attention_factor:g}")
        return tuple(torch.cat([half] * 2, dim=-1).to(x.dtype) for half in found.cos_sin(position_ids, None, None))


class _Rotation(torch.autograd.Function):
    """Keeps cosines and sines alone, which all layers share."""

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _rotated(x, cos, sin)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin, ctx.dtype), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Pairs of i and i + half, rotated; autograd rounds every product of a gradient to `dtype`."""
    dtype = dtype or torch.promote_types(x.dtype, cos.dtype)
    a_cos, a_sin, b_cos, b_sin = ((part * by).to(dtype) for part in x.chunk(2, dim=-1) for by in (cos, sin))
    return torch.cat([a_cos - b_sin, b_cos + a_sin], dim=-1)


@torch.compiler.assume_constant_result
def _convention(original: Callable[..., Any]) -> tuple[bool, bool]:
    """Whether a function turns backwards, as NanoChat's does, and whether it keeps the dtype, as OLMo's does."""
    return _measured(original)


@functools.cache
def _measured(original: Callable[..., Any]) -> tuple[bool, bool]:
    if original is apply_rotary_transformers.forward:
        return False, False
    x, zero, one = torch.tensor([[[[1, 2, 3, 4]]]], dtype=torch.bfloat16), torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    turned, _ = original(None, x, x, zero, one)
    forwards, backwards = [-3, -4, 1, 2], [3, 4, -1, -2]
    if (found := turned.flatten().tolist()) not in (forwards, backwards):
        raise ValueError(f"got a function that turns 1, 2, 3, 4 into {found}, expected pairs of i and i + 2")
    return found == backwards, turned.dtype == x.dtype


def _rope(config: Any) -> dict[str, Any]:
    rope = {name: tuple(x) if isinstance(x, list) else x for name, x in config.rope_parameters.items() if x is not None}
    if rope["rope_type"] == "dynamic":
        rope[TRAINED] = config.max_position_embeddings
    elif rope["rope_type"] == "longrope":
        rope.setdefault(TRAINED, getattr(config, TRAINED, config.max_position_embeddings))
        rope.setdefault("factor", config.max_position_embeddings / rope[TRAINED])
    return rope


@functools.lru_cache(maxsize=8)
def _angles(dim: int, rope: tuple[tuple[str, Any], ...], length: int | None) -> Angles:
    from locant.positions.scaling import KINDS  # which needs NumPy

    names = {TRAINED: "original_max_seq_len", "partial_rotary_factor": "rotated_share"}
    values = {names.get(name, name): value for name, value in rope}
    kind = {kind.info.rope_type: kind for kind in KINDS.values()}[values["rope_type"]]
    scaling = kind(**{each.name: values[each.name] for each in fields(kind) if each.name in values})
    factor = scaling.effective_attention_factor
    return Angles(scaling.frequencies(dim, values["rope_theta"], length), attention_factor=factor)
