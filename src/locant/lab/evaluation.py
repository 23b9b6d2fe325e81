"""Measure the recall of a trained model with other position encodings, and its loss by length and by position.

The same weights read the same text with each encoding. Nothing is trained. The windows of each length are adjacent and
contain the same tokens. The number of windows limits the work, and finished measurements are not repeated. For a model
of `transformers`, the logits of only a few hundred tokens are in memory at a time. So only the memory for its layers
grows with the length, even if the vocabulary is large.

Recall is measured with a number at some depth of a row. The number is a pass key among filler, or the value of one of
many keys. A pass key is easy to recall, because nothing else in the row looks like it (Mohtashami & Jaggi 2023, arXiv
2305.16300). Values are harder, because the whole row looks like them (Liu et al. 2023, arXiv 2307.03172). The two tasks
are from RULER (see `locant.lab.ruler`), except for their depths. A number counts as recalled only if the model writes
nothing before it.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from locant.arguments import Real, one_of, short_repr, whole
from locant.checkpoints.config_source import CONFIG, read_json
from locant.checkpoints.extension import Extension
from locant.errors import InputError, LocantError, Remedy
from locant.lab import ruler
from locant.lab.generation import is_lab_folder
from locant.lab.language_model import (
    DTYPES,
    device_of,
    fingerprint,
    num_windows,
)  # fmt: skip
from locant.lab.position_overrides import PositionOverride, Replacement
from locant.lab.readable_model import ReadableModel, read_language_model
from locant.lab.results import (
    RESULTS,
    Record,
    ResultsFolder,
    damage_error,
    environment,
    finite_or_none,
    has_type,
    plain_settings,
    read_record,
    read_same_run,
)  # fmt: skip
from locant.lab.resume_state import preserve_random_state
from locant.lab.settings import VOCAB_SIZE, Settings, check_settings
from locant.lab.text_learning import OVERLAP, in_context, losses_in_windows
from locant.models.config_values import integer_at
from locant.models.lab_decoder import TRAIN_LENGTH, encoding_from_lab_config
from locant.positions.encodings.rotary import Rotary
from locant.spelling import dtype_name
from locant.text.corpus import Corpus, read_corpus
from locant.text.tokenizer import Tokenizer

RESAMPLES = 2000
SHARE = 0.7
"""The share of the minutes that windows may take. The rest is for loading and for variations in speed."""

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
KEYS = {"pass_keys": "niah_single_1", "key_values": "niah_multikey_2"}
"""The questions that are asked at each of `DEPTHS`: their names in `results.json`, with the tasks of RULER."""

EXTRA_FIELDS: Mapping[str, Any] = {
    "interval_by_length": dict[str, list[float] | None],
    **dict.fromkeys(KEYS, list[dict[str, float]]),
    "ruler": list[dict[str, str | int | float | list[int] | dict[str, str | list[str]] | None]],
}
"""The fields of the records of an evaluation that `Record` does not have, and their types."""

TRIAL_TOKENS = 8
"""The number of tokens in the first test of each encoding."""

WINDOWS_PER_ANSWER = 2
"""The time for an answer, as a multiple of the time for a window with the length of the row.

