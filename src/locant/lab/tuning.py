"""Fine-tune a model briefly with new positions, so that it adapts to them.

YaRN's recipe (Peng et al. 2023, arXiv 2309.00071) stretches the rotary encoding and trains for a few hundred steps at
the new length. DroPE's recipe (Gelberg et al. 2025, arXiv 2512.12167) removes the positions and trains for a short
time at the old length.

A run can be killed at any moment, and the same call continues it. On the same machine with the same number of threads,
the final weights are bit for bit equal to the weights of an uninterrupted run. On devices other than the CPU, this
holds if torch's operators add in a fixed order. To make this possible, only the number of steps may depend on the
clock, and it is chosen from `minutes` before the first step.

If `locant.lab.processes` joins several processes, they share the windows of each step. Each process does all other work
itself, so the processes exchange only gradients, losses and the number of steps. Only the first process writes files.
"""

from __future__ import annotations

import math
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from locant.arguments import Real, one_of, whole
from locant.checkpoints.checkpoint_folder import INDEX, companions, read_headers, require_output
from locant.checkpoints.config_source import read_json, read_source
from locant.checkpoints.extension import extend
from locant.checkpoints.loading import silence_transformers
from locant.errors import InputError, RangeError, Remedy
from locant.extras import require
from locant.files import flush, json_text, new_folder, require_apart, write_whole
from locant.gguf_file import find_gguf
from locant.lab.language_model import (
    TransformersDecoder,
    device_of,
    fingerprint,
    load_config,
    load_model,
    require_positions,
    require_rows,
    stated_length,
    trained_length,
)
from locant.lab.position_overrides import PositionOverride
from locant.lab.processes import add_gradients, rank, seed_step, smallest, wait_for_all, world_size
from locant.lab.results import (
    RECORD,
    Losses,
    changed_settings,
    environment,
    read_earlier,
)
from locant.lab.resume_state import StateFolder, preserve_random_state, wrap_write_errors
from locant.lab.settings import VOCAB_SIZE, check_settings, require_one_duration
from locant.lab.text_learning import losses_in_windows, optimizer_of, schedule, split_held_out, update
from locant.swapping import swap
from locant.text.corpus import Corpus, read_corpus
from locant.text.tokenizer.local_files import gguf_tokenizer
from locant.text.windows import Windows

TOKENIZER_CONFIG = "tokenizer_config.json"
TRAINED = ("all", "new", "lora")
RATES = {"all": 2e-5, "new": 1e-3, "lora": 2e-4}
"""The learning rate of YaRN for all weights, and larger learning rates for new parameters and adapters."""

STEPS = 400
"""The number of steps in YaRN's recipe."""

HELD_OUT_WINDOWS, HELD_OUT_TIMES = 16, 10
"""The number of windows for the held-out loss, and the number of its measurements after the first step. There are fewer
measurements if they would read more windows than the training.
"""

LOGITS = 2**27
"""The largest number of logits in memory during training, unless one window has more. They take most of the memory."""

MIN_LENGTH = 16
"""The smallest length whose loss is recorded, as the mean loss over the first tokens of each window."""

SAVE_SECONDS = 60.0
SHARE = 0.7
"""The share of the minutes that steps may take. The rest is for measuring, loading and saving."""

