"""What does a position bug cost? The loss and the recall of trained models with each bug of `bugs.py`.

A model reads the same windows with a bug and without it. The difference of the losses is taken token by token, and its
interval is a block bootstrap over stretches of 128 tokens. Half of the windows are the documentation inside Python, and
half are source code of its standard library, so every machine has the texts. Logits are in memory for a few hundred
tokens at a time. A number counts as found if each of its tokens is the most probable one, so the model would write it.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import tarfile
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.real_models import weights
from benchmarks.real_models.bugs import BUGS, DOCUMENTS, EXTENDED, IGNORED, SCENARIOS, Arrangement, Bug
from benchmarks.real_models.record import RESULTS, Record
from locant import Rotary, Tokenizer, probe
from locant.checkpoints.config_comparison import compare_configs
from locant.engines.batches import check_batch
from locant.errors import LocantError
from locant.lab import ruler
from locant.lab.evaluation import interval_of_mean
from locant.text import sample_text

__all__ = ["BLOCK", "EDGES", "PLAN", "Losses", "Recall", "losses", "run", "summary", "texts", "windows"]

PART = "bugs"
BLOCK = 128
"""The number of tokens in a stretch, whose mean losses are recorded."""
EDGES = (0, 128, 512, 1024, 2048, 4096, 8192, 16_384)
"""The positions between which losses are summarised."""
LOGITS = 2**26
"""The largest number of logits in memory."""
DIGITS = 5
CORRECT = "correct"
TASKS = {"one key": "niah_single_1", "many keys": "niah_multikey_2"}
SEED = 0


class Losses(NamedTuple):
    """A measurement of the losses of one model with each bug, or with the bugs of `only`, in windows of one length."""

    model: str
    length: int
    windows: int
    stride: int = 1
    only: tuple[str, ...] = ()


class Recall(NamedTuple):
    """A measurement of the recall of one model with each bug, in rows of one length."""

    model: str
    rows: int
    length: int


PLAN: tuple[Losses | Recall, ...] = (
    Losses("smollm2", 2048, 2),
    Losses("smollm2", 8192, 1, only=(
        "exact-angles", "frequencies-bfloat16", "frequencies-float16", "positions-bfloat16", "positions-float16",
        "product-bfloat16", "product-float16", "product-tf32", "tables-bfloat16", "base-10000", "base-times-10",
        "ntk-unasked", "yarn-unasked", "attention-factor", "half-as-interleaved", "keys-off-by-one",
        "pairs-not-rotated", "restarts", "ranks-in-wrong-order", "gap",
    )),
    Losses("smollm2", 512, 2),
    Losses("gemma3", 2048, 2, stride=2),
    Losses("gemma3", 512, 2, stride=2),
    Recall("smollm2", 3, 1024),
    Losses("smollm2", EXTENDED, 1),
    Losses("gemma3", 8192, 1, stride=2, only=(
        "frequencies-bfloat16", "positions-bfloat16", "positions-float16", "product-bfloat16", "local-base-everywhere",
        "window-everywhere",
    )),
    Losses("gemma3", 16_384, 1, stride=4, only=("positions-bfloat16", "positions-float16", "local-base-everywhere")),
)  # fmt: skip
"""The measurements, in their order. The loss of every `stride`-th token is computed.