The model reads the row and writes some tokens.
"""

Questions = Mapping[tuple[str, int, float | None], Sequence[ruler.Prompt]]
"""Rows by name, length and depth. Names are the keys of `KEYS`, or tasks of RULER with the depth ``None``."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """The settings of an evaluation.

    Args:
        lengths: tokens per window.
        ways: the encodings, in the notation of `PositionOverride`.
        windows: the largest number of windows of the longest length. Windows of other lengths read the same tokens.
        minutes: the time limit. One window is timed, and then the number of windows is chosen. It is at least one.
        keys: the number of rows for each of `KEYS`, each of `DEPTHS` and each length. With 0, recall is not measured.
        tasks: names in `locant.lab.ruler.TASKS`. Each task has `rows` rows of each length.
        far: whether to also read some tokens twice: with the full context of the longest length, and with a context of
            the trained length. If no length exceeds the trained length, the second context has the shortest length.
            This costs about 16 times as much as one length.
        device: such as ``cuda:1``. ``auto`` means cuda if torch finds it, else the CPU.
        dtype: the dtype to load the model in, ``float32``, ``bfloat16`` or ``float16``. ``auto`` is the saved dtype.
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096)
    ways: tuple[str, ...] = ("own", "exact", "yarn:4")
    windows: int = 16
    minutes: float | None = None
    keys: int = 2
    tasks: tuple[str, ...] = ()
    rows: int = 8
    far: bool = False
    device: str = "auto"
    dtype: str | torch.dtype = "auto"

    def __post_init__(self) -> None:
        check_settings(
            self,
            {"minutes": 10, "keys": Remedy("use {}, or 0 for none", keys=2), "tasks": ("vt",)},
            drop_repeats=True,
            lengths=partial(whole, low=2),
            ways=lambda name, each, remedy: str(PositionOverride.of(str(each))),
            tasks=lambda name, each, remedy: one_of(name, each, ruler.TASKS),
            keys=partial(whole, low=0),
            device=lambda name, value, remedy: str(device_of(value)),
            dtype=lambda name, value, remedy: one_of(name, dtype_name(value), DTYPES),
        )
        object.__setattr__(self, "lengths", tuple(sorted(self.lengths)))


