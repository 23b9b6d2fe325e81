"""LongRoPE's factors, searched on a text with the model that they are for: Ding et al. 2024, arXiv 2402.13753.

An evolution, without any training: the factors of YaRN's ramp, of NTK and of linear interpolation are put into the
model, and its loss in windows of the new length is measured; the best are varied and crossed, and so are the best of
these, generation after generation. Every measurement is written down. A second call takes what there is from there, so
a search that was stopped goes on, and one that ended goes on where more generations are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from locant.arguments import whole
from locant.checkpoints.extension import Extension, LongFactors
from locant.errors import InputError
from locant.files import json_text, write_whole
from locant.lab.language_model import AsDecoder, device_of, fingerprint, load_model, require_rows
from locant.lab.resume import changed, earlier
from locant.lab.settings import VOCAB_SIZE
from locant.lab.training import evaluate
from locant.positions.base import PositionEncoding
from locant.positions.encodings.rotary import Rotary
from locant.swapping import swap
from locant.text.corpus import Corpus, read_corpus

__all__ = ["search_factors"]

Factors = tuple[float, ...]

PARENTS, VARIED, CROSSED = 6, 6, 6
"""How many of the best a generation comes from, and how many it adds of each kind."""
SHARE, SPREAD = 0.3, 0.2
"""Of the factors of one that is varied, how many move, and by what deviation of their logarithm."""
LARGEST = 1.25
"""No factor is more than so many times that of linear interpolation, nor less than 1."""


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
    """The factors with which a model reads a text best in windows of the new length, of all that were tried.

    Args:
        folder: the model, with its weights and tokenizer.
        extension: its configuration, extended by ``longrope``: where the search begins.
        record: the file of measurements, which is written anew after each; one of another search is refused.
        windows: at most so many, from the beginning of the text.
        device: such as ``cuda:1``; ``auto``: cuda where torch finds it, else the CPU.

    Costs one forward pass over these windows for each of some ``3 + 12 * generations`` sets of factors.
    """
    generations = whole("generations", generations, 0, remedy="--generations 8")
    where = device_of(device)
    model = load_model(folder, device=where)
    corpus = read_corpus(files, tokenizer=folder, usual_vocab_size=VOCAB_SIZE)
    count = min(whole("windows", windows, 1, remedy="--windows 4"), (len(corpus.ids) - 1) // extension.to)
    if not count:
        got = f"got a text of {len(corpus.ids):,} tokens, too short for a window of {extension.to:,}"
        raise InputError(got, f"a text of more than {extension.to:,} tokens")
    require_rows(model, int(corpus.ids.max()))
    ids = corpus.ids[: count * extension.to + 1]
    loss_of = _Losses(model, ids, extension, record, _identity(folder, corpus, extension, count, where))
    first = _first(extension)
    total, done = len(first) + (VARIED + CROSSED) * generations, 0
    known: dict[Factors, float] = {}
    for generation in range(generations + 1):
        draw = np.random.default_rng((seed, generation))
        best = sorted(known, key=lambda factors: known[factors])[:PARENTS]
        largest = LARGEST * extension.to / extension.trained
        for factors in first if generation == 0 else [*_children(best, largest, draw)]:
            known[factors] = loss_of(factors)
            done += 1
            on_step(done, total)
    found = min(known, key=lambda factors: known[factors])
    return LongFactors(
        values=found,
        origin=f"the long factors were searched on {corpus.name}, {count} windows of {extension.to:,} tokens: loss "
        f"{known[first[0]]:.4f} with those of YaRN's ramp, {known[found]:.4f} with these, the best of {len(known)} "
        f"that {record} holds; the short ones are 1",
    )


def _identity(folder: str, corpus: Corpus, extension: Extension, count: int, device: torch.device) -> dict[str, Any]:
    """What a measurement depends on, beside the factors."""
    return {
        "model_sha256": fingerprint(folder), "tokenizer_fingerprint": corpus.tokenizer.fingerprint,
        "text_sha256": corpus.sha256, "to": extension.to, "windows": count,
        "config": extension.config, "device": device.type,
    }  # fmt: skip


class _Losses:
    """The loss with some factors; measured once, and written down."""

    def __init__(self, model: Any, ids: Any, extension: Extension, record: Path, identity: dict[str, Any]) -> None:
        self.model, self.ids, self.extension, self.record = model, ids, extension, record
        self.found = {**identity, "measured": _measured_before(record, identity)}
        self.known = {tuple(each["factors"]): each["loss"] for each in self.found["measured"]}
        write_whole(record, json_text(self.found))  # where nothing can be written, nothing is measured

    def __call__(self, factors: Factors) -> float:
        if factors not in self.known:
            with swap(self.model, layers=self._layers(factors)):
                length = self.extension.to
                loss = evaluate(AsDecoder(self.model), self.ids, length).mean
            self.known[factors] = loss if math.isfinite(loss) else None
            self.found["measured"].append({"factors": [*factors], "loss": self.known[factors]})
            write_whole(self.record, json_text(self.found))
        loss = self.known[factors]
        return math.inf if loss is None else loss

    def _layers(self, factors: Factors) -> Callable[[int, str | None], PositionEncoding | None]:
        rotary, kind = _longrope(self.extension.rotary[1], factors), self.extension.layer_type
        return lambda index, layer_type: rotary if kind in (None, layer_type) else None


def _longrope(rotary: Rotary, factors: Factors) -> Rotary:
    scaling: Any = rotary.scaling  # LongRoPE, as the extension is one by it
    return rotary.alike(scaling=replace(scaling, long_factor=factors))


def _measured_before(record: Path, identity: dict[str, Any]) -> list[dict[str, Any]]:
    if not record.exists():
        return []
    before = earlier(record)
    measured = before.pop("measured", [])
    try:
        numbers = [[*each["factors"], each["loss"] or 0.0] for each in measured]
        readable = all(math.isfinite(number) for row in numbers for number in row)
    except (LookupError, TypeError):
        readable = False
    if not readable or changed(before, identity):
        got = f"got {record}, which is no record of a search with this model, its tokenizer, text, length and device"
        raise InputError(got, "-o another-name.json, or that file taken away")
    return measured


def _first(extension: Extension) -> list[Factors]:
    """YaRN's ramp, with which a search begins; NTK's powers of the factor, and linear interpolation."""
    start: Any = extension.rotary[1].scaling
    ramp, factor = start.long_factor, extension.to / extension.trained
    last = max(1, len(ramp) - 1)
    powers = [factor ** (pair / last) for pair in range(len(ramp))]
    return [*dict.fromkeys((tuple(ramp), _settled(powers), _settled([factor] * len(ramp))))]


def _children(best: Sequence[Factors], largest: float, draw: np.random.Generator) -> Iterator[Factors]:
    for _ in range(VARIED):
        parent = np.array(best[int(draw.integers(len(best)))])
        moved = parent * np.exp(draw.normal(0, SPREAD, len(parent)))
        yield _settled(np.clip(np.where(draw.random(len(parent)) < SHARE, moved, parent), 1, largest))
    for _ in range(CROSSED):
        one, other = (np.array(best[int(draw.integers(len(best)))]) for _ in range(2))
        yield _settled(np.where(draw.random(len(one)) < 0.5, one, other))


def _settled(factors: Sequence[float] | np.ndarray) -> Factors:
    """In the order of the pairs, slower ones stretched no less, and short enough to be read."""
    return tuple(sorted(round(float(each), 4) for each in factors))
