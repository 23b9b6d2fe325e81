"""The attention modules of a `transformers` model, and our attention function in them.

`transformers` calls the attention function that the configuration names, and the mask function with the same name. The
configuration of a swapped model names our functions, which are in `attention_function.py`. The hooks of
`token_places.py` pass the positions of the tokens to them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from locant.errors import InputError, LocantError
from locant.swapping.attention_function import attention, distance_mask
from locant.swapping.forward_arguments import named_argument

NAME = "locant"
"""The name of our attention function, for all models."""
SUPPORTED = ("sdpa", "eager")
"""The attention functions that our function can call, because they take a mask of numbers."""


def attention_modules(owner: nn.Module) -> dict[int, list[nn.Module]]:
    """Return the attention modules of each layer."""
    modules: dict[int, list[nn.Module]] = {}
    for module in owner.modules():
        layer = getattr(module, "layer_idx", None)
        if "Attention" in type(module).__name__ and isinstance(layer, int):
            modules.setdefault(layer, []).append(module)
    return modules


def has_learned_bias(owner: nn.Module) -> bool:
    """Return whether the model's attention has a learned bias, such as T5's."""
    return any("relative_attention_bias" in path or "rel_pos" in path for path, _ in owner.named_parameters())


def require_point(owner: Any, *, has_known_bias: bool = False) -> None:
    """Raise `InputError` unless the model calls an attention function by name that takes a mask of numbers.

    T5 does not declare support for other functions, because they do not know the bias that it passes.
    """
    name = type(owner).__name__
    if not (owner._supports_attention_backend or has_known_bias) or not owner._can_set_attn_implementation():
        got = f"got {name}, whose attention is not called by name, so that nothing can be added to its scores"
        raise InputError(got, "use a model whose attention goes through transformers.AttentionInterface")
    if has_learned_bias(owner) and not has_known_bias:
        raise InputError(f"got {name}, whose attention has its own learned bias", "use a model without one")
    from transformers.masking_utils import sdpa_mask

    named_argument(sdpa_mask, "the slots of queries", "q_length")
    if owner.config._attn_implementation not in SUPPORTED:
        got = f"got {name} with {owner.config._attn_implementation} attention, which is fused and takes no bias"
        raise InputError(got, "model.set_attn_implementation('sdpa')")


def install_function(owner: Any, undo: ExitStack) -> None:
    """Let the model call our attention function.

    If the model is later set to another function, a hook raises an error, because the encoding would be lost.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, distance_mask)
    undo.callback(_restore_function, owner, owner.config._attn_implementation)
    owner.set_attn_implementation(NAME)
    undo.callback(owner.register_forward_pre_hook(_require_name).remove)


def _require_name(owner: Any, args: tuple[Any, ...]) -> None:
    name = owner.config._attn_implementation
    if name != NAME:
        got = f"got {type(owner).__name__} set to {name} attention while it is swapped, which would lose its encoding"
        raise LocantError(got, f"handle.undo(), then set_attn_implementation({name!r}) and swap again")


def _restore_function(owner: Any, previous: str) -> None:
    """Set the previous attention function again, unless the user has set another one since."""
    if owner.config._attn_implementation == NAME:
        owner.set_attn_implementation(previous)
