"""What `kernels.kernelize` puts into models of `transformers`: `self` is the module that is replaced."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from locant.kernels.norm_rotary import HeadNorm, norm_and_rotate
from locant.kernels.norm_rotary.reference import normalize
from locant.positions.angles import Angles

__all__ = ["apply_rotary_transformers", "exact_angles", "qk_norm_attention"]

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
        found = _angles_of(_rope(self.config), 2 * self.inv_freq.numel(), position_ids)
        if abs(found.attention_factor / self.attention_scaling - 1) > 1e-6:
            raise ValueError(f"got a factor {self.attention_scaling:g} on cosines, expected {found.attention_factor:g}")
        return tuple(torch.cat([half] * 2, dim=-1).to(x.dtype) for half in found.cos_sin(position_ids, None, None))


class qk_norm_attention(nn.Module):  # noqa: N801 -- beside the names above
    """For attention with a norm of queries and keys before the rotation (Qwen3, Gemma 3, OLMo 2 and 3, GLM-4.5).

    The norm and the rotation are one pass, forward and backward, with angles that are exact at every position. The
    name of its class is given to `kernels` by `replace_kernel_forward_from_hub(Qwen3Attention, NAME)`.
    """

    has_backward = True

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The output of attention, and its weights if the model's function for attention returns them."""
        cache = kwargs.pop("past_key_values", None) if cache is None else cache
        position_ids = kwargs.get("position_ids")
        if position_ids is None:
            raise ValueError(
                f"got no position_ids for {type(self).__name__}; use a model that passes them to attention"
            )
        q, k, v = (
            project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        module = sys.modules[type(self).__module__]
        _require_half_layout(module.apply_rotary_pos_emb)
        rope = _rope(self.config, getattr(self, "layer_type", None))
        angles = _angles_of(rope, position_embeddings[0].shape[-1], position_ids)
        tables = angles.tables(q.device, min_index=None)
        q, k = norm_and_rotate(q, k, position_ids, tables, "half", _head_norm(self.q_norm, self.k_norm))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = module.ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, module.eager_attention_forward
        )
        settings = {"dropout": self.attention_dropout if self.training else 0.0, "scaling": self.scaling}
        if hasattr(self, "sliding_window"):
            settings["sliding_window"] = self.sliding_window
        y, weights = attend(self, q, k, v, attention_mask, **settings, **kwargs)
        return self.o_proj(y.flatten(2)), weights


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
    turned = _turned(functools.partial(original, None))
    return _pairs_of_half(turned) == BACKWARDS, turned.dtype == torch.bfloat16


FORWARDS, BACKWARDS = [-3, -4, 1, 2], [3, 4, -1, -2]
"""What a quarter turn makes of 1, 2, 3, 4 in the half layout."""


def _turned(rotation: Callable[..., Any]) -> Tensor:
    x, zero, one = torch.tensor([[[[1, 2, 3, 4]]]], dtype=torch.bfloat16), torch.zeros(1, 1, 4), torch.ones(1, 1, 4)
    return rotation(x, x, zero, one)[0]


def _pairs_of_half(turned: Tensor) -> list[float]:
    if (found := turned.flatten().tolist()) not in (FORWARDS, BACKWARDS):
        raise ValueError(f"got a function that turns 1, 2, 3, 4 into {found}, expected pairs of i and i + 2")
    return found


@functools.cache
def _require_half_layout(rotation: Callable[..., Any]) -> None:
    if _pairs_of_half(_turned(rotation)) != FORWARDS:
        raise ValueError("got a model that turns backwards, which this layer does not; leave its attention as it is")


def _head_norm(q_norm: Any, k_norm: Any) -> HeadNorm:
    """The norms of queries and of keys as the value that the kernel takes."""
    eps = q_norm.variance_epsilon if hasattr(q_norm, "variance_epsilon") else q_norm.eps
    plus_one, round_before_weight = _norm_settings(type(q_norm), eps)
    return HeadNorm(q_norm.weight, k_norm.weight, eps, plus_one, round_before_weight=round_before_weight)


@functools.cache
def _norm_settings(kind: Callable[..., Any], eps: float) -> tuple[bool, bool]:
    """Whether a class of norms multiplies by 1 + weight, and whether it rounds before that, by its bits in bfloat16."""
    x = torch.linspace(-3, 3, 512, device="cpu").sin().mul(3).bfloat16().view(1, 1, 64, 8)
    with torch.no_grad():
        norm = kind(8, eps).to("cpu", torch.bfloat16)
        norm.weight.copy_(torch.linspace(-2, 3, 8))
        for plus_one, round_before_weight in itertools.product((False, True), (True, False)):
            settings = HeadNorm(None, None, eps, plus_one, round_before_weight=round_before_weight)
            if torch.equal(normalize(x, norm.weight, settings), norm(x)):
                return plus_one, round_before_weight
    raise ValueError(f"got {kind.__name__}, expected the RMSNorm of Qwen3, Gemma 3 or OLMo 2")


def _angles_of(rope: dict[str, Any], dim: int, position_ids: Tensor) -> Angles:
    """The angles of a configuration, whose scaling may follow the length."""
    follows = rope["rope_type"] in ("dynamic", "longrope") and position_ids.numel()
    length = int(position_ids.max()) + 1 if follows else None
    if rope["rope_type"] == "longrope":  # which asks no more than whether it is longer
        length = min(length or 1, rope[TRAINED] + 1)
    return _angles(dim, tuple(sorted(rope.items())), length)


def _rope(config: Any, layer_type: str | None = None) -> dict[str, Any]:
    given = config.rope_parameters
    given = given.get(layer_type, given)  # layers of Gemma 3 differ
    rope = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items() if x is not None}
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
