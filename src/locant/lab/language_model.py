"""Language models of `transformers` in folders of this machine: what `locant evaluate` and `locant tune` read.

Whatever is wrong with a folder is one error that names it: code of its own, pickles, shards that are missing, shapes
that are not those of the configuration, weights that the model class has no place for, or none for it.
"""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from locant.arguments import shown
from locant.checkpoints import load_swapped
from locant.checkpoints.checkpoint_folder import headers_of
from locant.checkpoints.config_source import CONFIG, read_json, require_no_code
from locant.errors import InputError, RangeError, Remedy
from locant.extras import require
from locant.lab.unfinished import random_numbers_kept
from locant.models.config_values import HEADS, NUM_LAYERS, WIDTHS, integer
from locant.models.lab_decoder import is_lab_decoder
from locant.models.registry import with_defaults
from locant.models.rope_parameters import stated_trained_length
from locant.positions.description import Weightless
from locant.spelling import dtype_name
from locant.swapping.added_point import own_tables
from locant.text.corpus import Corpus
from locant.text.tokenizer import Tokenizer

MOST = {
    "layers": (NUM_LAYERS, 1_000),
    "width": (WIDTHS, 2**20),
    "heads": (HEADS, 2**16),
    "head_dim": (("head_dim",), 2**16),
}
"""No published model comes near; larger ones would be built module by module."""

ADAPTER = "adapter_config.json"
SWAPPED = "locant"
HELD = 2**25
"""Logits that are held at once where nothing is trained."""

UNTOLD = 2**25
"""Numbers that a configuration may describe beside those in the files before the files are said not to fit it."""

CAUSAL = "AutoModelForCausalLM"
KINDS = (CAUSAL, "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText")
"""What a configuration alone may be of."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""What a model can be read in; ``auto``: as it was saved."""


def device_of(name: str) -> torch.device:
    """The device that a name such as ``cuda:1`` is for; ``auto`` is cuda where torch finds it, else the CPU.

    Raises:
        RangeError: a device that torch does not find on this machine.
    """
    there, accelerator = ["cpu"], torch.accelerator.current_accelerator(check_available=True)
    count = 0 if accelerator is None else torch.accelerator.device_count()
    if accelerator is not None:
        there += [accelerator.type, *(f"{accelerator.type}:{index}" for index in range(count))]
    if name == "auto":
        name = "cuda" if "cuda" in there else "cpu"
    if name not in there:
        got = f"got {shown(name)} for device, expected one that torch finds on this machine: {', '.join(there)}"
        raise RangeError(got, Remedy(device="cpu"))
    return torch.device(name if count > 1 else name.partition(":")[0])


def load_config(folder: str | Path) -> Any:
    """The configuration of a model in a folder of this machine, as `transformers` reads it."""
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise InputError(f"got {path}, expected the folder of a model with its {CONFIG}", "a folder as saved")
    facts = read_json(path / CONFIG)
    require_likely(facts)
    require_no_code(path, facts)
    if is_lab_decoder(facts):
        got = f"got {path}, a model of locant train, which transformers cannot load"
        raise InputError(got, "train it anew with locant train, or read it with locant.lab.load(folder)")
    if (path / ADAPTER).exists():
        got = f"got {path}, an adapter, which changes a model in another folder"
        raise InputError(got, "the model with its adapter merged: model.merge_and_unload().save_pretrained(folder)")
    headers_of(path)
    with _one_line(path) as transformers:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True)


