"""Load language models of `transformers` from local folders and GGUF files, for `locant evaluate` and `locant tune`.

Each fault of a folder raises one error that names the fault. Faults are custom code, pickles, missing shards, shapes
that contradict the configuration, missing weights, and weights that the model class does not have.
"""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from locant.arguments import short_repr
from locant.checkpoints import load_swapped
from locant.checkpoints.checkpoint_folder import read_headers
from locant.checkpoints.config_source import CONFIG, read_json, require_no_code
from locant.checkpoints.gguf_model import load_gguf, load_gguf_config
from locant.checkpoints.loading import require_all_weights, silence_transformers, translate_errors
from locant.errors import InputError, LocantError, RangeError, Remedy
from locant.gguf_file import find_gguf, open_gguf
from locant.lab.resume_state import preserve_random_state
from locant.models.config_values import HEADS, NUM_LAYERS, WIDTHS, integer
from locant.models.encodings import encoding_from_config, table_length
from locant.models.lab_decoder import is_lab_decoder
from locant.models.registry import read_config, with_defaults
from locant.models.rope_parameters import stated_trained_length
from locant.positions.description import Weightless
from locant.spelling import dtype_name
from locant.swapping.added_point import learned_tables
from locant.swapping.plan import CONFIG_KEY, remove_record
from locant.text.corpus import Corpus
from locant.text.tokenizer import Tokenizer

MAX_SIZES = {
    "layers": (NUM_LAYERS, 1_000),
    "width": (WIDTHS, 2**20),
    "heads": (HEADS, 2**16),
    "head_dim": (("head_dim",), 2**16),
}
"""The largest sizes that are accepted. Published models are far smaller, and building larger models takes too long."""

ADAPTER = "adapter_config.json"
MAX_LOGITS = 2**25
"""The largest number of logits in memory at once when nothing is trained."""

MARGIN = 2**25
"""The number of parameters that a configuration may have in addition to twice the numbers in the files.

A configuration with more parameters raises an error.
"""

CAUSAL = "AutoModelForCausalLM"
KINDS = (CAUSAL, "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText")
"""The classes of models that may be built from a configuration alone."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""The dtypes that a model can be loaded in. ``auto`` is the saved dtype."""


def device_of(name: str) -> torch.device:
    """Return the device with a name such as ``cuda:1``. ``auto`` means cuda if torch finds it, else the CPU.

    Raises:
        RangeError: torch does not find the device on this machine.
    """
    names, accelerator = ["cpu"], torch.accelerator.current_accelerator(check_available=True)
    count = 0 if accelerator is None else torch.accelerator.device_count()
    if accelerator is not None:
        names += [accelerator.type, *(f"{accelerator.type}:{index}" for index in range(count))]
    if name == "auto":
        name = "cuda" if "cuda" in names else "cpu"
    if name not in names:
        got = f"got {short_repr(name)} for device, expected one that torch finds on this machine: {', '.join(names)}"
        raise RangeError(got, Remedy(device="cpu"))
    return torch.device(name if count > 1 else name.partition(":")[0])


def load_config(folder: str | Path) -> Any:
    """Return the configuration of a model in a local folder or a GGUF file, as `transformers` reads it."""
    if (gguf := find_gguf(folder)) is not None:
        file = open_gguf(gguf)
        keys = {"num_hidden_layers": "block_count", "hidden_size": "embedding_length"}
        require_likely({name: file.value(f"{file.architecture}.{key}") for name, key in keys.items()})
        config = load_gguf_config(gguf)
        require_likely(config.to_dict())
        return config
    path = Path(folder)
    if not (path / CONFIG).is_file():
        got = f"got {path}, expected the folder of a model with its {CONFIG}, or a .gguf file"
        raise InputError(got, "pass the folder that save_pretrained wrote")
    facts = read_json(path / CONFIG)
    require_likely(facts)
    require_no_code(path, facts)
    if is_lab_decoder(facts):
        got = f"got {path}, a model of locant train, which transformers cannot load"
        raise InputError(got, "train it again with locant train, or load it with locant.lab.load(folder)")
    if (path / ADAPTER).exists():
        got = f"got {path}, an adapter, which changes a model in another folder"
        raise InputError(got, "merge the adapter: model.merge_and_unload().save_pretrained(folder)")
    read_headers(path)
    with translate_errors(path) as transformers:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True)


