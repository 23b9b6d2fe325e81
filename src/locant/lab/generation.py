"""Generate text with a model in a folder: a decoder of the lab or a language model of `transformers`.

This module also saves and loads decoders of the lab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from safetensors.torch import save as as_bytes

from locant.arguments import Real, short_repr
from locant.checkpoints.checkpoint_folder import read_headers, require_output
from locant.checkpoints.config_source import CONFIG, read_json
from locant.checkpoints.loading import silence_transformers
from locant.errors import InputError, LocantError, RangeError, Remedy, ShapeError
from locant.files import json_text, new_folder, write_whole
from locant.lab.candidate import parse_without_scaling
from locant.lab.decoder import Decoder
from locant.lab.language_model import (
    device_of,
    load_model,
    require_likely,
    require_positions,
    require_rows,
    trained_length,
)
from locant.lab.position_overrides import PositionOverride, swap_positions
from locant.lab.results import environment
from locant.lab.resume_state import preserve_random_state
from locant.lab.sampling import call_with_cache_if_supported, generate
from locant.lab.settings import VOCAB_SIZE, Settings, require_one_duration
from locant.lab.text_learning import shape
from locant.lab.training import train
from locant.models.config_values import flag, integer_at, required
from locant.models.lab_decoder import (
    FLAGS,
    MODEL_TYPE,
    REMEDY,
    SIZES,
    TRAIN_LENGTH,
    encoding_from_lab_config,
    is_lab_decoder,
)
from locant.positions import PositionEncoding
from locant.positions.description import to_config
from locant.text import Tokenizer
from locant.text.corpus import read_corpus

WEIGHTS = "model.safetensors"


def save(model: Decoder, tokenizer: Tokenizer, folder: str | Path, *, force: bool = False, **facts: Any) -> None:
    """Write a decoder and its tokenizer as safetensors and JSON into a new folder that `load` can read.

    Args:
        force: replace an existing folder of a model.
        facts: more entries for `config.json`.

    Raises:
        InputError: the name and options of the encoding do not describe it, or the folder exists or is not writable.

    >>> import locant, tempfile
    >>> model, tokenizer = locant.lab.train("to be, or not to be. " * 40, vocab_size=300, num_steps=2, d_model=32)
    >>> folder = Path(tempfile.mkdtemp()) / "model"
    >>> locant.lab.save(model, tokenizer, folder)
    >>> again, _ = locant.lab.load(folder)
    >>> torch.equal(locant.lab.generate(again, [1, 2], 9), locant.lab.generate(model, [1, 2], 9))
    True
    """
    path, token, block = Path(folder), model.embedding.token, model.blocks[0]
    encoding = describe_encoding(model.encoding)
    require_output(path, force=force)
    sizes = dict(zip(SIZES, (*token.weight.shape, len(model.blocks), model.num_heads), strict=True))
    flags = dict(zip(FLAGS, (block.keys_are_values, block.head_norm is not None), strict=True))
    config = {
        "model_type": MODEL_TYPE, "encoding": encoding, **sizes, **flags, TRAIN_LENGTH: model.train_length,
        "tie_word_embeddings": True,
    }  # fmt: skip
    with new_folder(path, force=force) as new:
        write_whole(new / CONFIG, json_text({**config, **facts}))
        write_whole(new / WEIGHTS, as_bytes(model.state_dict()))
        tokenizer.save(new)


def describe_encoding(encoding: PositionEncoding) -> dict[str, Any]:
    """Return the name and options that `save` writes for an encoding. Raise `InputError` if they do not describe it."""
    if (description := to_config(encoding)) is None:
        got = f"got {type(encoding).__name__}, which cannot be saved: its name and its options do not describe it"
        raise InputError(got, Remedy(encoding="rotary"))
    return description


def train_files(
    files: Sequence[str],
    encoding: str,
    options: Mapping[str, Any],
    *,
    folder: Path,
    force: bool,
    on_step: Callable[[int, int | None, str], object] = lambda done, total, report: None,
    **text: Any,
) -> dict[str, Any]:
    """Train a decoder on texts, and `save` it. Return the facts about the training run that `config.json` records.

    Args:
        options: arguments of `lab.train`.
        text: ``tokenizer``, ``vocab_size`` and ``download`` of `read_corpus`.
    """
    require_one_duration(options)
    require_output(folder, force=force)
    describe_encoding(parse_without_scaling(encoding).build(shape(Settings(), 1)))  # fails before the training
    corpus, losses = read_corpus(files, default_vocab_size=VOCAB_SIZE, **text), list[float]()

    def step(done: int, loss: float) -> None:
        losses.append(loss)
        on_step(done, options.get("num_steps"), f"loss {loss:.3f}")

    model, _ = train(corpus.ids, encoding, tokenizer=corpus.tokenizer, on_step=step, **options)
    facts = {
        "trained_on": corpus.facts(), "options": {**options}, "losses": losses, "environment": environment(),
    }  # fmt: skip
    save(model, corpus.tokenizer, folder, force=force, **facts)
    return facts


def load(folder: str | Path) -> tuple[Decoder, Tokenizer]:
    """Load the decoder and the tokenizer that `save` wrote. Raise `InputError` if a folder contains something else."""
    path = Path(folder)
    config = read_json(path / CONFIG)
    if not is_lab_decoder(config):
        got = f"got {path} of model_type {short_repr(config.get('model_type'))}, which is not a model of locant train"
        raise InputError(got, "load it with transformers.AutoModelForCausalLM.from_pretrained")
    if isinstance(config.get("sizes"), dict):  # the form of an earlier release
        config = {**config["sizes"], **config}
    require_likely(config)
    sizes = {name: required(config, name) for name in SIZES}
    flags = {name: flag(name, config.get(name, False)) for name in FLAGS}
    headers = read_headers(path)
    try:
        with preserve_random_state(torch.device("cpu")):
            encoding = encoding_from_lab_config(config)
            model = Decoder(encoding=encoding, **sizes, **flags)
    except (ShapeError, RangeError, RuntimeError) as error:  # torch raises RuntimeError if memory is too small
        cause = error.cause if isinstance(error, LocantError) else str(error).splitlines()[0]
        raise InputError(
            f"got {path / CONFIG}, which describes a model that cannot be built: {cause}", REMEDY
        ) from error
    stated = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    stored = {tensor.name: tensor.shape for header in headers.values() for tensor in header.tensors}
    for name in sorted(stated.keys() | stored.keys()):
        if stored.get(name) != stated.get(name):
            shapes = [f"of shape {each[name]}" if name in each else "absent" for each in (stored, stated)]
            got = f"got {path}, whose weights have {name} {shapes[0]}, but its {CONFIG} states {shapes[1]}"
            raise InputError(got, REMEDY)
    tensors = {name: each for file in headers for name, each in load_file(path / file).items()}
    model.load_state_dict(tensors, assign=True)
    model.train_length = integer_at(config, TRAIN_LENGTH)
    return model.eval(), Tokenizer.load(path)


def is_lab_folder(folder: str | Path) -> bool:
    """Return whether `locant train` wrote this folder."""
    config = Path(folder) / CONFIG
    return config.is_file() and is_lab_decoder(read_json(config))


def continue_text(
    folder: str | Path, prompt: str, num_tokens: int = 100, *, temperature: Real = 1.0, top_k: int | None = None,
    seed: int = 0, way: str = "own", device: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """Continue a prompt with a model in a folder.

    Args:
        folder: a decoder that `save` wrote, or a causal language model of `transformers`: a folder with safetensors and
            a tokenizer, or a GGUF file. A model of `transformers` first reads the tokens that its tokenizer puts before
            a text, such as ``<s>``, and then the prompt. It may end its text early. Its `generation_config.json` sets
            all options that are not arguments here.
        num_tokens, temperature, top_k, seed: as for `generate`.
        way: the positions that the model uses, in the notation of `PositionOverride`.
        device: such as ``cuda:1``. ``auto`` means cuda if torch finds it, else the CPU.

    Returns:
        The prompt, its continuation, and their ids.
    """
    path, place, chosen = Path(folder), device_of(device), PositionOverride.of(way)
    is_ours = is_lab_folder(path)
    loaded: tuple[Any, Tokenizer] = load(path) if is_ours else (load_model(path, device=place), Tokenizer.load(path))
    model, tokenizer = loaded
    before = [*(() if is_ours else tokenizer.beginning), *tokenizer.encode(prompt).tolist()]
    if not before:
        raise InputError("got a prompt without a token", "pass a word or more")
    rows, total = torch.tensor([before], device=place), len(before) + num_tokens
    if is_ours:
        model = model.to(place)
        with preserve_random_state(place), model.use_encoding(chosen.for_decoder(model, total) or model.encoding):
            rows = generate(model, rows, num_tokens, temperature=temperature, top_k=top_k, seed=seed)
    else:
        require_rows(model.config.get_text_config().vocab_size, np.asarray(before))
        require_positions(model, total)
        sampling = {"do_sample": temperature > 0, "temperature": temperature or None, "top_k": top_k or 0}
        with preserve_random_state(place), ExitStack() as swapped, silence_transformers():
            if chosen.name != "own":
                positions = chosen.replacement(model, trained_length(model.config), total)
                swapped.enter_context(swap_positions(model, positions))

            def continuation(with_cache: bool) -> Any:
                torch.manual_seed(seed)
                options = {"attention_mask": torch.ones_like(rows), "max_new_tokens": num_tokens, **sampling}
                return model.generate(rows, **options, **({} if with_cache else {"use_cache": False}))

            rows = call_with_cache_if_supported(continuation)
    after = rows[0, len(before) :].tolist()
    if after and after[-1] in tokenizer.special_tokens.values():  # the end of the text
        after.pop()
    written = tokenizer.decode([*before, *after]).removeprefix(tokenizer.decode(before))
    return {"prompt": prompt, "continuation": written, "prompt_ids": before, "ids": after}
