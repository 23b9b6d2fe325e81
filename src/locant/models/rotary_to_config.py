"""Write a rotary encoding as keys of a Hugging Face configuration, which `transformers` and vLLM read."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from locant.arguments import one_of, whole
from locant.errors import InputError
from locant.models.config_values import TRAINED
from locant.models.multimodal import axes_in_turns
from locant.models.rope_parameters import write_scaling
from locant.positions.encodings.rotary import Rotary
from locant.positions.pair_table import Pairs
from locant.positions.scaling import (
    NTK,
    DynamicNTK,
    Llama3,
    LongRoPE,
    Proportional,
    Scaling,
    Unscaled,
    YaRN,
    ntk_exponent,
)


def rotary_to_config(
    rotary: Rotary, *, max_seq_len: int | None = None, form: str = "rope_parameters"
) -> dict[str, Any]:
    """Return the keys with which `transformers` and vLLM rotate as this encoding does.

    An encoding that is read from these keys rotates in the same way. It also equals this encoding, with two exceptions:

    - `NTK` is written as a larger base, which has the same effect.
    - Fields without an effect are left out. `YaRN` needs ``mscale`` and ``mscale_all_dim`` only if it has both and no
      ``attention_factor``. The ``factor`` of `LongRoPE` has no effect if there is an ``attention_factor``, and is left
      out if it contradicts `max_seq_len`.

    `angles` and the length that `for_length` sets are not written. ``rope_interleave`` and ``partial_rotary_factor``
    are written, so that an architecture with another layout or another rotary dimension raises an error.
    `Rotary.to_config` describes the arguments.
    """
    sections = list(rotary.sections) if rotary.sections is not None else None
    if not rotary.has_named_layout and (sections := _interleaved_sections(rotary.pairs)) is None:
        got = f"got a table of {rotary.pairs}, which the keys of a configuration cannot express in general"
        raise InputError(got, "use the model_type that it was read from, with its keys")
    if rotary.axial:
        raise InputError("got axial=True, which no text model's configuration can express", "use sections alone")
    if isinstance(rotary.scaling, Proportional) and rotary.rotary_dim != rotary.head_dim:
        got = f"got Proportional scaling of {rotary.rotary_dim} of {rotary.head_dim} dimensions, and one share for both"
        raise InputError(got, "rotary_dim=head_dim, or use another scaling")
    one_of("form", form, ("rope_parameters", "rope_scaling"))
    if max_seq_len is not None:
        max_seq_len = whole("max_seq_len", max_seq_len, 1, remedy="pass the longest sequence in tokens")
    scaling, base = with_base(rotary.scaling, rotary)
    lengths = _written_lengths(scaling, max_seq_len)
    rope = write_scaling(scaling) | _written_temperature(rotary)
    if isinstance(scaling, LongRoPE) and scaling.attention_factor is not None:
        stretched = round(scaling.factor * scaling.original_max_seq_len)
        if (
            stretched != lengths["max_position_embeddings"]
        ):  # then the factor has no effect, and reading it would raise an error
            del rope["factor"]
    if sections is not None:
        rope["mrope_section"] = sections
        rope |= {} if rotary.has_named_layout else {"mrope_interleaved": True}
    share = {} if rotary.rotary_dim == rotary.head_dim else {"partial_rotary_factor": _written_share(rotary)}
    sizes: dict[str, Any] = {"head_dim": rotary.head_dim, "rope_interleave": rotary.layout == "interleaved"}
    sizes |= lengths
    if form == "rope_parameters":
        return {"rope_parameters": {**rope, "rope_theta": base, **share}, **sizes}
    return {"rope_scaling": None if rope == {"rope_type": "default"} else rope, "rope_theta": base, **share, **sizes}


def warn_if_servers_differ(rotary: Rotary) -> None:
    """Warn if `transformers` and inference servers interpret the keys of this encoding differently."""
    scaling = rotary.scaling
    if isinstance(scaling, LongRoPE) and scaling.short_factor != scaling.long_factor:
        trained = scaling.original_max_seq_len
        warnings.warn(
            f"LongRoPE: transformers uses the short factors for texts of up to {trained} tokens. vLLM and llama.cpp "
            "use the long ones for every text if they are started for more, and SGLang if one text of a batch has "
            f"more. Serve texts of up to {trained} tokens with that maximum length",
            stacklevel=3,
        )


def _interleaved_sections(pairs: Pairs) -> list[int] | None:
    """Return the ``mrope_section`` of a table whose pairs alternate between the three axes (Qwen3-VL), or ``None``."""
    sections = [pairs.axes.count(axis) if pairs.axes else 0 for axis in range(3)]
    plain = Pairs.of(2 * len(pairs))
    return sections if pairs == replace(plain, axes=axes_in_turns(len(pairs), *sections[1:]), num_axes=3) else None


def with_base(scaling: Scaling, rotary: Rotary) -> tuple[Scaling, float]:
    """Return the scaling and the base to write. NTK scaling becomes a larger base."""
    if not isinstance(scaling, NTK):
        return scaling, float(rotary.base)
    exponent = ntk_exponent(rotary.rotary_dim) if scaling.form == "aware" else 1.0
    return Unscaled(), rotary.base * scaling.factor**exponent


def _written_temperature(rotary: Rotary) -> dict[str, Any]:
    """Return the key for the temperature of Ministral 3 and Mistral 4. Its step must be the trained length."""
    if rotary.temperature is None:
        return {}
    trained = getattr(rotary.scaling, "original_max_seq_len", None)
    if (rotary.temperature.step, rotary.temperature.shift) != (trained, 0):
        got = f"got {rotary.temperature} with a scaling from {trained} tokens, which one key cannot express"
        raise InputError(got, f"Temperature(step={trained or 8192}), and a scaling from the same number of tokens")
    return {"llama_4_scaling_beta": rotary.temperature.weight}


def _written_share(rotary: Rotary) -> float:
    """Return a factor for which ``int(head_dim * factor)`` is the rotary dimension, despite rounding."""
    share = rotary.rotary_dim / rotary.head_dim
    return share if int(rotary.head_dim * share) == rotary.rotary_dim else (rotary.rotary_dim + 0.5) / rotary.head_dim


def _written_lengths(scaling: Scaling, max_seq_len: int | None) -> dict[str, Any]:
    """Return the keys for the longest sequence, if known, and for a trained length outside the rope parameters."""
    if isinstance(scaling, DynamicNTK):  # transformers uses max_position_embeddings as the trained length
        trained = scaling.original_max_seq_len
        if max_seq_len not in (None, trained):
            got = f"got max_seq_len={max_seq_len}, but dynamic scaling needs {trained} there"
            raise InputError(got, f"max_seq_len={trained}")
        return {"max_position_embeddings": trained}
    if isinstance(scaling, (YaRN, LongRoPE, Llama3)) and max_seq_len is None:
        max_seq_len = round(scaling.factor * scaling.original_max_seq_len)
    longest = {} if max_seq_len is None else {"max_position_embeddings": max_seq_len}
    return {**longest, TRAINED: scaling.original_max_seq_len} if isinstance(scaling, LongRoPE) else longest
