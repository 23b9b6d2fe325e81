"""Search LongRoPE's factors for a model on a text (Ding et al. 2024, arXiv 2402.13753).

This is an evolutionary search without any training. It starts with the factors of YaRN's ramp, NTK and linear
interpolation. A set of factors is scored by the loss of the model that uses it, in windows of the new length. In every
generation, the best sets are mutated and crossed. Every measurement is recorded, and a second call reuses the records.
So a second call can continue a search that was stopped, or add generations to a finished search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from locant.arguments import whole
from locant.checkpoints.config_source import read_source
from locant.checkpoints.extension import Extension, LongFactors, extend, extension_path
from locant.errors import InputError, Remedy
from locant.files import json_text, require_file, write_whole
from locant.lab.language_model import TransformersDecoder, device_of, fingerprint, load_model, num_windows
from locant.lab.results import changed_settings, finite_or_none, read_earlier
from locant.lab.settings import VOCAB_SIZE
from locant.lab.text_learning import losses_in_windows
from locant.swapping import swap
from locant.text.corpus import read_corpus

Factors = tuple[float, ...]

PARENTS, MUTATED, CROSSED = 6, 6, 6
"""The numbers of parents, mutated children and crossed children in a generation."""
SHARE, SPREAD = 0.3, 0.2
"""The share of the factors that a mutation changes, and the standard deviation of the change in their logarithms."""
MAX_FACTOR = 1.25
"""The largest factor, as a multiple of the factor of linear interpolation. The smallest factor is 1."""


def search_factors(
    folder: str,
    files: Sequence[str],
    extension: Extension,
    *,
    record: Path,
    generations: int = 8,
    windows: int = 4,
    seed: int = 0,
    device: str = "auto",
    on_step: Callable[[int, int], object] = lambda done, total: None,
) -> LongFactors:
    """Return the factors with the lowest loss on a text in windows of the new length.

    Args:
        folder: the folder of the model, with its weights and tokenizer.
        files: the text files.
        extension: the model's configuration, extended by ``longrope``. The search begins with the factors in it.
        record: the file for the measurements, which is rewritten after each measurement. If it contains the
            measurements of another search, an `InputError` is raised.
        windows: the largest number of windows, from the beginning of the text.
        device: a device of torch, such as ``cuda:1``. ``auto`` means cuda if torch finds it, else the CPU.

    Costs: one forward pass over these windows for each of about ``3 + 12 * generations`` sets of factors.
    """
    generations = whole("generations", generations, 0, remedy=Remedy(generations=8))
    windows = whole("windows", windows, 1, remedy=Remedy(windows=4))
    chosen_device, length = device_of(device), extension.to
    model = load_model(folder, device=chosen_device)
    corpus = read_corpus(files, tokenizer=folder, default_vocab_size=VOCAB_SIZE)
    count = num_windows(model.config.get_text_config().vocab_size, corpus, length, windows, argument="to")
    identity = {
        "model_sha256": fingerprint(folder), "tokenizer_fingerprint": corpus.tokenizer.fingerprint,
        "text_sha256": corpus.sha256, "to": length, "windows": count,
        "config": extension.config, "device": chosen_device.type,
    }  # fmt: skip
    loss_of = _Losses(
        TransformersDecoder(model, corpus.tokenizer), corpus.ids[: count * length + 1], extension, record, identity
    )
    first, largest = _first_generation(extension), MAX_FACTOR * length / extension.trained
    total = len(first) + (MUTATED + CROSSED) * generations
    losses: dict[Factors, float] = {}
    done = 0
    for generation in range(generations + 1):
        draw = np.random.default_rng((seed, generation))
        best = sorted(losses, key=lambda factors: losses[factors])[:PARENTS]
        for factors in first if generation == 0 else [*_children(best, largest, draw)]:
            losses[factors] = loss_of(factors)
            done += 1
            on_step(done, total)
    lowest = min(losses, key=lambda factors: losses[factors])
    return LongFactors(
        values=lowest,
        origin=f"the long factors were searched on {corpus.name}, {count} window{'s' * (count > 1)} of "
        f"{length:,} tokens: loss {losses[first[0]]:.4f} with those of YaRN's ramp, {losses[lowest]:.4f} with these, "
        f"the best of {len(losses)} that {record} holds; the short ones are 1",
    )


def search_for_extension(
    source: str, files: Sequence[str], *, to: int, method: str, output: Path | None, **options: Any
) -> LongFactors:
    """Search factors for the configuration that `write_extension` writes with the same arguments.

    The measurements are stored next to the configuration, in ``NAME.search.json``. `options` are arguments of
    `search_factors`.
    """
    if method != "longrope":
        raise InputError(f"got a search for {method}, which has no factors to search", Remedy(method="longrope"))
    path = extension_path(source, to=to, method=method, output=output)
    require_file(path)  # a search can take hours
    extension = extend(read_source(source), to=to, method=method)
    record = path.with_name(f"{path.name.removesuffix('.json')}.search.json")
    return search_factors(source, files, extension, record=record, **options)


class _Losses:
    """A callable that returns the loss of the model with some factors. It measures and records each loss once."""

    def __init__(
        self, decoder: TransformersDecoder, ids: Any, extension: Extension, record: Path, identity: dict[str, Any]
    ) -> None:
        self.decoder, self.ids, self.extension, self.record = decoder, ids, extension, record
        self.report = {**identity, "measured": _measured_before(record, identity)}
        self.losses = {tuple(each["factors"]): each["loss"] for each in self.report["measured"]}
        self._write()  # fails before the first measurement if the file is not writable

    def __call__(self, factors: Factors) -> float:
        if factors not in self.losses:
            kind, own_rotary = self.extension.layer_type, self.extension.rotary[1]
            scaling: Any = own_rotary.scaling  # a LongRoPE, because the extension uses it
            rotary = own_rotary.replace(scaling=replace(scaling, long_factor=factors))
            model = self.decoder.model
            with swap(model, layers=lambda index, layer_type: rotary if kind in (None, layer_type) else None):
                loss = finite_or_none(losses_in_windows(self.decoder, self.ids, self.extension.to).mean)
            self.losses[factors] = loss
            self.report["measured"].append({"factors": [*factors], "loss": loss})
            self._write()
        loss = self.losses[factors]
        return math.inf if loss is None else loss

    def _write(self) -> None:
        write_whole(self.record, json_text(self.report))


def _measured_before(record: Path, identity: dict[str, Any]) -> list[dict[str, Any]]:
    if not record.exists():
        return []
    before = read_earlier(record)
    measured = before.pop("measured", [])
    try:
        numbers = [[*each["factors"], each["loss"] or 0.0] for each in measured]
        readable = all(math.isfinite(number) for row in numbers for number in row)
    except (LookupError, TypeError):
        readable = False
    if not readable or changed_settings(before, identity):
        got = (
            f"got {record}, which is not the record of a search with this model, its tokenizer, text, length and device"
        )
        raise InputError(got, Remedy("use {}, or delete that file", output="another-name.json"))
    return measured


def _first_generation(extension: Extension) -> list[Factors]:
    """Return the first generation: the factors of YaRN's ramp, of NTK and of linear interpolation."""
    start: Any = extension.rotary[1].scaling
    ramp, factor = start.long_factor, extension.to / extension.trained
    last = max(1, len(ramp) - 1)
    powers = [factor ** (pair / last) for pair in range(len(ramp))]
    return [*dict.fromkeys((tuple(ramp), _sort_and_round(powers), _sort_and_round([factor] * len(ramp))))]


def _children(best: Sequence[Factors], largest: float, draw: np.random.Generator) -> Iterator[Factors]:
    for _ in range(MUTATED):
        parent = np.array(best[int(draw.integers(len(best)))])
        mutated = parent * np.exp(draw.normal(0, SPREAD, len(parent)))
        yield _sort_and_round(np.clip(np.where(draw.random(len(parent)) < SHARE, mutated, parent), 1, largest))
    for _ in range(CROSSED):
        one, other = (np.array(best[int(draw.integers(len(best)))]) for _ in range(2))
        yield _sort_and_round(np.where(draw.random(len(one)) < 0.5, one, other))


def _sort_and_round(factors: Sequence[float] | np.ndarray) -> Factors:
    """Round the factors and sort them, because slower pairs must not be stretched less than faster pairs."""
    return tuple(sorted(round(float(each), 4) for each in factors))