def require_likely(config: Mapping[str, Any]) -> None:
    """Raise `InputError` if a configuration has sizes that no model has. Such a model would hang or fail."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    for what, (keys, most) in MAX_SIZES.items():
        for value in (part.get(key) for part in parts for key in keys):
            if isinstance(value, int) and not 0 <= value <= most:
                got = f"got {short_repr(value) if abs(value) > 2**63 else f'{value:,}'} for the {what} of a model"
                raise InputError(f"{got}, expected from 0 to {most:,}", f"correct its {CONFIG}")


def load_model(
    folder: str | Path, config: Any = None, *, device: torch.device | str = "cpu", dtype: str | torch.dtype = "auto"
) -> Any:
    """Load a causal language model from a local folder, with its encoding.

    Args:
        folder: a folder that `save_pretrained` wrote, with safetensors, or a GGUF file. The model may have been saved
            while it was swapped.
        config: a configuration with other positions, which replaces the configuration of the model.
        dtype: one of `DTYPES`. The weights of a GGUF file become float32 by default.
    """
    path = Path(folder)
    config = load_config(path) if config is None else config
    if (gguf := find_gguf(path)) is not None:
        _require_its_size(gguf, config, open_gguf(gguf).num_weights)
        return _require_that_runs(gguf, load_gguf(gguf, config=config, dtype=dtype), torch.device(device))
    _require_its_size(
        path, config, sum(math.prod(each.shape) for header in read_headers(path).values() for each in header.tensors)
    )
    options: Any = {"local_files_only": True, "use_safetensors": True, "dtype": dtype_name(dtype)}
    with translate_errors(path) as transformers:
        if hasattr(config, CONFIG_KEY):
            return _require_that_runs(path, load_swapped(path, **options), torch.device(device))
        load = transformers.AutoModelForCausalLM.from_pretrained
        model, report = load(path, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    require_all_weights(report, type(model).__name__, path, CONFIG)
    return _require_that_runs(path, model, torch.device(device))


def without_weights(config: Mapping[str, Any]) -> Any:
    """Build the language model that a configuration describes. Its parameters have shapes but no values.

    The rotary module is complete, so `locant.swap` can find it, measure it and describe the effect of a swap.

    Raises:
        InputError: the configuration has custom code, or `transformers` does not build a language model from it.
    """
    kind = config.get("model_type")
    require_no_code(f"a configuration of {short_repr(kind)}", config)
    if "locant" in config:
        got = "got the configuration of a model that is swapped already"
        raise InputError(got, "use the configuration of the original model")
    require_likely(with_defaults(config))
    with translate_errors(
        f"a configuration of {short_repr(kind)}", "use a config.json as save_pretrained writes it"
    ) as transformers:
        plain = transformers.AutoConfig.for_model(**config)
        if (auto := auto_class(plain)) is not None:
            with Weightless():
                return getattr(transformers, auto).from_config(plain).eval()
    got = f"got a configuration of {short_repr(kind)}, from which transformers builds no language model"
    raise InputError(got, "use the configuration of a causal or masked language model")


def auto_class(config: Any) -> str | None:
    """Return the name of the auto class that builds a language model, or ``None``. Causal models come first."""
    import transformers

    return next((each for each in KINDS if type(config) in getattr(transformers, each)._model_mapping), None)


@torch.no_grad()
def _require_that_runs(path: Path, model: Any, device: torch.device) -> Any:
    """Return the model after it has read one token in training mode.

    Some wrong values in a configuration raise an error only in this step.
    """
    model.to(device)
    with translate_errors(path), preserve_random_state(device):
        model.train()(torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
    return model.eval()


def _require_its_size(path: Path, config: Any, stored: int) -> None:
    """Raise `InputError` if a configuration describes a far larger model than the files contain.

    Transformers would draw the missing weights at random. This check does not allocate memory for weights. If it cannot
    build the model, `from_pretrained` gives the reason later.
    """
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):  # its files store several numbers in one
        return
    if hasattr(plain, CONFIG_KEY):
        remove_record(plain)
    expected = 0
    with suppress(Exception), silence_transformers(), Weightless():
        from transformers import AutoModelForCausalLM

        expected = sum(each.numel() for each in AutoModelForCausalLM.from_config(plain).parameters())
    if expected > 2 * stored + MARGIN:
        got = f"got {path} with {stored:,} numbers, but its configuration describes {expected:,}"
        raise InputError(got, "use the configuration and the weights of one model")


def trained_length(config: Any) -> int:
    """Return the trained length before any scaling. If the configuration does not state it, use `stated_length`."""
    return stated_trained_length(config.get_text_config().to_dict()) or stated_length(config)


def stated_length(config: Any) -> int:
    """Return the number of tokens that a model is made for, according to its configuration."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if length is None:
        raise InputError(f"got {type(config).__name__} without max_position_embeddings", "add it to the configuration")
    with suppress(LocantError), warnings.catch_warnings(action="ignore"), Weightless():
        has_encoding = read_config(config)[1].encoding is not None
        if has_encoding and (rows := table_length([encoding_from_config(config)])) is not None:
            return rows  # fewer, if the key counts rows that are not positions
    return integer("max_position_embeddings", length)