In long texts only those bugs are measured whose cost may depend on the length: a window of 8,192 tokens takes half a
minute (SmolLM2) or more than a minute (Gemma) on two quiet cores.
"""


def texts() -> dict[str, str]:
    """Return texts that every machine with Python has."""
    sources = [Path(str(module.__file__)) for module in (tarfile, argparse, typing)]
    return {"documentation": sample_text(), "code": "\n\n".join(each.read_text(encoding="utf-8") for each in sources)}


def windows(tokens: Mapping[str, Sequence[int]], prefix: Sequence[int], length: int, count: int) -> list[Tensor]:
    """Return windows of ``length + 1`` tokens, from the texts in turns. Each begins with the prefix of the model."""
    found, size = [], length + 1 - len(prefix)
    for number in range(count):
        text = [*tokens.values()][number % len(tokens)]
        begin = number // len(tokens) * size
        assert begin + size <= len(text), "the text is too short"
        found.append(torch.tensor([*prefix, *text[begin : begin + size]]))
    return found


def packed_windows(tokens: Mapping[str, Sequence[int]], prefix: Sequence[int], length: int, count: int) -> list[Tensor]:
    """Return windows of `DOCUMENTS` documents, from places of the texts that are far from each other."""
    documents = windows(tokens, prefix, length // DOCUMENTS - 1, DOCUMENTS * count)
    order = [number + count * document for number in range(count) for document in range(DOCUMENTS)]
    rows = [order[begin : begin + DOCUMENTS] for begin in range(0, len(order), DOCUMENTS)]
    ids = [torch.cat([documents[number] for number in row]) for row in rows]
    return [torch.cat([row, row[-1:]]) for row in ids]  # the last token has no target


@torch.inference_mode()
def losses(model: Any, arrangement: Arrangement, stride: int = 1) -> Tensor:
    """Return the losses in nats of every `stride`-th counted target, row after row."""
    hidden = model.get_decoder()(input_ids=arrangement.ids, use_cache=False).last_hidden_state
    chosen = (arrangement.targets != IGNORED).flatten().nonzero()[:, 0][stride - 1 :: stride]
    hidden, targets = hidden.flatten(0, 1)[chosen], arrangement.targets.flatten()[chosen]
    head = model.get_output_embeddings()
    chunk = max(1, LOGITS // head.weight.shape[0])
    parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    return torch.cat([F.cross_entropy(head(states), part, reduction="none") for states, part in parts])


class _Subject(NamedTuple):
    """A model with its tokenizer, the tokens of the texts, and the tokens with which every text begins."""

    name: str
    model: Any
    tokenizer: Any
    tokens: Mapping[str, list[int]]
    prefix: list[int]

    @property
    def pad(self) -> int:
        return self.tokenizer.pad_token_id or 0


def _load(name: str) -> _Subject:
    model, tokenizer = weights.load(name)
    tokens = {text: tokenizer(content, add_special_tokens=False).input_ids for text, content in texts().items()}
    return _Subject(name, model, tokenizer, tokens, tokenizer("").input_ids)


def _read(subject: _Subject, use: Bug, length: int, count: int, stride: int) -> dict[str, Any]:
    """Measure the losses in all windows."""
    scenario = SCENARIOS[use.scenario]
    make = packed_windows if use.scenario == "packed" else windows
    arrange = use.arrange or scenario.arrange
    result = list[dict[str, Any]]()
    with use.spoil(subject.model):
        for ids in make(subject.tokens, subject.prefix, length, count):
            found = losses(subject.model, arrange(ids, subject.pad), stride)
            blocks = [round(block.mean().item(), DIGITS) for block in found.split(BLOCK // stride)]
            result.append({"mean": round(found.mean().item(), DIGITS), "blocks": blocks})
    return {"windows": result}


@torch.inference_mode()
def _recall(subject: _Subject, bug: Bug, rows: int, length: int) -> dict[str, Any]:
    """Ask for numbers in a text, and count those that the model would write."""
    tokenizer = Tokenizer.load(Path(subject.model.config._name_or_path) / "tokenizer.json")
    result = {}
    with bug.spoil(subject.model):
        for name, task in TASKS.items():
            found, nats = 0, list[float]()
            for row in ruler.rows(task, tokenizer, length, rows):
                answer = tokenizer.encode(f" {row.answers[0]}").tolist()
                ids = torch.tensor([[*row.ids, *answer]])
                hidden = subject.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
                logits = subject.model.get_output_embeddings()(hidden[0, -len(answer) - 1 : -1])
                found += bool((logits.argmax(-1) == torch.tensor(answer)).all())
                nats.append(F.cross_entropy(logits, torch.tensor(answer)).item())
            result[name] = {"found": found, "asked": len(nats), "nats": round(sum(nats) / len(nats), DIGITS)}
    return result


def _edited(config: Any, edit: Callable[[Any], None] | None) -> Any:
    edited = copy.deepcopy(config)
    if edit is not None:
        edit(edited)
    return edited


def _probed(model: Any, use: Bug) -> list[str]:
    """Return the warnings of `probe` about the rotary module of a model, for each type of layers."""
    config = _edited(model.config, SCENARIOS[use.scenario].config)
    said = list[str]()
    with use.spoil(model):
        for layer_type in [None] if "rope_theta" in config.rope_parameters else [*config.rope_parameters]:
            expected = Rotary.from_config(config, layer_type=layer_type)
            try:
                said += probe(model, layer_type=layer_type, expected=expected).warnings
            except LocantError as error:
                said.append(f"Error: {error.cause}")
    return said


@cache
def _probed_correct(model: Any, scenario: str) -> list[str]:
    return _probed(model, SCENARIOS[scenario].correct)


def _warnings(subject: _Subject, bug: Bug) -> dict[str, list[str]]:
    """Return what the tools that see the place of the bug say of it, by the name of the tool.

    What `probe` says of the correct model, too, is left out.
    """
    model, said = subject.model, dict[str, list[str]]()
    if bug.kernel is not None:
        kernel, options = bug.kernel(model)
        said["probe"] = [*probe(kernel, head_dim=model.config.head_dim, **options).warnings]
    elif bug.batch is None:
        usual = _probed_correct(model, bug.scenario)
        said["probe"] = [each for each in dict.fromkeys(_probed(model, bug)) if each not in usual]
    else:
        said["check-batch"] = [*map(str, check_batch(bug.batch(1024, subject.pad), model=model))]
    if bug.config is not None:
        right, wrong = (_edited(model.config, edit) for edit in (SCENARIOS[bug.scenario].config, bug.config))
        found = compare_configs(wrong, right)
        by_layers = (each for layers in found.layers for each in layers.differences)
        said["explain --against"] = [*dict.fromkeys([*found.differences, *by_layers])]
    return said


class _Measurement(NamedTuple):
    model: str
    key: str
    settings: dict[str, Any]
    of: Callable[[_Subject], dict[str, Any]]


def _readings(model: str, *, length: int | None = None) -> dict[str, Bug]:
    """Return the correct reading of each scenario and the bugs of a model, at a length or for the recall."""
    of_model = {key: bug for key, bug in BUGS.items() if model in bug.models}
    scenarios = dict.fromkeys(bug.scenario for bug in of_model.values())
    readings = {f"{CORRECT} {name}": SCENARIOS[name].correct for name in scenarios} | of_model

    def is_read(reading: Bug) -> bool:
        own = SCENARIOS[reading.scenario].length
        return reading.scenario == "text" if length is None else own == length or (own is None and length != EXTENDED)

    return {key: reading for key, reading in readings.items() if is_read(reading)}


def _measurements() -> Iterator[_Measurement]:
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts().items()}
    for step in PLAN:
        model, settings = step.model, {"texts": digests, **step._asdict()}
        if isinstance(step, Recall):
            for key, bug in _readings(model).items():
                of = partial(_recall, bug=bug, rows=step.rows, length=step.length)
                yield _Measurement(model, f"{model}/recall/{key}", settings, of)
            continue
        settings.pop("only")
        for key, bug in _readings(model, length=step.length).items():
            if not step.only or key in (*step.only, f"{CORRECT} text"):
                of = partial(_read, use=bug, length=step.length, count=step.windows, stride=step.stride)
                yield _Measurement(model, f"{model}/{step.length}/{key}", settings, of)
    for model in dict.fromkeys(step.model for step in PLAN):
        for key, bug in BUGS.items():
            if model in bug.models:
                yield _Measurement(model, f"{model}/warnings/{key}", {}, partial(_warnings, bug=bug))


def run(*, anew: bool = False, folder: Path = RESULTS) -> None:
    """Measure every bug in every model that can have it."""
    models = dict.fromkeys(step.model for step in PLAN)
    record = Record(PART, [*models], anew=anew, folder=folder, summary=summary)
    load = lru_cache(maxsize=1)(_load)  # one model in memory
    for model, key, settings, of in _measurements():
        record.measure(key, settings, lambda model=model, of=of: of(load(model)))
    record.write()


def summary(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each bug costs: by model and length, by position, and in numbers that are found."""
    rows = {}
    for key, bug in BUGS.items():
        losses_by_model = {model: _costs(measured, model, key, bug.scenario) for model in bug.models}
        recall = {model: measured.get(f"{model}/recall/{key}") for model in bug.models}
        said = {model: measured.get(f"{model}/warnings/{key}") for model in bug.models}
        rows[key] = {
            "sentence": bug.sentence, "entries": bug.entries, "source": bug.source, "scenario": bug.scenario,
            "costs": {model: costs for model, costs in losses_by_model.items() if costs},
            "recall": {model: each for model, each in recall.items() if each},
            "warnings": {model: each for model, each in said.items() if each},
        }  # fmt: skip
    correct = {key: value for key, value in measured.items() if f"/{CORRECT} " in key}
    return {
        "correct": {key: _by_position(key, value) if "windows" in value else value for key, value in correct.items()},
        "rows": rows,
    }