OnStep = Callable[[int, int, str], object]


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """The settings of a tuning run.

    Args:
        way: the new positions, as `PositionOverride` reads them, such as ``yarn:8``, ``drope`` or ``alibi``.
        train: ``"all"`` trains all weights, and ``"new"`` trains the weights of the new encoding. ``"lora"`` trains
            these weights and low-rank adapters of all linear layers, with `peft`.
        length: tokens per window. Default: the length that the model states or, with a scaling, the trained length
            times the factor.
        num_steps: the number of steps. Default: 400, as for YaRN, if `minutes` are not set.
        minutes: the time limit. The number of steps is chosen by timing, before the first step.
        batch_size: windows per step. Large batches are read in parts, with the same gradient.
        learning_rate: the peak rate of AdamW, after a warm-up. Default: the rate for `train` in `RATES`.
        rank: the rank of the adapters.
        adapter: write the adapters alone and do not merge them into the weights.
        seed: the seed for the order of the windows, new weights and dropout.
        device: such as ``cuda:1``. ``auto`` means cuda if torch finds it, else the CPU.

    Raises:
        InputError: both steps and minutes are given, or `adapter` without ``train="lora"``.
        RangeError: a number is out of range.

    >>> TuneSettings(way="yarn:8", minutes=10.0).batch_size
    8
    """

    way: str
    train: str = "all"
    length: int | None = None
    num_steps: int | None = None
    minutes: Real | None = None
    batch_size: int = 8
    learning_rate: Real | None = None
    rank: int = 16
    adapter: bool = False
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        one_of("train", self.train, TRAINED)
        check_settings(
            self,
            {"length": 4096, "num_steps": STEPS, "minutes": 10, "learning_rate": RATES[self.train]},
            length=partial(whole, low=2),
            seed=partial(whole, low=0, high=2**63 - 1),
            device=lambda name, value, remedy: str(device_of(value)),
        )
        if self.adapter and self.train != "lora":
            raise InputError(f"got adapter with train={self.train}, which has no adapter", Remedy(train="lora"))
        require_one_duration(vars(self))


def tune(
    folder: str | Path,
    files: Sequence[str],
    settings: TuneSettings,
    *,
    output: str | Path,
    force: bool = False,
    on_step: OnStep = lambda done, total, report: None,
) -> dict[str, Any]:
    """Tune a model on a text, and write it to a folder that `transformers` reads.

    The last tenth of the text is held out. Its loss is measured before, during and after the training. A scaling is
    written into the configuration in the form that `transformers` uses. `locant.checkpoints.load_swapped` loads a model
    with another encoding. Weights are trained in float32 and written in their original dtypes, or in float32 if they
    come from a GGUF file. Until the run is finished, its state is kept in the folder ``OUTPUT-unfinished``.

    If `torch.distributed` is initialized, all processes must call this function. Each process trains on its part of
    every batch.

    Args:
        folder: a model in safetensors, with its tokenizer, or a GGUF file.
        files: texts. Default: the documentation inside Python.
        output: the folder to write. It appears only when it is complete.
        force: replace an existing folder, and discard an unfinished run with other settings.
        on_step: called after every step with its number, the number of steps, and a short report of the losses. With
            several processes, only the first process calls it.

    Returns:
        The contents of `tuning.json` in the output: the settings, the losses in training, and held-out losses before
        and after it.

    Raises:
        InputError: a folder, text or output cannot be used, or an unfinished run has other settings.
        RangeError: the sizes of the encoding do not fit the model, or the processes cannot share a batch.

    Costs: memory for weights, gradients and two moments in float32. This is 16 bytes for each trained weight and 4
    bytes for each other weight.

    >>> tune("model", ["my.txt"], TuneSettings(way="yarn:8"), output="longer")  # doctest: +SKIP
    """
    source, output = Path(folder), Path(output)
    if rest := settings.batch_size % (processes := world_size()):
        got = f"got a batch of {settings.batch_size} windows for {processes} processes"
        raise RangeError(got, Remedy(batch_size=settings.batch_size + processes - rest))
    way = PositionOverride.of(settings.way)
    if way.is_for_reading_only:
        got = f"got {way.name}, which is for reading without training: use locant.swap"
        raise InputError(got, Remedy(way="own"))
    config = load_config(source)
    trained = trained_length(config)
    length = settings.length or (way.stretched_length(trained) if way.is_scaling else stated_length(config))
    corpus = read_corpus(files, tokenizer=str(folder), default_vocab_size=VOCAB_SIZE)
    run_settings = _run_settings(source, settings, length, corpus)
    _tokenizer_config(source)  # fail before the training if it cannot be read
    state = StateFolder(output, settings.device)
    if (finished := read_earlier(output / RECORD)).get("settings") == run_settings:
        if rank() == 0 and state.path.exists():
            with state:
                state.remove()
        return finished
    for read in (source, *(Path(file) for file in files if Path(file).is_file())):
        require_apart(output, read)
    require_output(output, force=force)
    training, held_out = split_held_out(corpus.ids, length)
    if way.is_scaling:
        if (to := way.stretched_length(trained)) <= trained:
            raise InputError(
                f"got {way.name}:{way.factor:g}, which does not stretch the model", Remedy(way=f"{way.name}:4")
            )
        config = type(config).from_dict(extend(read_source(source), to=to, method=way.name).config)
    model = load_model(source, config, device=settings.device)
    require_rows(model.config.get_text_config().vocab_size, corpus.ids, corpus.tokenizer.beginning)
    require_positions(model, length)
    with state if rank() == 0 else nullcontext(), preserve_random_state(state.device):
        so_far = _unfinished_run(state, run_settings, force=force)
        wait_for_all()  # the first process must not write a state before the other processes have looked for one
        prepared = TransformersDecoder(_prepare(model, way, settings, length), corpus.tokenizer)
        run = _Run(prepared, training, held_out, length, settings)
        record = {**run.train(state, run_settings, so_far, on_step), "swapped": hasattr(model.config, "locant")}
        if rank() == 0:
            _write(run.finished_model(), source, output, record, force=force)
            state.remove()
    wait_for_all()
    return record