def fingerprint(folder: str | Path) -> str:
    """Return a hash of the contents of the configuration and the weight files. Links are followed.

    Dates and sizes are not enough, because new weights in the same file have the same size as the old weights. The
    tokenizer has a separate fingerprint.

    The files are read once, several at a time. This takes between half a second and a second per gigabyte.
    """
    gguf = find_gguf(folder)
    path = Path(folder) if gguf is None else gguf.parent
    names = [CONFIG, *read_headers(path)] if gguf is None else [gguf.name]
    with ThreadPoolExecutor() as pool:
        digests = [*pool.map(_sha256, (path / name for name in names))]
    return hashlib.sha256(repr([*zip(names, digests, strict=True)]).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def num_windows(vocab_size: int, corpus: Corpus, length: int, most: int, *, argument: str) -> int:
    """Return the number of windows of `length` tokens in a text, but at most `most`.

    Args:
        vocab_size: the number of rows of the model's token table.
        argument: the name of the argument that set the length, for the remedy.

    Raises:
        InputError: the text is too short for one window, or it has an id without a row in the table.
    """
    if len(corpus.ids) <= length:
        got = f"got a text of {len(corpus.ids):,} tokens, too short for a window of {length:,}"
        raise InputError(
            got, Remedy(f"use a text of more than {length:,} tokens, or a smaller {{}}", **{argument: ...})
        )
    require_rows(vocab_size, corpus.ids, corpus.tokenizer.beginning)
    return min(most, (len(corpus.ids) - 1) // length)


def require_rows(vocab_size: int, ids: Int[np.ndarray, " tokens"], beginning: Sequence[int] = ()) -> None:
    """Raise `InputError` if a text or the tokens before it have an id without a row in the model's token table."""
    if (largest := max(int(ids.max()), *beginning, 0)) >= vocab_size:
        got = f"got a tokenizer with id {largest}, which the model has no row for"
        raise InputError(got, "use the model's tokenizer")


def require_positions(model: Any, longest: int) -> None:
    """Raise `InputError` if a model's table of positions has fewer rows than a window has tokens."""
    rows = [table.num_embeddings - _first_row(table) for _, table in learned_tables(model.base_model)]
    if rows and longest > min(rows):
        got = f"got windows of {longest:,} tokens for {type(model).__name__}, whose table has {min(rows):,} positions"
        raise InputError(got, f"use windows of at most {min(rows):,} tokens, or a model without such a table")


def _first_row(table: nn.Embedding) -> int:
    """Return the row of position 0. OPT and BART have an offset, and RoBERTa counts from the row after padding."""
    after_padding = 0 if table.padding_idx is None else table.padding_idx + 1
    return int(getattr(table, "offset", after_padding))


def _cross_entropy(logits: Float[Tensor, "tokens vocab"], targets: Int[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """Return the loss of each target in nats. It is zero for a target of -100.

    On a CPU, torch's cross entropy adds the terms of a softmax one after the other in float32. For SmolLM2 with its
    49,152 tokens, the result is 0.0001 nats too low. `logsumexp` adds the terms pairwise, so it is more exact.
    """
    of_target = logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    return (logits.logsumexp(-1) - of_target).masked_fill(targets < 0, 0.0)


class TransformersDecoder(nn.Module):
    """A model of transformers with the interface of the lab's `Decoder`. Its inputs may be on another device.

    Windows are cut out of a text. The tokens that the tokenizer puts before a text, such as ``<bos>``, replace the
    first tokens of each window, so a window keeps its length. Without them, some models such as Gemma predict nonsense.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.model, self.beginning = model, tokenizer.beginning

    def forward(self, ids: Tensor, positions: object) -> Float[Tensor, "batch seq vocab"]:
        return self._logits(self._with_beginning(ids), lambda hidden: hidden)

    def losses(
        self, ids: Int[Tensor, "batch seq"], targets: Int[Tensor, "batch seq"], positions: object
    ) -> Float[Tensor, "batch seq"]:
        """Return the loss of each target in nats, as `Decoder.losses` does.

        Only a part of the logits is in memory at a time. For a long window and a small model, all logits would take
        most of the memory.
        """
        size = max(1, MAX_LOGITS // self.model.config.get_text_config().vocab_size)
        if ids.numel() <= size:
            logits = self._logits(self._with_beginning(ids), lambda hidden: hidden).flatten(0, 1)
            return _cross_entropy(logits, targets.to(logits.device).flatten()).view(targets.shape)
        states: list[Tensor] = []

        def last(hidden: Tensor) -> Tensor:
            states.append(hidden)
            return hidden[:, -1:]

        self._logits(self._with_beginning(ids), last)
        [hidden], token = states, torch.zeros(1, 1, dtype=torch.long)  # the layers read this one token for each part
        targets = targets.to(hidden.device)
        losses: list[Tensor] = []
        for states_part, targets_part in zip(
            hidden.flatten(0, 1).split(size), targets.flatten().split(size), strict=True
        ):
            logits = self._logits(token, lambda _, part=states_part: part[None])
            losses.append(_cross_entropy(logits[0], targets_part))
        return torch.cat(losses).view(targets.shape)

    def _with_beginning(self, ids: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
        begin = torch.tensor(self.beginning, dtype=torch.long)[: ids.shape[1]].expand(len(ids), -1)
        return torch.cat([begin, ids[:, begin.shape[1] :].long()], 1)

    def _logits(self, ids: Int[Tensor, "batch seq"], change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the logits after `change` has replaced the hidden states before the output embeddings.

        The model treats the result like its usual logits, for example with a scale or a soft cap.
        """
        hook = self.model.get_output_embeddings().register_forward_pre_hook(lambda module, args: change(args[0]))
        with hook:
            return self.model(ids.to(self.model.device), use_cache=False).logits.float()
