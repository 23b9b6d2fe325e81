"""How an encoding is constructed: which options it takes, and errors that say what to write for one it does not take.

Tutorials give every encoding a width and a length. Most encodings here have no length, and a number in second place
would be taken for something else, so options are named, and a wrong one is answered with the right call.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from locant.arguments import shown
from locant.errors import RangeError

LENGTHS = (
    "max_seq_len", "max_len", "max_length", "seq_len", "seq_length", "context_length", "block_size",
    "max_position_embeddings", "max_positions", "n_positions", "num_positions", "num_embeddings",
)  # fmt: skip
MODEL_WIDTHS = ("d_model", "dim", "embed_dim", "embedding_dim", "emb_dim", "hidden_size", "n_embd")
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "max_seq_len": LENGTHS,
    "d_model": MODEL_WIDTHS,
    "head_dim": ("dim_head", "d_head", "head_size", "d_k"),
    "num_heads": ("n_heads", "n_head", "heads", "num_attention_heads"),
    "base": ("theta", "rope_theta", "rope_base", "rotary_base"),
    "max_distance": ("max_relative_position", "max_relative_positions", "clip"),
    "num_buckets": ("relative_attention_num_buckets", "buckets"),
}
"""What other packages call an option, by its name here."""


def options_of(kind: type) -> dict[str, bool] | None:
    """Return whether each option of a constructor is required, by name, or ``None`` if it takes any option."""
    parameters = [*inspect.signature(kind.__init__).parameters.values()][1:]
    if any(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in parameters):
        return None
    return {parameter.name: parameter.default is parameter.empty for parameter in parameters}


def sizes_of(kind: type) -> tuple[str, ...]:
    """Return the options that a constructor requires."""
    return tuple(name for name, required in (options_of(kind) or {}).items() if required)


def require_arguments(kind: type, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise a `RangeError` if there are too many arguments without a name, or one with a name that is not taken."""
    parameters = [*inspect.signature(kind.__init__).parameters.values()][1:]
    if any(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters]
    in_order = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    if surplus := arguments[len(in_order) :]:
        got = f"got {', '.join(map(shown, surplus))} without a name for {kind.__name__}"
        expected = f"expected {', '.join(in_order) or 'nothing'} and then options by name"
        raise RangeError(f"{got}, {expected}", _named_call(kind, names, arguments, len(in_order)))
    if unknown := [name for name in options if name not in names]:
        got = " and ".join(f"{name}={shown(options[name])}" for name in unknown)
        remedies = [_instead_of(name, options, kind, names) for name in unknown]
        is_call = any(remedy.startswith(kind.__name__) for remedy in remedies)
        remedy = remedies[0] if is_call else ", ".join(remedies)
        raise RangeError(f"got {got} for {kind.__name__}, which takes {', '.join(names) or 'no options'}", remedy)


def require_sizes(kind: type, given: Collection[str], name: str = "") -> None:
    """Raise a `RangeError` unless every option that a constructor requires is `given`.

    `name` is that by which `locant.encoding` was asked for it; without one the constructor itself was called.
    """
    missing = [size for size in sizes_of(kind) if size not in given]
    if not missing:
        return
    got = f"got no {' or '.join(missing)} for {repr(name) if name else kind.__name__}"
    sizes = _open_sizes(kind)
    call = f"locant.encoding({name!r}, {sizes})" if name else f"{kind.__name__}({sizes})"
    raise RangeError(f"{got}, which takes {', '.join(options_of(kind) or ())}", call)


def _named_call(kind: type, names: Sequence[str], arguments: Sequence[Any], count: int) -> str:
    """The call without the first surplus argument, and the call in which that has a name."""
    *given, surplus = [shown(value) for value in arguments[: count + 1]]
    right = f"{kind.__name__}({', '.join(given)}){_without_length(kind)}"
    if len(names) == count:
        return right
    named = ", ".join([*given, f"{names[count]}={surplus}"])
    return f"{right}, or {kind.__name__}({named}), if that is meant"


def _instead_of(name: str, options: Mapping[str, Any], kind: type, names: Sequence[str]) -> str:
    """What to write in the place of an option that an encoding does not take."""
    meant = next((own for own, others in SYNONYMS.items() if own in names and name in others), None)
    if meant is not None and meant not in options:
        return f"{meant}={shown(options[name])}"
    of_one_head = " with d_model // num_heads, the width of one head" if name in MODEL_WIDTHS else ""
    no_length = _without_length(kind) if name in LENGTHS else ""
    return f"{kind.__name__}({_open_sizes(kind)}){of_one_head if 'head_dim' in names else ''}{no_length}"


def _open_sizes(kind: type) -> str:
    """The options that a call has to give, with the values left open."""
    return ", ".join(f"{size}=..." for size in sizes_of(kind))


def _without_length(kind: type) -> str:
    return "" if any(size in LENGTHS for size in sizes_of(kind)) else ", which needs no length"