def _unfinished_run(state: StateFolder, wanted: Mapping[str, Any], *, force: bool) -> dict[str, Any] | None:
    """Return the record of an earlier call, if any. With `force`, discard an earlier run that cannot continue."""
    try:
        so_far = state.facts()
        if so_far is not None and (other := changed_settings(so_far["settings"], wanted)):
            got = f"got an unfinished run in {state.path} with another {', '.join(other)}"
            remedy = Remedy("use the settings of that run, another folder, or {} to start again", force=True)
            raise InputError(got, remedy)
    except InputError:
        if not force:
            raise
        if rank() == 0:
            state.remove()
        return None
    return so_far


def _run_settings(source: Path, settings: TuneSettings, length: int, corpus: Corpus) -> dict[str, Any]:
    """Return everything that decides the outcome as JSON values."""
    text = {**corpus.facts(), "tokenizer": source.name}
    chosen = {**vars(settings), "length": length, "learning_rate": settings.learning_rate or RATES[settings.train]}
    chosen["device"] = torch.device(settings.device).type  # the number of the device does not matter
    if settings.num_steps is settings.minutes is None:
        chosen["num_steps"] = STEPS
    if world_size() > 1:
        chosen["num_processes"] = world_size()
    return {"model": source.name, "model_sha256": fingerprint(source), **chosen, "text": text}


def _prepare(model: Any, way: PositionOverride, settings: TuneSettings, length: int) -> Any:
    """Give the model its new positions and adapters, and freeze the parameters that are not trained."""
    torch.manual_seed(settings.seed)
    if not way.is_scaling and way.name != "own":
        swap(model, way.encoding(model, trained_length(model.config), length))
    _state_length(model.config.get_text_config(), length)
    new = [name for name, _ in model.named_parameters() if ".locant." in f".{name}"]
    if settings.train == "new" and not new:
        raise InputError(
            f"got train=new for {settings.way}, which has no parameters", Remedy("use {} or lora", train="all")
        )
    if settings.train != "lora":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(settings.train == "all" or name in new)
        return model
    require("peft", "training adapters")
    from peft import LoraConfig, get_peft_model

    encodings: dict[str, Any] = {"modules_to_save": ["locant"], "exclude_modules": r"(.*\.)?locant(\..*)?"}
    config = LoraConfig(
        r=settings.rank, lora_alpha=2 * settings.rank, target_modules="all-linear", task_type="CAUSAL_LM",
        **(encodings if new else {}),
    )  # fmt: skip
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # between peft and transformers
        return get_peft_model(model, config)


