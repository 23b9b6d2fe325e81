"""Recall of a number that stands somewhere in a row: a pass key among filler, and the value of one of many keys.

The first is an easy question, since nothing else in the row looks like it (Mohtashami & Jaggi 2023, arXiv 2305.16300);
in the second everything does (Liu et al. 2023, arXiv 2307.03172). A number counts as recalled if each of its tokens is
the model's first choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from locant.lab.language_model import Head
from locant.text.tokenizer import Tokenizer

__all__ = ["DEPTHS", "TASKS", "recalled"]

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
QUESTION = "What is the pass key? The pass key is"
NUMBERS = 10_000, 100_000

Row = tuple[Tensor, int]
"""Token ids that end with the answer, and of how many tokens that is."""

Hide = Callable[[Tokenizer, int, float, int], Row | None]
"""A row of so many tokens for a depth and a seed; ``None`` where the question does not fit, or has no tokens."""


def pass_key(tokenizer: Tokenizer, length: int, depth: float, seed: int) -> Row | None:
    """A number in a text that repeats itself, asked for at the end."""
    key = int(np.random.default_rng((length, int(100 * depth), seed)).integers(*NUMBERS))
    needle = _encoded(tokenizer, f"The pass key is {key}. Remember it. {key} is the pass key. ")
    question, answer = _encoded(tokenizer, QUESTION), _encoded(tokenizer, f" {key}")
    sentence = _encoded(tokenizer, FILLER)
    room = length - len(needle) - len(question) - len(answer)
    if room < 0 or not answer or not sentence:
        return None
    filler = (sentence * (room // len(sentence) + 1))[:room]
    before = int(depth * room)
    return torch.tensor([*filler[:before], *needle, *filler[before:], *question, *answer]), len(answer)


def key_value(tokenizer: Tokenizer, length: int, depth: float, seed: int) -> Row | None:
    """Keys with values and nothing else, and one of them asked for at the end; the first may be cut."""
    draw = np.random.default_rng((length, int(100 * depth), seed))
    values = draw.integers(*NUMBERS, NUMBERS[1] - NUMBERS[0])
    pairs = iter(zip(draw.permutation(np.arange(*NUMBERS)).tolist(), values.tolist(), strict=True))
    key, value = next(pairs)
    needle = _encoded(tokenizer, f"Key {key} has value {value}. ")
    question, answer = _encoded(tokenizer, f"Key {key} has value"), _encoded(tokenizer, f" {value}")
    room = length - len(needle) - len(question) - len(answer)
    if room < 0 or not answer:
        return None
    behind, before = room - int(depth * room), []
    after: list[int] = []
    for other, its in pairs:
        line = _encoded(tokenizer, f"Key {other} has value {its}. ")
        if not before and len(after) + len(line) <= behind:
            after += line
        elif len(before) + len(after) < room:
            before += line
        else:
            break
    cut = len(before) + len(after) - room
    return torch.tensor([*before[cut:], *needle, *after, *question, *answer]), len(answer)


TASKS: Mapping[str, Hide] = {"pass_keys": pass_key, "key_values": key_value}
"""By the names that they have in `results.json`."""


@torch.no_grad()
def recalled(
    model: Any, tokenizer: Tokenizer, hide: Hide, lengths: Sequence[int], count: int, step: Callable[[], None]
) -> list[dict[str, Any]]:
    """How many of `count` numbers are recalled at each depth of each length."""
    head, found = Head(model), list[dict[str, Any]]()
    for length in lengths if count else ():
        for depth in DEPTHS:
            rows = [hide(tokenizer, length, depth, seed) for seed in range(count)]
            fit = [row for row in rows if row is not None]
            right = sum(
                torch.equal(head.of_last(ids[None, :-1], answer)[0].argmax(-1).cpu(), ids[-answer:])
                for ids, answer in fit
            )
            found += [{"length": length, "depth": depth, "recalled": right, "asked": len(fit)}]
            step()
    return found


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*map(int, tokenizer.encode(text))]