def usual_settings(folder: str | Path, **given: Any) -> EvaluationSettings:
    """Return settings with the `given` values, and with suitable defaults for the model in a folder.

    A decoder of `locant train` is measured at its trained length and at half, twice and four times this length, if it
    has enough positions. It reads with its own encoding, and with ``yarn:4`` if this encoding is rotary, else with
    ``nope``. Its recall is not measured, because rows with keys are longer.
    """
    if not is_lab_folder(folder):
        return EvaluationSettings(**given)
    config = read_json(Path(folder) / CONFIG)
    encoding, trained = encoding_from_lab_config(config), integer_at(config, TRAIN_LENGTH) or Settings.train_length
    rows = getattr(encoding, "max_seq_len", None) or 4 * trained
    usual: dict[str, Any] = {
        "lengths": tuple(length for length in (trained // 2, trained, 2 * trained, 4 * trained) if 2 <= length <= rows),
        "ways": ("own", "yarn:4" if isinstance(encoding, Rotary) else "nope"),
        "keys": 0,
    }
    return EvaluationSettings(**{**usual, **given})


def evaluate_model(
    folder: str,
    files: Sequence[str],
    settings: EvaluationSettings,
    *,
    output: Path,
    force: bool = False,
    on_step: Callable[[int, int], object] = lambda done, total: None,
) -> dict[str, Any]:
    """Measure a model with each encoding. Return the contents of `results.json`, which is rewritten after each of them.

    If both calls are the same run (see `read_same_run`), finished encodings are not measured again.
    """
    model = read_language_model(folder, device=settings.device, dtype=settings.dtype)
    longest = settings.lengths[-1]
    trained = model.trained or longest
    model.require_positions(longest)
    near = trained if trained < longest else settings.lengths[0]
    contexts = [near, longest] if settings.far else []
    if settings.far and near == longest:
        got = f"got one length, {longest:,}, for the near and for the far context"
        raise InputError(got, Remedy(lengths=(max(2, longest // 4), longest)))
    with preserve_random_state(torch.device(settings.device)):
        encodings = {way: _build(way, model, longest) for way in settings.ways}
    corpus = read_corpus(files, tokenizer=folder, default_vocab_size=VOCAB_SIZE)
    count = num_windows(model.vocab_size, corpus, longest, settings.windows, argument="lengths")
    for way, encoding in encodings.items():  # report failures now, because earlier encodings may take hours
        with _read_with(model, way, encoding):
            _try_once(model, way, corpus, asks=bool(settings.keys or settings.tasks))
    questions = _questions(settings, corpus.tokenizer)
    name = Path(folder).name
    text = {**corpus.facts(), "tokenizer": name, "model": name, "model_sha256": fingerprint(folder),
            "trained_length": trained, "windows": count,
            **({"chat_template": ruler.has_chat_template(folder)} if settings.tasks else {})}  # fmt: skip
    results: dict[str, Any] = {
        "settings": plain_settings(settings, text), "environment": environment(settings.device), "records": [],
    }  # fmt: skip
    run_settings = {**results["settings"], "text": {name: fact for name, fact in text.items() if name != "windows"}}
    report = read_same_run(output / RESULTS, run_settings, {"ways"})
    windows = report["settings"]["text"].get("windows") if report else None
    finished = _finished_records(output / RESULTS, report.get("records", ()))
    if settings.minutes is not None:
        decoder = model.decoder(corpus.tokenizer)
        count = windows or min(count, _windows_in_time(decoder, corpus.ids[: longest + 1], settings, settings.minutes))
        text["windows"] = count
    if windows != count:
        finished = {}
    steps = len(settings.lengths) + len(contexts) + len(questions)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        on_step(done, steps * len(encodings))

    with ResultsFolder(output, force=force) as place:
        for way, encoding in encodings.items():
            if way in finished:
                done += steps
            else:
                with _read_with(model, way, encoding):
                    finished[way] = _measure(
                        model, way, trained, corpus, count * longest + 1, settings, contexts, questions, step
                    )  # fmt: skip
            results["records"].append(finished[way])
            place.write(results)
    return results


def _finished_records(path: Path, records: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return the records of an earlier call by encoding. Raise `InputError` if one is damaged."""
    for record in records:
        try:
            read_record({name: value for name, value in record.items() if name not in EXTRA_FIELDS})
            wrong = [name for name, hint in EXTRA_FIELDS.items() if not has_type(record.get(name), hint)]
            if wrong or record["interval_by_length"].keys() != record["loss_by_length"].keys():
                raise ValueError(f"got {short_repr(record.get(next(iter(wrong), 'interval_by_length')))} in a record")
        except (AttributeError, TypeError, ValueError) as error:
            raise damage_error(path, error) from None
    return {record["encoding"]: record for record in records}


def losses_of_extension(
    folder: str, files: Sequence[str], extension: Extension, *, windows: int = 4, device: str = "auto",
    on_step: Callable[[int, int], object] = lambda done, total: None,
) -> dict[str, Any]:  # fmt: skip
    """Return the loss in nats per token at the trained and the new length, before and after an extension."""
    ways = ("own", f"{extension.method}:{extension.to / extension.trained!r}")
    lengths = (extension.trained, extension.to)
    settings = EvaluationSettings(lengths=lengths, ways=ways, keys=0, windows=windows, device=device)
    with TemporaryDirectory() as place:
        results = evaluate_model(folder, files, settings, output=Path(place) / "losses", on_step=on_step)
    before, after = (record["loss_by_length"] for record in results["records"])
    return {length: {"before": before[length], "after": after[length]} for length in before}


def _build(way: str, model: ReadableModel, longest: int) -> Replacement:
    """Build an encoding with the same random numbers each time."""
    torch.manual_seed(0)
    return model.encoding(PositionOverride.of(way), longest)


def _read_with(model: ReadableModel, way: str, encoding: Replacement) -> AbstractContextManager[object]:
    return nullcontext() if way == "own" else model.use_encoding(encoding)


def _try_once(model: ReadableModel, way: str, corpus: Corpus, *, asks: bool) -> None:
    """Measure the loss of a few tokens and, if `asks`, generate two tokens. Raise `InputError` if this fails."""
    ids = corpus.ids[: TRIAL_TOKENS + 1]
    try:
        losses_in_windows(model.decoder(corpus.tokenizer), ids, len(ids) - 1)
        if asks:
            ruler.write_answer(
                model.module, corpus.tokenizer, ruler.Prompt(ids.tolist(), ("no two tokens spell this",), 2)
            )
    except LocantError as error:
        got = f"got {way} for {type(model.module).__name__}, which cannot be measured: {error.cause}"
        raise InputError(got, error.remedy) from error


def _questions(settings: EvaluationSettings, tokenizer: Tokenizer) -> Questions:
    def at(depth: float, task: str, length: int) -> list[ruler.Prompt]:
        """Return rows with room for the number alone. With RULER's limit, answers would take four times as long."""
        rows = ruler.rows(task, tokenizer, length, settings.keys, depth)
        return [row._replace(most=len(tokenizer.encode(f" {row.answers[0]}"))) for row in rows]

    questions: dict[tuple[str, int, float | None], list[ruler.Prompt]] = {
        (name, length, depth): at(depth, task, length)
        for name, task in KEYS.items() for length in settings.lengths for depth in DEPTHS if settings.keys
    }  # fmt: skip
    for task, length in itertools.product(settings.tasks, settings.lengths):
        questions[task, length, None] = ruler.rows(task, tokenizer, length, settings.rows)
    return questions


def _windows_in_time(model: nn.Module, ids: np.ndarray, settings: EvaluationSettings, minutes: float) -> int:
    """Time one window, and return the number of windows of the longest length that fit into the minutes."""
    longest = settings.lengths[-1]
    losses_in_windows(model, ids[:2], 1)  # the first use of a device takes longer
    began = time.perf_counter()
    losses_in_windows(model, ids, longest)
    taken = time.perf_counter() - began
    rows = len(KEYS) * settings.keys * len(DEPTHS) + settings.rows * len(settings.tasks)
    windows = (
        SHARE * 60 * minutes / taken / len(settings.ways) - WINDOWS_PER_ANSWER * rows * sum(settings.lengths) / longest
    )
    return max(1, int(windows / (len(settings.lengths) + (2 * OVERLAP if settings.far else 0))))


def _measure(
    model: ReadableModel, way: str, trained: int, corpus: Corpus, tokens: int, settings: EvaluationSettings,
    contexts: Sequence[int], questions: Questions, step: Callable[[], None],
) -> dict[str, Any]:  # fmt: skip
    began, losses, stretches = time.perf_counter(), {}, dict[int, list[float | None]]()
    decoder = model.decoder(corpus.tokenizer)
    for length in settings.lengths:
        losses[length] = losses_in_windows(decoder, corpus.ids[:tokens], length)
        step()
    for length in contexts:
        in_stretches = in_context(decoder, corpus.ids[:tokens], length, settings.lengths[-1])
        stretches[length] = [*map(finite_or_none, in_stretches)]
        step()
    recalled, answers = {name: list[dict[str, Any]]() for name in KEYS}, list[dict[str, Any]]()
    for (name, length, depth), rows in questions.items():
        result = ruler.ask(model.module, corpus.tokenizer, rows)
        if depth is None:
            answers.append({"task": name, "length": length, **result})
        else:
            right = round((result["score"] or 0) * result["asked"])
            recalled[name].append({"length": length, "depth": depth, "recalled": right, "asked": result["asked"]})
        step()
    return {
        **Record(
            **Record.losses(losses), context_loss_by_stretch=stretches, encoding=way, seed=0, train_length=trained,
            train_loss=None,
            num_parameters=sum(parameter.numel() for parameter in model.module.parameters()),
            seconds=round(time.perf_counter() - began, 3),
        ).to_dict(),
        "interval_by_length": {str(length): interval_of_mean(loss.by_window) for length, loss in losses.items()},
        **recalled,
        "ruler": answers,
    }  # fmt: skip


def interval_of_mean(values: Sequence[Real]) -> list[float] | None:
    """Return the 95 % interval of a mean over adjacent windows, by a circular block bootstrap (Politis & Romano 1992).

    The length of a block is the cube root of the number of windows, and less than that number. The 2,000 samples are
    the same in every call. The result is ``None`` if a loss is not finite or if there is only one window.

    >>> interval_of_mean([1.0, 1.0, 1.0]), interval_of_mean([1.0, 2.0])
    ([1.0, 1.0], [1.0, 2.0])
    """
    numbers = np.asarray(values, dtype=np.float64)
    count = len(numbers)
    if count < 2 or not np.isfinite(numbers).all():
        return None
    block = min(math.ceil(count ** (1 / 3)), count - 1)  # a block of all windows would have the same mean every time
    starts = np.random.default_rng(0).integers(0, count, (RESAMPLES, math.ceil(count / block)))
    drawn = (starts[..., None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :count] % count
    low, high = np.quantile(numbers[drawn].mean(1), [0.025, 0.975])
    return [float(low), float(high)]