def _state_length(config: Any, length: int) -> None:
    """Increase the length that the configuration states, if it is smaller.

    With a scaling, do not change it, because some frequencies depend on it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, Mapping))]  # flat, or by type of layers
    scaled = any(each.get("rope_type", "default") != "default" for each in ropes)
    if getattr(config, "max_position_embeddings", length) < length and not scaled:
        config.max_position_embeddings = length


class _Run:
    """A training run that starts from the beginning or from a saved state."""

    def __init__(
        self,
        decoder: TransformersDecoder,
        training: np.ndarray,
        held_out: np.ndarray,
        length: int,
        settings: TuneSettings,
    ) -> None:
        self.decoder, self.settings, self.length = decoder, settings, length
        self.model = model = decoder.model
        self.dtypes = {id(parameter): parameter.dtype for parameter in model.parameters()}
        model.float()
        self.parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.rate = settings.learning_rate or RATES[settings.train]
        self.optimizer = optimizer_of(self.parameters.values(), self.rate)
        self.held_out = held_out[: min(HELD_OUT_WINDOWS, (len(held_out) - 1) // length) * length + 1]
        windows = Windows(training, length, drop_last=True)
        local_batch_size = max(1, min(settings.batch_size, len(windows)) // world_size())
        self.batch_size = local_batch_size * world_size()
        self.loader = windows.loader(local_batch_size, seed=settings.seed, drop_last=True)

    def train(
        self, state: StateFolder, wanted: Mapping[str, Any], so_far: dict[str, Any] | None, on_step: OnStep
    ) -> dict[str, Any]:
        """Train to the last step, and return the record of the run."""
        if so_far is None:
            before = self._measure()
            steps = self.settings.num_steps or STEPS
            if self.settings.minutes is not None:
                steps = self._steps_in_time(self.settings.minutes * 60)
            so_far = {"settings": dict(wanted), "environment": environment(self.settings.device), "num_steps": steps,
                      "train_loss": [], "held_out": [[0, before.mean]], "before": before.by_window,
                      "before_by_length": _by_length(before)}  # fmt: skip
            self._save(state, so_far)
        else:
            state.read(self.parameters, self.optimizer)
            self.loader.load_state_dict(so_far.pop("place"))
        try:
            self._take_steps(state, so_far, on_step)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"{state.path} holds the state of the run: the same command continues it")
            raise
        after = self._measure()
        so_far["held_out"].append([so_far["num_steps"], after.mean])
        return {**so_far, "after": after.by_window, "after_by_length": _by_length(after)}

    def finished_model(self) -> Any:
        """Return the model on the CPU in its original dtypes. Adapters are merged, unless they are written alone."""
        merged = self.settings.train == "lora" and not self.settings.adapter
        model = self.model.merge_and_unload() if merged else self.model
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.dtypes[id(parameter)])
        return model.cpu()

    def _take_steps(self, state: StateFolder, so_far: dict[str, Any], on_step: OnStep) -> None:
        steps, losses, held_out = so_far["num_steps"], so_far["train_loss"], so_far["held_out"]
        saved = time.perf_counter()
        times = min(HELD_OUT_TIMES, max(1, steps * self.batch_size // len(so_far["before"])))
        every = -(-steps // times)
        self.model.train()
        for batch in islice(chain.from_iterable(repeat(self.loader)), steps - len(losses)):  # epoch after epoch
            rate = self.rate * schedule(len(losses), steps)
            seed_step(self.settings.seed, len(losses))
            loss = self._accumulate_gradients(batch)
            losses.append(add_gradients(self.parameters.values(), loss, self.settings.device))
            self._require_finite(losses[-1])
            update(self.parameters.values(), (self.optimizer, rate))
            done = len(losses)
            if done % every == 0 and done < steps:
                held_out.append([done, self._measure().mean])
            if done == steps or time.perf_counter() - saved >= SAVE_SECONDS:
                self._save(state, so_far)
                saved = time.perf_counter()
            if rank() == 0:
                measured, loss = held_out[-1]
                on_step(done, steps, f"training {losses[-1]:.3f}, held-out {loss:.3f} at step {measured:,}")

    def _accumulate_gradients(self, batch: Mapping[str, Tensor]) -> float:
        """Return this process's share of the mean loss over a batch, and add its gradients to the parameters.

        The batch is read in parts of at most `LOGITS` logits, or of one window.
        """
        part = max(1, LOGITS // self.model.config.get_text_config().vocab_size // self.length)
        loss = 0.0
        for ids, targets in zip(batch["ids"].split(part), batch["targets"].split(part), strict=True):
            logits = self.decoder(ids, None)
            summed = F.cross_entropy(logits.flatten(0, 1), targets.to(logits.device).flatten(), reduction="sum")
            share = summed / (batch["targets"].numel() * world_size())
            share.backward()
            loss += share.item()
        return loss

    def _measure(self) -> Losses:
        losses = losses_in_windows(self.decoder, self.held_out, self.length)
        self.model.train()
        self._require_finite(losses.mean)
        return losses

    def _require_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            got = f"got a loss of {loss} with a learning rate of {self.rate:g}: the training diverged"
            raise InputError(
                got, Remedy("use {}, and {} to start again", learning_rate=float(f"{self.rate / 10:g}"), force=True)
            )

    def _save(self, state: StateFolder, so_far: Mapping[str, Any]) -> None:
        if rank() == 0:
            state.write(self.parameters, self.optimizer, {**so_far, "place": self.loader.state_dict()})

    def _steps_in_time(self, seconds: float) -> int:
        """Return the number of steps that fit into this time. The timed steps do not change the state of the run."""
        batch = next(iter(self.loader))
        self.loader.set_epoch(0)
        with preserve_random_state(torch.device(self.settings.device)):
            self._accumulate_gradients(batch)
            began = time.perf_counter()
            self._accumulate_gradients(batch)
            taken = time.perf_counter() - began
        self.optimizer.zero_grad(set_to_none=True)
        return smallest(max(1, int(SHARE * seconds / taken)), self.settings.device)


def _by_length(losses: Losses) -> dict[str, float]:
    """Return the mean loss over whole windows, over their first halves, and so on, down to `MIN_LENGTH` tokens."""
    length = len(losses.by_position)
    halves = [length >> times for times in range(length.bit_length())]
    lengths = sorted(each for each in halves if each >= MIN_LENGTH or each == length)
    return {str(each): float(np.mean(losses.by_position[:each])) for each in lengths}


def _write(model: Any, source: Path, output: Path, record: Mapping[str, Any], *, force: bool) -> None:
    """Write the folder of the tuned model. Other files, such as the tokenizer, are copied from the old folder."""
    with wrap_write_errors(output), new_folder(output, force=force) as new, silence_transformers():
        model.save_pretrained(new)
        if record["settings"]["adapter"]:
            model.get_base_model().config.save_pretrained(new)
        if (gguf := find_gguf(source)) is not None:
            gguf_tokenizer(gguf).save_pretrained(new)
        else:
            belong, _ = companions(source, read_headers(source))
            for name in belong:
                if name not in (INDEX, RECORD) and not (new / name).exists():
                    shutil.copyfile(source / name, new / name)
        config = _tokenizer_config(new)
        limit, length = config.get("model_max_length"), record["settings"]["length"]
        if isinstance(limit, int) and limit < length:  # the tokenizer of transformers warns about longer texts
            (new / TOKENIZER_CONFIG).write_text(json_text({**config, "model_max_length": length}), encoding="utf-8")
        for file in new.iterdir():
            flush(file)
        write_whole(new / RECORD, json_text(record))


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / TOKENIZER_CONFIG
    return read_json(path) if path.is_file() else {}
