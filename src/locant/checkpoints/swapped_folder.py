"""The folder of a model that was saved while it was swapped, read again with its encoding and what that learned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from locant.arguments import one_of, shown, whole
from locant.checkpoints.checkpoint_folder import headers_of
from locant.checkpoints.config_source import CONFIG, read_json, require_no_code
from locant.errors import InputError
from locant.positions.angles import AngleMode
from locant.positions.registry import encodings
from locant.swapping.handle import swap
from locant.swapping.saving import KEY, built

__all__ = ["load_swapped", "told_layers"]

HOLDER = ".locant."
SAVED = "the folder as it was saved"
UNTOLD_WORDS = "an encoding that is none of locant's"
UNTOLD = "untold"
"""In the place of an encoding that the configuration does not tell."""


def load_swapped(
    folder: str | Path, *, cls: Any = None, encoding: Any = None, layers: Any = None, **options: Any
) -> Any:
    """Load a model that was saved while it was swapped, with its encoding and what that learned.

    Args:
        folder: as `save_pretrained` wrote it.
        cls: a class of `transformers`; default: ``AutoModelForCausalLM``, or ``AutoModelForSeq2SeqLM`` for a model
            with an encoder and a decoder.
        encoding, layers: as for `locant.swap`, where the encoding is none of locant's and the configuration cannot
            tell it; its parameters are read from the folder.
        options: for ``from_pretrained``, such as ``dtype``.

    Raises:
        InputError: a folder of a model that was not swapped, or had its own encoding in every layer; one whose
            ``locant`` entry is damaged, or without the parameters of its encoding; one with code of its own, pickles,
            or files that are not whole.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    path = Path(folder)
    given = read_json(path / CONFIG)
    if KEY not in given:
        got = f"got {path}, whose model is not swapped, or has its own encoding, which is not written down"
        raise InputError(got, f"from_pretrained({str(folder)!r}), then locant.swap")
    require_no_code(path, given)
    headers_of(path)
    by_configuration = encoding is None and layers is None
    plan, angles = _read_plan(path, given[KEY], build=by_configuration)
    if by_configuration:
        if UNTOLD in plan:
            got = f"got {path}, with an encoding that is none of locant's"
            raise InputError(got, "load_swapped(folder, encoding=...) with one like it")
        layers = lambda layer, _: plan[layer] if layer < len(plan) else None  # noqa: E731
    config: Any = AutoConfig.from_pretrained(path)
    delattr(config, KEY)
    config._attn_implementation = None
    options = {"local_files_only": True, "use_safetensors": True, **options}
    usual = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
    model = (cls or usual).from_pretrained(path, config=config, **options)
    swapped = swap(model, encoding, layers=layers, angles=angles)
    if len(swapped.sentences) != len(plan):
        raise _damaged(path, f"{len(plan)} layers for {len(swapped.sentences)}")
    _read_parameters(path, model)
    return model


def _read_plan(folder: Path, said: Any, *, build: bool) -> tuple[list[Any], AngleMode]:
    """What `record` wrote: the encoding of each layer, and the angles of its own.

    Not built where they are given: those of a package that is not installed here could not be.
    """
    try:
        known = [built(each) if build and each is not None else UNTOLD for each in said["encodings"]]
        last = len(known) - 1
        places = [None if each is None else whole("layers", each, 0, last, remedy=SAVED) for each in said["layers"]]
        angles = one_of("angles", said.get("angles", "exact"), ("exact", "float32"), SAVED)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # whatever was written there by hand
        raise _damaged(folder, f"{type(error).__name__}: {error}") from error
    return [None if each is None else known[each] for each in places], "float32" if angles == "float32" else "exact"


def _read_parameters(folder: Path, model: Any) -> None:
    mine = {name: each for name, each in model.state_dict().items() if HOLDER in f".{name}"}
    there = {tensor.name: folder / file for file, header in headers_of(folder).items() for tensor in header.tensors}
    for name, parameter in mine.items():
        if name not in there:
            raise InputError(f"got {folder} without {name}, a parameter of its encoding", SAVED)
        with safe_open(there[name], framework="pt") as file:
            saved = file.get_tensor(name)
        if saved.shape != parameter.shape:
            got = f"got {name} of shape {shown(tuple(saved.shape))}, expected {tuple(parameter.shape)}"
            raise InputError(got, SAVED)
        with torch.no_grad():
            parameter.copy_(saved)


def told_layers(config: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Of every layer, the encoding that `record` wrote down, in words; ``None``: the model's own. Empty: not swapped.

    >>> told_layers({"locant": {"encodings": [{"name": "alibi", "options": {"num_heads": 4}}], "layers": [0, None]}})
    ('alibi(num_heads=4)', None)
    """
    said = config.get(KEY)
    if said is None:
        return ()
    try:
        last = len(said["encodings"]) - 1
        words = [UNTOLD_WORDS if each is None else _in_words(each) for each in said["encodings"]]
        places = [None if each is None else whole("layers", each, 0, last, remedy=SAVED) for each in said["layers"]]
        return tuple(None if each is None else words[each] for each in places)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # whatever was written there by hand
        raise _damaged(Path(), f"{type(error).__name__}: {error}") from error


def _in_words(description: Mapping[str, Any]) -> str:
    options = ", ".join(f"{name}={shown(value)}" for name, value in description["options"].items())
    return f"{one_of('encoding', description['name'], encodings())}({options})"


def _damaged(folder: Path, why: str) -> InputError:
    """Of an entry that somebody changed by hand."""
    got = f"got {folder / CONFIG}, whose entry {KEY!r} does not say what each layer has ({why})"
    return InputError(got, SAVED)
