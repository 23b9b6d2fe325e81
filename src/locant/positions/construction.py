"""The options of encodings' constructors, and errors that suggest the right call for an unknown option.

In tutorials, every encoding has a width and a length. Most encodings here have no length, and a second number without a
name would set another option. So options have names, and the error for a wrong name contains the right call.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from locant.arguments import short_repr
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
"""The names that other packages use for an option, by the option's name here."""


def constructor_options(kind: type) -> dict[str, bool] | None:
    """Return whether each option of a constructor is required, or ``None`` if the constructor takes any option."""
    parameters = [*inspect.signature(kind.__init__).parameters.values()][1:]
    if any(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in parameters):
        return None
    return {parameter.name: parameter.default is parameter.empty for parameter in parameters}


def required_options(kind: type) -> tuple[str, ...]:
    """Return the options that a constructor requires."""
    return tuple(name for name, required in (constructor_options(kind) or {}).items() if required)


def require_arguments(kind: type, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise `RangeError` if there are too many arguments without a name, or an option with an unknown name."""
    parameters = [*inspect.signature(kind.__init__).parameters.values()][1:]
    if any(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters]
    in_order = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    if surplus := arguments[len(in_order) :]:
        got = f"got {', '.join(map(short_repr, surplus))} without a name for {kind.__name__}"
        expected = f"expected {', '.join(in_order) or 'nothing'} and then options by name"
        raise RangeError(f"{got}, {expected}", _call_with_name(kind, names, arguments, len(in_order)))
    if unknown := [name for name in options if name not in names]:
        got = " and ".join(f"{name}={short_repr(options[name])}" for name in unknown)
        remedies = [_replacement_for(name, options, kind, names) for name in unknown]
        is_call = any(remedy.startswith(kind.__name__) for remedy in remedies)
        remedy = remedies[0] if is_call else ", ".join(remedies)
        raise RangeError(f"got {got} for {kind.__name__}, which takes {', '.join(names) or 'no options'}", remedy)


def require_sizes(kind: type, given: Collection[str], name: str = "") -> None:
    """Raise `RangeError` unless `given` has every option that a constructor requires.

    `name` is the name that was passed to `locant.encoding`. It is empty if the constructor itself was called.
    """
    missing = [size for size in required_options(kind) if size not in given]
    if not missing:
        return
    got = f"got no {' or '.join(missing)} for {repr(name) if name else kind.__name__}"
    sizes = _placeholders(kind)
    call = f"locant.encoding({name!r}, {sizes})" if name else f"{kind.__name__}({sizes})"
    raise RangeError(f"{got}, which takes {', '.join(constructor_options(kind) or ())}", call)


def _call_with_name(kind: type, names: Sequence[str], arguments: Sequence[Any], count: int) -> str:
    """Return the call without the first surplus argument, and the call that passes it by name."""
    *accepted, surplus = [short_repr(value) for value in arguments[: count + 1]]
    shorter = f"{kind.__name__}({', '.join(accepted)}){_length_note(kind)}"
    if len(names) == count:
        return shorter
    with_name = ", ".join([*accepted, f"{names[count]}={surplus}"])
    return f"{shorter}, or {kind.__name__}({with_name}), if you mean that"


def _replacement_for(name: str, options: Mapping[str, Any], kind: type, names: Sequence[str]) -> str:
    """Return the remedy for an option that an encoding does not take."""
    option = next((key for key, synonyms in SYNONYMS.items() if key in names and name in synonyms), None)
    if option is not None and option not in options:
        return f"{option}={short_repr(options[name])}"
    width_note = " with d_model // num_heads, the width of one head" if name in MODEL_WIDTHS else ""
    length_note = _length_note(kind) if name in LENGTHS else ""
    return f"{kind.__name__}({_placeholders(kind)}){width_note if 'head_dim' in names else ''}{length_note}"


def _placeholders(kind: type) -> str:
    """Return the required options of a call, with dots as values."""
    return ", ".join(f"{size}=..." for size in required_options(kind))


def _length_note(kind: type) -> str:
    return "" if any(size in LENGTHS for size in required_options(kind)) else ", which needs no length"
