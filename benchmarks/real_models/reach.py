"""How far can a trained model read? Losses and answers of the same rows with each position encoding.

A row is the documentation inside Python. Lines with a secret number are spread over it, and the questions for all of
these numbers follow at its end, as in RULER's multi-query task. So one reading gives the loss by position and the
answers by distance. A number counts as found if each of its tokens is the most probable one after a question and the
answers before it. The loss is the mean over tokens of the documentation alone.

`CUT` reads a row in windows of the trained length that overlap by half. It is what a user can do without any change to
the model, so an encoding uses far context only if it is better than this.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.real_models import weights
from benchmarks.real_models.cost_of_bugs import texts
from benchmarks.real_models.record import RESULTS, Record
from benchmarks.real_models.second_calculation import losses_of_transformers
from locant.checkpoints.config_source import read_source
from locant.checkpoints.extension import LongFactors, extend
from locant.errors import InputError
from locant.files import write_whole
from locant.lab import TuneSettings, ruler, tune
from locant.lab.evaluation import interval_of_mean
from locant.lab.factor_search import search_factors
from locant.lab.position_overrides import PositionOverride
from locant.lab.readable_model import ReadableModel, read_language_model
from locant.text.tokenizer import Tokenizer

__all__ = [
    "CUT",
    "EDGES",
    "PLAN",
    "SEARCHED",
    "Plan",
    "Row",
    "Subject",
    "make_row",
    "read",
    "read_cut",
    "run",
    "summary",
]

PART = "reach"
BLOCK = 128
"""The number of positions in a stretch, whose mean loss is recorded."""
EDGES = (0, 2048, 4096, 8192, 12_288, 16_384, 24_576, 32_768)
"""The positions between which losses are summarised."""
LOGITS = 2**26
"""The largest number of logits in memory."""
DIGITS = 5
CUT, SEARCHED = "own, cut", "longrope, searched"


class Reading(NamedTuple):
    """A row of some length, read with some encodings."""

    length: int
    ways: tuple[str, ...]


class Tuning(NamedTuple):
    """A short training with other positions, and the lengths that are read with the tuned model."""

    way: str
    steps: int
    length: int
    lengths: tuple[int, ...]


class Plan(NamedTuple):
    """What is measured in one model.

    Args:
        trained: the length that the model was trained at.
        numbers: the number of secret numbers in a row.
        generations: the generations of the search for LongRoPE's factors. 0 means the best of its three first sets.
        offsets: the positions of the first token, for the effect of exact angles.
        offset_length: the number of tokens in these readings.
        checked: the readings that are calculated a second time.
    """

    model: str
    trained: int
    numbers: int
    readings: tuple[Reading, ...]
    tunings: tuple[Tuning, ...]
    generations: int
    offsets: tuple[int, ...]
    offset_length: int
    checked: tuple[Reading, ...]


BY_SCALING = ("linear:2", "ntk:2", "dynamic", "yarn:2")
BY_DISTANCE = ("self-extend:4", "rerope", "dual-chunk")
PLAN = Plan(
    model="smollm2",
    trained=8192,
    numbers=16,
    readings=(
        Reading(16_384, ("own", CUT, "yarn:2", "self-extend:4", "ntk:2", "dual-chunk", "rerope", "linear:2")),
        Reading(4096, ("own", "exact", *BY_SCALING, *BY_DISTANCE, "nope")),
        Reading(8192, ("own", "exact")),
        Reading(16_384, (SEARCHED,)),
        Reading(32_768, ("yarn:4", "self-extend:8")),
    ),
    tunings=(Tuning("yarn:2", 8, 4096, (4096, 16_384)), Tuning("drope", 24, 1024, (4096,))),
    generations=0,
    offsets=(0, 2**13, 2**17, 2**20, 2**21, 2**22, 2**23),
    offset_length=1024,
    checked=(
        Reading(4096, ("own", *BY_SCALING, "self-extend:4", "nope")),
        Reading(16_384, ("yarn:2",)),
    ),
)  # fmt: skip
"""The measurements, the most important ones first."""


class Row(NamedTuple):
    """Tokens, whether each token but the first counts for the loss, and the answers.

    Args:
        answers: the index of the first token of a number in the text, and the start and stop of its answer.
    """

    ids: Tensor
    counted: Tensor
    answers: list[tuple[int, int, int]]


class Subject(NamedTuple):
    """A model that can be read with other encodings, with its folder and its tokenizer."""

    folder: Path
    model: ReadableModel
    tokenizer: Tokenizer


def make_row(tokenizer: Tokenizer, text: str, length: int, count: int, last: int = 0, seed: int = 0) -> Row:
    """Return a row of `length` tokens: the text with `count` secret numbers in it, and the questions.

    Args:
        last: the number of tokens at the end of the text that have no number among them.
        seed: decides the numbers, their keys and the order of the questions.

    Raises:
        InputError: the text is too short, or the questions leave no place for it.
    """
    draw = Random(f"{length} {seed}")  # noqa: S311  # not for secrets
    keys = [*dict.fromkeys("-".join(draw.choices(ruler.words(), k=2)) for _ in range(2 * count))][:count]
    values = [str(draw.randrange(10**6, 10**7)) for _ in keys]

    def tokens_of(number: int, before: str, after: str) -> list[list[int]]:
        """Return the tokens before a value, those of the value, and those after it."""
        parts = (f"{before}The secret number of {keys[number]} is", f" {values[number]}", after)
        return [tokenizer.encode(part).tolist() for part in parts]

    lines = [tokens_of(number, "", ".\n\n") for number in range(count)]
    asked = draw.sample(range(count), count)
    questions = [tokens_of(number, f"\nWhat is the secret number of {keys[number]}? ", ".") for number in asked]
    prefix = [*tokenizer.beginning]
    room = length - len(prefix) - sum(len(part) for each in (*lines, *questions) for part in each)
    if room <= last:
        got = f"got rows of {length:,} tokens, too short for {count} numbers and their questions"
        raise InputError(got, f"use rows of more than {length - room + last:,} tokens")
    of_text, ends = list[int](), list[int]()
    for paragraph in text.split("\n\n"):
        of_text += tokenizer.encode(f"{paragraph}\n\n").tolist()
        ends.append(len(of_text))
        if len(of_text) >= room:
            break
    else:
        raise InputError(f"got a text of {len(of_text):,} tokens for a row of {length:,}", "use a longer text")
    wanted = [(number + 0.5) / count * (room - last) for number in range(count)]
    places = [min(next(end for end in ends if end >= place), room - last) for place in wanted]
    ids, is_text, values_at = prefix, [False] * len(prefix), list[int]()

    def add(tokens: Sequence[int], *, counts: bool = False) -> None:
        ids.extend(tokens)
        is_text.extend([counts] * len(tokens))

    for begin, end, line in zip([0, *places], places, lines, strict=False):
        add(of_text[begin:end], counts=True)
        values_at.append(len(ids) + len(line[0]))
        add([*itertools.chain(*line)])
    add(of_text[places[-1] : room], counts=True)
    answers = list[tuple[int, int, int]]()
    for number, (before, value, after) in zip(asked, questions, strict=True):
        start = len(ids) + len(before)
        answers.append((values_at[number], start, start + len(value)))
        add([*before, *value, *after])
    return Row(torch.tensor(ids), torch.tensor(is_text[1:]), answers)


@torch.inference_mode()
def read(model: Any, ids: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
    """Return the nats of every token but the first, and whether it was the most probable one."""
    hidden = model.get_decoder()(input_ids=ids[None], use_cache=False, **call).last_hidden_state[0, :-1]
    head, nats, hits = model.get_output_embeddings(), list[Tensor](), list[Tensor]()
    chunk = max(1, LOGITS // head.weight.shape[0])
    for states, targets in zip(hidden.split(chunk), ids[1:].split(chunk), strict=True):
        logits = head(states)
        of_target = logits.gather(-1, targets[:, None])[:, 0]
        nats.append(logits.logsumexp(-1) - of_target)  # cross_entropy is 0.0001 too low for 49,152 tokens
        hits.append(logits.argmax(-1) == targets)
    return torch.cat(nats), torch.cat(hits)


def read_cut(model: Any, ids: Tensor, near: int, beginning: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Return what `read` returns, but no token has more than `near` tokens of context. Each has at least half of it."""
    nats, hits = read(model, ids[:near])
    for start in range(near, len(ids), near // 2):
        stop = min(start + near // 2, len(ids))
        window = ids[stop - near : stop].clone()
        window[: len(beginning)] = torch.tensor(beginning, dtype=window.dtype)
        for number, of_window in enumerate(read(model, window)):
            new = of_window[start - stop :]
            nats, hits = (torch.cat([nats, new]), hits) if number == 0 else (nats, torch.cat([hits, new]))
    return nats, hits


def facts_of_reading(row: Row, nats: Tensor, hits: Tensor) -> dict[str, Any]:
    """Return the loss of each block of positions, and for each answer its distance, whether it was found, its nats."""
    blocks = list[float | None]()
    for losses, counted in zip(nats.split(BLOCK), row.counted.split(BLOCK), strict=True):
        blocks.append(round(losses[counted].mean().item(), DIGITS) if counted.any() else None)
    answers = list[dict[str, Any]]()
    for place, start, stop in row.answers:
        found, losses = hits[start - 1 : stop - 1], nats[start - 1 : stop - 1]
        answers.append({"distance": start - place, "found": bool(found.all()), "nats": round(losses.sum().item(), 3)})
    return {"loss": round(nats[row.counted].mean().item(), DIGITS), "blocks": blocks, "answers": answers}


# ---------------------------------------------------------------------- encodings


def _reading_with(subject: Subject, way: str, length: int, factors: LongFactors | None) -> AbstractContextManager[Any]:
    if way in ("own", CUT):
        return nullcontext()
    if way == SEARCHED:
        assert factors is not None
        extension = extend(read_source(str(subject.folder)), to=length, method="longrope", factors=factors)
        return subject.model.use_encoding(extension.rotary[1])
    torch.manual_seed(0)
    return subject.model.use_encoding(subject.model.encoding(PositionOverride.of(way), length))


def _read(subject: Subject, way: str, length: int, plan: Plan, factors: LongFactors | None = None) -> dict[str, Any]:
    row = make_row(subject.tokenizer, texts()["documentation"], length, plan.numbers)
    module: Any = subject.model.module
    with _reading_with(subject, way, length, factors):
        if way == CUT:
            return facts_of_reading(row, *read_cut(module, row.ids, plan.trained, subject.tokenizer.beginning))
        return facts_of_reading(row, *read(module, row.ids))


def _read_at(subject: Subject, way: str, offset: int, length: int) -> dict[str, float]:
    """Return the loss of a short row whose first token is at a position far from 0."""
    row = make_row(subject.tokenizer, texts()["documentation"], length, 1)
    with _reading_with(subject, way, length, None):
        nats, _ = read(subject.model.module, row.ids, position_ids=torch.arange(offset, offset + length)[None])
    return {"loss": round(nats[row.counted].mean().item(), DIGITS)}


def angle_errors(base: float, width: int, lengths: Sequence[int]) -> dict[str, float]:
    """Return the largest error of float32 angles among the last 1,024 positions below each length, with NumPy."""
    exponents = np.arange(0, width, 2)
    exact = base ** (-exponents / width)
    rounded = (1.0 / np.float32(base) ** (exponents.astype(np.float32) / np.float32(width))).astype(np.float32)
    errors = {}
    for length in lengths:
        places = np.arange(max(0, length - 1024), length)[:, None]
        errors[str(length)] = float(
            np.abs((places.astype(np.float32) * rounded).astype(np.float64) - places * exact).max()
        )
    return errors


def _code(subject: Subject, tokens: int, name: str) -> str:
    """Write the beginning of the source code that Python ships, and return the path. No reading has this text."""
    path = _work(subject) / f"{name}.txt"
    text = texts()["code"]
    ids = subject.tokenizer.encode(text)
    if len(ids) < tokens:
        raise InputError(
            f"got a text of {len(ids):,} tokens, expected {tokens:,}", "use fewer steps or shorter windows"
        )
    write_whole(path, subject.tokenizer.decode(ids[:tokens].tolist()))
    return str(path)


def _work(subject: Subject) -> Path:
    """Return the folder of states and tuned models, beside the weights."""
    folder = subject.folder.parent / "work" / subject.folder.name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _search(subject: Subject, to: int, generations: int) -> dict[str, Any]:
    """Search LongRoPE's factors with the package's own search, in one window of source code."""
    extension = extend(read_source(str(subject.folder)), to=to, method="longrope")
    file, record = _code(subject, to + to // 8, "search"), _work(subject) / f"search-{to}.json"
    found = search_factors(
        str(subject.folder), [file], extension, record=record, generations=generations, windows=1, device="cpu"
    )
    return {
        "factors": found.values,
        "origin": found.origin.replace(file, "source code").replace(str(record), record.name),
    }


def _tune(subject: Subject, tuning: Tuning, plan: Plan) -> dict[str, Any]:
    """Tune with `locant tune`'s own code on source code, and read the rows with the tuned model."""
    steps, length = tuning.steps, tuning.length
    tokens = max(10 * length + 100, (steps + 1) * length * 10 // 9 + length)  # the last tenth is held out
    file = _code(subject, tokens, f"tune-{tuning.way.replace(':', '-')}")
    settings = TuneSettings(way=tuning.way, num_steps=steps, length=length, batch_size=1, device="cpu")
    output = _work(subject) / f"{tuning.way.replace(':', '-')}-{steps}-{length}"
    record = tune(subject.folder, [file], settings, output=output, force=True)
    tuned = Subject(output, read_language_model(output), subject.tokenizer)
    return {
        "train_loss": [round(loss, 4) for loss in record["train_loss"]],
        "held_out": record["held_out"],
        "readings": {str(each): _read(tuned, "own", each, plan) for each in tuning.lengths},
    }


# ---------------------------------------------------------------------- the measurements


class _Measurement(NamedTuple):
    key: str
    settings: dict[str, Any]
    of: Callable[[Subject], Any]


def text_digests() -> dict[str, str]:
    """Return the beginnings of the checksums of the texts, which depend on the version of Python."""
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts().items()}


def _measurements(plan: Plan, factors: Callable[[], LongFactors]) -> Iterator[_Measurement]:
    usual = {"texts": text_digests(), "trained": plan.trained, "numbers": plan.numbers}
    for length, ways in plan.readings:
        for way in ways:
            if way == SEARCHED:
                search = {**usual, "to": length, "generations": plan.generations}
                of = partial(_search, to=length, generations=plan.generations)
                yield _Measurement("search", search, of)
                yield _Measurement(
                    f"{length}/{way}",
                    search,
                    lambda each, length=length: _read(each, SEARCHED, length, plan, factors()),
                )
            else:
                of = partial(_read, way=way, length=length, plan=plan)
                yield _Measurement(f"{length}/{way}", usual, of)
    for length, ways in plan.checked:
        for way in ways:
            of = partial(_check, way=way, length=length, plan=plan)
            yield _Measurement(f"check/{length}/{way}", usual, of)
    for offset in plan.offsets:
        for way in ("own", "exact"):
            of = partial(_read_at, way=way, offset=offset, length=plan.offset_length)
            yield _Measurement(f"offset/{offset}/{way}", {**usual, "length": plan.offset_length}, of)
    yield _Measurement("angles", {"lengths": [*ANGLE_LENGTHS]}, _angles)
    for tuning in plan.tunings:
        of = partial(_tune, tuning=tuning, plan=plan)
        yield _Measurement(f"tuned/{tuning.way}", {**usual, **tuning._asdict()}, of)


ANGLE_LENGTHS = tuple(2**power for power in range(12, 25))


def _angles(subject: Subject) -> dict[str, float]:
    config: Any = subject.model.module.config
    return angle_errors(config.rope_parameters["rope_theta"], config.head_dim, ANGLE_LENGTHS)


def _check(subject: Subject, way: str, length: int, plan: Plan) -> dict[str, Any]:
    row = make_row(subject.tokenizer, texts()["documentation"], length, plan.numbers)
    nats = losses_of_transformers(subject.folder, way, row.ids, plan.trained)
    return {"loss": round(float(nats[row.counted.numpy()].mean()), DIGITS)}


def load(name: str) -> Subject:
    """Return a model of `weights.MODELS`."""
    model, _ = weights.load(name)
    folder = Path(model.config._name_or_path)
    return Subject(folder, read_language_model(folder), Tokenizer.load(folder))


def run(*, anew: bool = False, folder: Path = RESULTS, plan: Plan = PLAN, subject: Subject | None = None) -> None:
    """Measure everything in the plan that is not recorded yet."""
    record = Record(PART, [plan.model], anew=anew, folder=folder, summary=partial(summary, plan=plan))
    read_subject = lru_cache(maxsize=1)(lambda: load(plan.model) if subject is None else subject)

    if anew:
        shutil.rmtree(_work(read_subject()))  # the package's own search and training go on where they were stopped

    def factors() -> LongFactors:
        found = record.measured["search"]
        return LongFactors(tuple(found["factors"]), found["origin"])

    for key, settings, of in _measurements(plan, factors):
        record.measure(key, settings, lambda of=of: of(read_subject()))
    record.write()


# ---------------------------------------------------------------------- the summary


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return round(sum(numbers) / len(numbers), 4) if numbers else None


def _facts(value: Mapping[str, Any], length: int, trained: int) -> dict[str, Any]:
    """Return the means between two of `EDGES`, within and beyond the trained length, and the numbers found."""
    blocks, answers = value["blocks"], value["answers"]
    stretches = [
        [begin, min(end, length), _mean(blocks[begin // BLOCK : end // BLOCK])]
        for begin, end in itertools.pairwise(EDGES) if begin < length
    ]  # fmt: skip
    far = [each for each in answers if each["distance"] >= trained]
    return {
        "by_position": [each for each in stretches if each[2] is not None],
        "within": _mean(blocks[: trained // BLOCK]),
        "beyond": _mean(blocks[trained // BLOCK :]),
        "found": sum(each["found"] for each in answers),
        "asked": len(answers),
        "found_far": sum(each["found"] for each in far),
        "asked_far": len(far),
        "nats": _mean([each["nats"] for each in answers]),
        "nats_far": _mean([each["nats"] for each in far]),
    }


def _difference(value: Mapping[str, Any], other: Mapping[str, Any], first: int) -> dict[str, Any] | None:
    """Return the mean difference of two readings from a block on, and its interval."""
    pairs = zip(value["blocks"][first:], other["blocks"][first:], strict=True)
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    if not differences:
        return None
    interval = interval_of_mean(differences)
    return {"mean": _mean(differences), "interval": interval and [round(each, 4) for each in interval]}


def summary(measured: Mapping[str, Any], plan: Plan = PLAN) -> dict[str, Any]:
    """Return losses by length, encoding and position, numbers found, and the effects of tuning and of exact angles."""
    first, lengths = plan.trained // BLOCK, dict[str, dict[str, Any]]()
    for each in plan.readings:
        rows = lengths.setdefault(str(each.length), {})
        for way in each.ways:
            value = measured.get(f"{each.length}/{way}")
            if value is None:
                continue
            rows[way] = _facts(value, each.length, plan.trained)
            for name, base in (("against_own", "own"), ("against_cut", CUT)):
                other = measured.get(f"{each.length}/{base}")
                if other is not None and way != base:
                    start = first if each.length > plan.trained else 0
                    rows[way][name] = _difference(value, other, start)
            own = measured.get(f"{each.length}/own")
            if own is not None and each.length > plan.trained:
                short = {"blocks": value["blocks"][:first]}
                rows[way]["cost_within"] = _difference(short, {"blocks": own["blocks"][:first]}, 0)
    tuned = {}
    for tuning in plan.tunings:
        value = measured.get(f"tuned/{tuning.way}")
        if value is None:
            continue
        before = PositionOverride.of(tuning.way)
        tuned[tuning.way] = {"steps": tuning.steps, "length": tuning.length, "readings": {}}
        for length, reading in value["readings"].items():
            old = measured.get(f"{length}/{before}")
            tuned[tuning.way]["readings"][length] = {
                "before": old and _facts(old, int(length), plan.trained),
                "after": _facts(reading, int(length), plan.trained),
            }
    checks = {}
    for each in plan.checked:
        for way in each.ways:
            second, value = measured.get(f"check/{each.length}/{way}"), measured.get(f"{each.length}/{way}")
            if second is not None and value is not None:
                checks[f"{each.length}/{way}"] = {"first": value["loss"], "second": second["loss"]}
    offsets = [
        {"position": offset, **{way: measured[f"offset/{offset}/{way}"]["loss"] for way in ("own", "exact")}}
        for offset in plan.offsets if all(f"offset/{offset}/{way}" in measured for way in ("own", "exact"))
    ]  # fmt: skip
    return {
        "model": plan.model, "trained": plan.trained, "lengths": lengths, "tuned": tuned, "checks": checks,
        "offsets": offsets, "angles": measured.get("angles", {}),
        "search": measured.get("search", {}).get("origin"),
    }  # fmt: skip