def require_likely(config: Mapping[str, Any]) -> None:
    """Raise where a configuration has sizes that no model has: building it would not end, or running it would fail."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    for what, (keys, most) in MOST.items():
        for value in (part.get(key) for part in parts for key in keys):
            if isinstance(value, int) and not 0 <= value <= most:
                got = f"got {shown(value) if abs(value) > 2**63 else f'{value:,}'} for the {what} of a model"
                raise InputError(f"{got}, expected from 0 to {most:,}", f"its {CONFIG}")


def load_model(
    folder: str | Path, config: Any = None, *, device: torch.device | str = "cpu", dtype: str | torch.dtype = "auto"
) -> Any:
    """A causal language model from a folder of this machine, with its encoding.

    Args:
        folder: as `save_pretrained` wrote it, with safetensors; also of a model that was saved while it was swapped.
        config: in the place of the folder's own, with other positions.
        dtype: one of `DTYPES`.
    """
    path = Path(folder)
    config = load_config(path) if config is None else config
    _require_its_size(path, config)
    options: Any = {"local_files_only": True, "use_safetensors": True, "dtype": dtype_name(dtype)}
    with _one_line(path) as transformers:
        if hasattr(config, SWAPPED):
            return _that_runs(path, load_swapped(path, **options), torch.device(device))
        load = transformers.AutoModelForCausalLM.from_pretrained
        model, told = load(path, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    name = type(model).__name__
    if told["mismatched_keys"]:  # drawn at random, too
        key, has, expected = min(told["mismatched_keys"])
        got = f"got {key} of shape {tuple(has)} in {path}, where its {CONFIG} says {tuple(expected)}"
        raise InputError(got, "the configuration and the weights of one model")
    if told["missing_keys"]:  # transformers draws them at random, and says so in a table
        got = f"got {path} without {min(told['missing_keys'])}, a weight of {name}"
        raise InputError(got, "a causal language model with its head")
    if told["unexpected_keys"]:
        got = f"got {path} with {min(told['unexpected_keys'])}, for which {name} of its {CONFIG} has no place"
        raise InputError(got, "the configuration and the weights of one causal language model")
    return _that_runs(path, model, torch.device(device))


def without_weights(config: Mapping[str, Any]) -> Any:
    """The language model that a configuration describes. Its parameters have shapes and no numbers.

    Its rotary module is as it would be, so `locant.swap` finds it, measures it, and says what it would do.

    Raises:
        InputError: a configuration that `transformers` makes no language model of, or with code of its own.
    """
    kind = config.get("model_type")
    require_no_code(f"a configuration of {shown(kind)}", config)
    if "locant" in config:
        raise InputError("got the configuration of a model that is swapped already", "that of the model as it was")
    require_likely(with_defaults(config))
    with _one_line(f"a configuration of {shown(kind)}", "a config.json as save_pretrained writes it") as transformers:
        plain = transformers.AutoConfig.for_model(**config)
        if (auto := auto_class(plain)) is not None:
            with Weightless():
                return getattr(transformers, auto).from_config(plain).eval()
    got = f"got a configuration of {shown(kind)}, of which transformers makes no language model"
    raise InputError(got, "one of a causal or masked language model")


def auto_class(config: Any) -> str | None:
    """What `transformers` calls the class that makes a language model of such a configuration: a causal one, if any."""
    import transformers

    return next((each for each in KINDS if type(config) in getattr(transformers, each)._model_mapping), None)


@torch.no_grad()
def _that_runs(path: Path, model: Any, device: torch.device) -> Any:
    """The model, after one token: some values of a configuration are first met there, or where dropout is drawn."""
    model.to(device)
    with _one_line(path), random_numbers_kept(device):
        model.train()(torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
    return model.eval()


def _require_its_size(path: Path, config: Any) -> None:
    """Raise where a configuration is of a far larger model than the files: transformers would make up what is missing.

    Nothing is allocated for this. What cannot be built so is left to `from_pretrained`, which says why.
    """
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):  # its files hold several numbers in one
        return
    if hasattr(plain, SWAPPED):
        delattr(plain, SWAPPED)
        plain._attn_implementation = None
    expected = 0
    with suppress(Exception), quiet(), Weightless():
        from transformers import AutoModelForCausalLM

        expected = sum(each.numel() for each in AutoModelForCausalLM.from_config(plain).parameters())
    there = sum(math.prod(each.shape) for header in headers_of(path).values() for each in header.tensors)
    if expected > 2 * there + UNTOLD:
        got = f"got {path} with {there:,} numbers in its files, where its {CONFIG} describes {expected:,}"
        raise InputError(got, "the configuration and the weights of one model")


@contextmanager
def quiet() -> Generator[None]:
    """Keep back the bars, tables and warnings of transformers."""
    require("transformers", "loading a model")
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(50)  # CRITICAL: not even errors, which are ours to say
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _one_line(what: object, remedy: str = "a model in safetensors, as save_pretrained writes it") -> Generator[Any]:
    """transformers, and whatever it says of a folder or a configuration as one error."""
    with quiet():
        import transformers

        try:
            yield transformers
        except InputError:
            raise
        except Exception as error:  # a configuration can make transformers fail in any way
            why = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            why = shorten(" ".join(why[: 1 + why[0].endswith(":")]), 300, placeholder=" ...")
            got = f"got {what}, which transformers cannot load: {why}"
            raise InputError(got, remedy) from error


def trained_length(config: Any) -> int:
    """How many tokens a model was trained with before it was stretched, as far as its configuration says."""
    return stated_trained_length(config.get_text_config().to_dict()) or stated_length(config)


def stated_length(config: Any) -> int:
    """How many tokens a model is made for, by its configuration."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if length is None:
        raise InputError(f"got {type(config).__name__} without max_position_embeddings", "a model that states it")
    return integer("max_position_embeddings", length)