def _blocks(value: Mapping[str, Any]) -> list[float]:
    return [block for window in value["windows"] for block in window["blocks"]]


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)


def _costs(measured: Mapping[str, Any], model: str, key: str, scenario: str) -> dict[str, Any]:
    """Return the cost by length: the mean difference from the correct reading, its interval, and by position."""
    costs = {}
    for length in sorted({step.length for step in PLAN if isinstance(step, Losses) and step.model == model}):
        wrong, right = (measured.get(f"{model}/{length}/{each}") for each in (key, f"{CORRECT} {scenario}"))
        if wrong is None or right is None:
            continue
        rises = [a - b for a, b in zip(_blocks(wrong), _blocks(right), strict=True)]
        means = [a["mean"] - b["mean"] for a, b in zip(wrong["windows"], right["windows"], strict=True)]
        interval = interval_of_mean(rises)
        costs[str(length)] = {
            "cost": _mean(means), "interval": interval and [round(each, 4) for each in interval],
        }  # fmt: skip
        if scenario == "text":
            places = [[one - other for one, other in zip(a, b, strict=True)] for a, b in _both(wrong, right)]
            costs[str(length)]["by_position"] = _stretches(places, length)
    return costs


def _both(wrong: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[tuple[list[float], list[float]]]:
    yield from ((a["blocks"], b["blocks"]) for a, b in zip(wrong["windows"], right["windows"], strict=True))


def _by_position(key: str, value: Mapping[str, Any]) -> dict[str, Any]:
    mean = _mean([window["mean"] for window in value["windows"]])
    if "text" not in key:
        return {"loss": mean}
    return {
        "loss": mean,
        "by_position": _stretches([each["blocks"] for each in value["windows"]], int(key.split("/")[1])),
    }


def _stretches(windows_of_blocks: Sequence[Sequence[float]], length: int) -> list[list[float]]:
    """Return the first position, the last position and the mean of the blocks between two of `EDGES`."""
    found = []
    for begin, end in itertools.pairwise(EDGES):
        chosen = [block for blocks in windows_of_blocks for block in blocks[begin // BLOCK : end // BLOCK]]
        if begin < length and chosen:
            found.append([begin, min(end, length), _mean(chosen)])
    return found
