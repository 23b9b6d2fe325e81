"""What does a cached chunk lose at another place? Losses and answers after a chunk whose keys were moved.

A chunk of documentation with secret numbers is read alone, as a library of prompts would cache it. It is then used
after the text that precedes it in the documentation, so its keys belong to other positions. Three ways are compared:
the keys are moved by `move_cache`, they are left as they are, or the whole text is read anew. A fourth leaves out the
chunk, and shows what the chunk is worth. Moving repairs the positions of the keys. It cannot repair that the layers
above the first have not seen the text before the chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.real_models.cost_of_bugs import texts
from benchmarks.real_models.reach import DIGITS, Subject, load, make_row, read, text_digests
from benchmarks.real_models.record import RESULTS, Record
from benchmarks.real_models.second_calculation import log_losses
from locant import move_cache
from locant.lab.evaluation import interval_of_mean
from locant.swapping.forward_arguments import cache_argument, cache_in
from locant.text.tokenizer import Tokenizer

__all__ = ["PLAN", "WAYS", "Plan", "drift", "exactly_moved", "run", "summary"]

PART = "kv_reuse"
WAYS = ("anew", "moved", "not moved", "without the chunk")


class Plan(NamedTuple):
    """What is measured.

    Args:
        chunk: the number of tokens in a chunk and its questions.
        continuation: the number of tokens of text after a chunk, before the questions.
        moves: the numbers of positions by which a chunk moves, which are the numbers of tokens before it.
        texts: the number of chunks.
        numbers: the number of secret numbers in a chunk.
        steps: the moves whose rounding is measured, one after the other.
        checked: the chunks that are calculated a second time, with each move.
    """

    model: str = "smollm2"
    chunk: int = 768
    continuation: int = 128
    moves: tuple[int, ...] = (0, 16, 256, 2048)
    texts: int = 8
    numbers: int = 4
    steps: tuple[int, ...] = (16, 2048, -256, 2048, 16, -2048, 256, 2048, -16, 256)
    checked: int = 1


PLAN = Plan()


class Chunk(NamedTuple):
    """The tokens before a chunk, the chunk, and the tokens after it: the text goes on, and the questions follow.

    Args:
        answers: the start and stop of each answer in `after`.
        continuation: the number of tokens of the text in `after`.
    """

    before: Tensor
    chunk: Tensor
    after: Tensor
    answers: list[tuple[int, int]]
    continuation: int


def chunk_of(subject: Subject, number: int, move: int, plan: Plan) -> Chunk:
    """Return a chunk that does not depend on `move`, after the `move` tokens of the text that precede it."""
    longest, tokenizer = max(plan.moves), subject.tokenizer
    begin = number * (longest + plan.chunk)
    tokens = _documentation(tokenizer)[begin : begin + longest + 2 * plan.chunk]
    text = tokenizer.decode(tokens[longest:].tolist())
    row = make_row(tokenizer, text, plan.chunk, plan.numbers, plan.continuation, seed=number)
    questions = int(row.counted.nonzero()[-1]) + 2  # the targets begin with the second token
    end = questions - plan.continuation
    answers = [(start - end, stop - end) for _, start, stop in row.answers]
    before = torch.from_numpy(tokens[longest - move : longest].astype(np.int64))
    return Chunk(before, row.ids[:end], row.ids[end:], answers, plan.continuation)


@cache
def _documentation(tokenizer: Tokenizer) -> np.ndarray:
    return tokenizer.encode(texts()["documentation"])


@torch.inference_mode()
def cache_of(model: Any, ids: Tensor, first: int = 0) -> Any:
    """Return the cache of a text that is read alone, with its first token at position `first`."""
    positions = torch.arange(first, first + len(ids))[None]
    output = model.get_decoder()(input_ids=ids[None], position_ids=positions, use_cache=True)
    return cache_in(output)


def join(*caches: Any) -> DynamicCache:
    """Return a cache with the keys and values of all of them, one after the other."""
    joined = DynamicCache()
    for number in range(len(caches[0].layers)):
        layers = [cache.layers[number] for cache in caches]
        keys, values = (torch.cat([getattr(layer, name) for layer in layers], 2) for name in ("keys", "values"))
        joined.update(keys, values, number)
    return joined


def _facts(chunk: Chunk, nats: Tensor | np.ndarray, hits: Tensor | None = None) -> dict[str, Any]:
    """Return the loss of the text after the chunk, and the answers. The first token after it is left out."""
    nats = torch.as_tensor(nats)
    spans = [slice(start - 1, stop - 1) for start, stop in chunk.answers]
    facts: dict[str, Any] = {
        "loss": round(nats[: chunk.continuation - 1].mean().item(), DIGITS),
        "nats": [round(nats[span].sum().item(), 3) for span in spans],
    }
    return facts if hits is None else {**facts, "found": [bool(hits[span].all()) for span in spans]}


@torch.inference_mode()
def _use(subject: Subject, number: int, move: int, plan: Plan) -> dict[str, Any]:
    model: Any = subject.model.module
    chunk = chunk_of(subject, number, move, plan)
    whole = torch.cat([chunk.before, chunk.chunk, chunk.after])
    last = len(chunk.after) - 1
    found = {"anew": _facts(chunk, *(each[-last:] for each in read(model, whole)))}
    before = [cache_of(model, chunk.before)] if move else []
    cached = cache_of(model, chunk.chunk)
    positions = torch.arange(len(whole) - len(chunk.after), len(whole))[None]
    for way in ("not moved", "moved", "without the chunk"):
        if way == "moved":
            move_cache(cached, model, by=move)  # in place, after its keys were copied for the way before
        parts = before if way == "without the chunk" else [*before, cached]
        call = {str(cache_argument(model)): join(*parts)} if parts else {}
        found[way] = _facts(chunk, *read(model, chunk.after, position_ids=positions, **call))
    return found


# ---------------------------------------------------------------------- drift


def exactly_moved(keys: np.ndarray, by: int, base: float) -> np.ndarray:
    """Return keys with halves as pairs, rotated by this number of positions in float64, with NumPy."""
    first, second = np.split(keys.astype(np.float64), 2, -1)
    angles = by * base ** (-2 * np.arange(first.shape[-1]) / keys.shape[-1])
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def drift(
    keys: Sequence[Tensor], move: Callable[[list[Tensor], int], object], steps: Sequence[int], base: float
) -> list[float]:
    """Return the relative error of keys after each move, against one exact rotation of the first keys.

    Args:
        keys: the keys of each layer.
        move: moves keys in place.
    """
    moved, total, errors = [each.clone() for each in keys], 0, list[float]()
    for step in steps:
        move(moved, step)
        total += step
        squares = np.zeros(2)
        for before, after in zip(keys, moved, strict=True):
            expected = exactly_moved(before.double().numpy(), total, base)
            squares += [np.square(after.double().numpy() - expected).sum(), np.square(expected).sum()]
        errors.append(float(f"{math.sqrt(squares[0] / squares[1]):.3g}"))
    return errors


def _drift(subject: Subject, plan: Plan) -> dict[str, Any]:
    model: Any = subject.model.module
    cached = cache_of(model, chunk_of(subject, 0, 0, plan).chunk)

    def move(keys: list[Tensor], by: int) -> None:
        cache: Any = DynamicCache()
        for number, each in enumerate(keys):
            cache.update(each, each, number)
        move_cache(cache, model, by=by)
        for each, layer in zip(keys, cache.layers, strict=True):
            each.copy_(layer.keys)

    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        keys = [layer.keys.to(dtype) for layer in cached.layers]
        base = model.config.rope_parameters["rope_theta"]
        found[str(dtype).removeprefix("torch.")] = {
            "by_moves": drift(keys, move, plan.steps, base),
            "one_move": drift(keys, move, [sum(plan.steps)], base)[0],
        }
    return found


@torch.inference_mode()
def _check(subject: Subject, number: int, move: int, plan: Plan) -> dict[str, Any]:
    """Calculate with `transformers` alone. Moved keys are those of a chunk that is read at its place, but alone."""
    model: Any = subject.model.module
    chunk = chunk_of(subject, number, move, plan)
    whole = torch.cat([chunk.before, chunk.chunk, chunk.after])
    losses = log_losses(model(whole[None], use_cache=False).logits[0], whole)
    found = {"anew": _facts(chunk, losses[-len(chunk.after) + 1 :])}
    at_place = cache_of(model, chunk.chunk, first=move)
    cache = join(cache_of(model, chunk.before), at_place) if move else at_place
    positions = torch.arange(len(whole) - len(chunk.after), len(whole))[None]
    call = {str(cache_argument(model)): cache}
    logits = model(chunk.after[None], position_ids=positions, **call).logits[0]
    return {**found, "moved": _facts(chunk, log_losses(logits, chunk.after))}


# ---------------------------------------------------------------------- the measurements


def _measurements(plan: Plan) -> Iterator[tuple[str, Callable[[Subject], Any]]]:
    yield "drift", partial(_drift, plan=plan)
    for number, move in itertools.product(range(plan.texts), plan.moves):
        yield f"{move}/{number}", partial(_use, number=number, move=move, plan=plan)
    for number, move in itertools.product(range(plan.checked), plan.moves):
        yield f"check/{move}/{number}", partial(_check, number=number, move=move, plan=plan)


def run(*, anew: bool = False, folder: Any = RESULTS, plan: Plan = PLAN, subject: Subject | None = None) -> None:
    """Measure everything in the plan that is not recorded yet."""
    record = Record(PART, [plan.model], anew=anew, folder=folder, summary=partial(summary, plan=plan))
    settings = {
        "texts": text_digests(), "chunk": plan.chunk, "continuation": plan.continuation, "numbers": plan.numbers,
        "longest": max(plan.moves),
    }  # fmt: skip
    read_subject = lru_cache(maxsize=1)(lambda: load(plan.model) if subject is None else subject)
    for key, of in _measurements(plan):
        wanted = {**settings, "steps": plan.steps} if key == "drift" else settings
        record.measure(key, wanted, lambda of=of: of(read_subject()))
    record.write()


def summary(measured: Mapping[str, Any], plan: Plan = PLAN) -> dict[str, Any]:
    """Return the drift, and for each move and way the loss, its difference from reading anew, and the numbers found."""
    moves = {}
    for move in plan.moves:
        values = [measured[key] for number in range(plan.texts) if (key := f"{move}/{number}") in measured]
        if values:
            moves[str(move)] = {way: _mean_of_way(values, way) for way in WAYS}
    checks = {}
    for move, number in itertools.product(plan.moves, range(plan.checked)):
        second, first = measured.get(f"check/{move}/{number}"), measured.get(f"{move}/{number}")
        if first and second:
            checks[f"{move}/{number}"] = {
                way: {"first": first[way]["loss"], "second": second[way]["loss"]} for way in second
            }
    return {
        "model": plan.model, "chunk": plan.chunk, "texts": plan.texts, "drift": measured.get("drift", {}),
        "steps": plan.steps, "moves": moves, "checks": checks,
    }  # fmt: skip


def _mean_of_way(values: Sequence[Mapping[str, Any]], way: str) -> dict[str, Any]:
    losses = [value[way]["loss"] for value in values]
    rises = [value[way]["loss"] - value["anew"]["loss"] for value in values]
    found = [each for value in values for each in value[way]["found"]]
    nats = [each for value in values for each in value[way]["nats"]]
    interval = interval_of_mean(rises)
    return {
        "loss": round(float(np.mean(losses)), 4), "rise": round(float(np.mean(rises)), 4),
        "interval": interval and [round(each, 4) for each in interval],
        "found": sum(found), "asked": len(found), "nats": round(float(np.mean(nats)), 3),
    }  # fmt: skip