def fingerprint(folder: str | Path) -> str:
    """A hash of all that is in the configuration and in the files of weights; a link counts as what it leads to.

    Dates and sizes would not do: weights that are saved in place have the sizes of the old ones. The tokenizer has a
    fingerprint of its own.

    Costs one reading of the files, a second for each gigabyte or two, several files at once.
    """
    path = Path(folder)
    names = [CONFIG, *headers_of(path)]
    with ThreadPoolExecutor() as pool:
        digests = [*pool.map(_sha256, (path / name for name in names))]
    return hashlib.sha256(repr([*zip(names, digests, strict=True)]).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def num_windows(vocab_size: int, corpus: Corpus, length: int, most: int, *, argument: str) -> int:
    """How many windows of a length, which an `argument` gave, a model can be measured in; `most` at most.

    Args:
        vocab_size: the rows of the model's token table.

    Raises:
        InputError: a text shorter than one, or with ids that the model has no rows for.
    """
    if len(corpus.ids) <= length:
        got = f"got a text of {len(corpus.ids):,} tokens, too short for a window of {length:,}"
        raise InputError(got, Remedy(f"a text of more than {length:,} tokens, or a smaller {{}}", **{argument: ...}))
    require_rows(vocab_size, corpus.ids, corpus.tokenizer.beginning)
    return min(most, (len(corpus.ids) - 1) // length)


def require_rows(vocab_size: int, ids: Int[np.ndarray, " tokens"], beginning: Sequence[int] = ()) -> None:
    """Raise where a text, or what stands before it, has an id that the model has no row for."""
    if (largest := max(int(ids.max()), *beginning, 0)) >= vocab_size:
        raise InputError(f"got a tokenizer with id {largest}, which the model has no row for", "the model's tokenizer")


def require_positions(model: Any, longest: int) -> None:
    """Raise where a model has a table of positions with fewer rows than a window has tokens."""
    rows = [table.num_embeddings for _, table in own_tables(model.base_model)]
    if rows and longest > min(rows):
        got = f"got windows of {longest:,} tokens for {type(model).__name__}, whose table has {min(rows):,} positions"
        raise InputError(got, f"windows of at most {min(rows):,} tokens, or a model without such a table")


def _cross_entropy(logits: Float[Tensor, "tokens vocab"], targets: Int[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """Return the nats of each target, zero where that is -100.

    `torch`'s own adds one term of a softmax after the other, in float32, on a CPU. With 49 152 tokens that is 0.0001
    nats too low for SmolLM2; `logsumexp` adds pairwise.
    """
    of_target = logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    return (logits.logsumexp(-1) - of_target).masked_fill(targets < 0, 0.0)


class AsDecoder(nn.Module):
    """A model of transformers, called as the lab's own are; what it is given may be on another device.

    Windows are cut out of a text, and each begins with what the tokenizer puts before one, in the place of its first
    token: Gemma, among others, predicts nothing sensible without its ``<bos>``, and a window keeps its length.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.model, self.beginning = model, tokenizer.beginning

    def forward(self, ids: Tensor, positions: object) -> Float[Tensor, "batch seq vocab"]:
        return self._logits(self._begun(ids), lambda hidden: hidden)

    def losses(
        self, ids: Int[Tensor, "batch seq"], targets: Int[Tensor, "batch seq"], positions: object
    ) -> Float[Tensor, "batch seq"]:
        """Nats for each target, as those of `Decoder`; logits are held for some of the tokens at a time.

        Those of a long window would be most of the memory of a small model.
        """
        states: list[Tensor] = []

        def last(hidden: Tensor) -> Tensor:
            states.append(hidden)
            return hidden[:, -1:]

        self._logits(self._begun(ids), last)
        [hidden], token = states, torch.zeros(1, 1, dtype=torch.long)  # which the layers are given for each part
        targets = targets.to(hidden.device)
        size = max(1, HELD // self.model.config.get_text_config().vocab_size)
        losses: list[Tensor] = []
        for some, aims in zip(hidden.flatten(0, 1).split(size), targets.flatten().split(size), strict=True):
            logits = self._logits(token, lambda _, part=some: part[None])
            losses.append(_cross_entropy(logits[0], aims))
        return torch.cat(losses).view(targets.shape)

    def _begun(self, ids: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
        begin = torch.tensor(self.beginning, dtype=torch.long)[: ids.shape[1]].expand(len(ids), -1)
        return torch.cat([begin, ids[:, begin.shape[1] :].long()], 1)

    def _logits(self, ids: Int[Tensor, "batch seq"], change: Callable[[Tensor], Tensor]) -> Tensor:
        """Of the hidden states that a hook puts in the place of those before the output embeddings.

        Whatever the model does to logits, such as a scale or a soft cap, it does to these.
        """
        hook = self.model.get_output_embeddings().register_forward_pre_hook(lambda module, args: change(args[0]))
        with hook:
            return self.model(ids.to(self.model.device), use_cache=False).logits.float()
