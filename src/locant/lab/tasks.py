"""Generated tasks. They need no text, their rows can have many lengths, and the correct answer is known.

A row consists of a prompt and an answer. Their tokens are small numbers. A model reads the whole row. It is trained and
measured on the tokens of the answer that count. Each of these tokens follows from the tokens before it. A row is
correct if the model predicts each of them as the most probable token. If all tokens of the answer count, greedy
decoding then also gives this answer.

A length is a number of items, such as digits, pairs, symbols or commands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, NamedTuple

from locant.arguments import short_repr, whole
from locant.errors import RangeError, Remedy
from locant.registry import Registry


class Row(NamedTuple):
    """A prompt and the answer that follows it. If `counts` is given, only the marked tokens of the answer count."""

    prompt: list[int]
    answer: list[int]
    counts: list[bool] | None = None


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A source of rows. A subclass defines `vocab_size` and `make`."""

    paper: ClassVar[str] = ""
    """The arXiv number of the paper that the task comes from, or an empty string."""

    digits: ClassVar[Sequence[int]] = ()
    """Tokens that are digits of numbers, for positions that count them (`locant.positions.generalizing.abacus`)."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of different tokens. Tokens are numbers from 0 to ``vocab_size - 1``."""

    @property
    def longest(self) -> int | None:
        """The largest length with enough different symbols, or ``None`` if there is no limit."""
        return None

    @abstractmethod
    def make(self, random: Random, length: int) -> Row:
        """Make a row of `length` items, from 1 to `longest`."""

    def row(self, random: Random, length: int) -> Row:
        """Return a row of `length` items. The same state of `random` gives the same row.

        Raises:
            RangeError: the length is below 1 or above `longest`.

        >>> Sort().row(Random(0), 4)
        Row(prompt=[13, 12, 6, 4, 16], answer=[4, 6, 12, 13], counts=None)
        """
        return self.make(random, whole("length", length, 1, self.longest, remedy=f"length={self.longest or 12}"))

    def numbers_of(self, length: int) -> list[int]:
        """Return how many digits each number of a row such as ``12+34=460`` has, or an empty list for other tasks."""
        return []


@dataclass(frozen=True, kw_only=True)
class Arrangement(Task):
    """Symbols, a mark, and the same symbols in an order that a subclass defines."""

    symbols: int = 16

    @property
    def vocab_size(self) -> int:
        return self.symbols + 1

    def make(self, random: Random, length: int) -> Row:
        items = random.choices(range(self.symbols), k=length)
        return Row([*items, self.symbols], self.arrange(items))

    @abstractmethod
    def arrange(self, items: list[int]) -> list[int]:
        """Return the items in the order of the answer."""


class Copy(Arrangement):
    """Symbols, and the same symbols again."""

    def arrange(self, items: list[int]) -> list[int]:
        return items


class Reverse(Arrangement):
    """Symbols, and the same symbols in reverse order."""

    def arrange(self, items: list[int]) -> list[int]:
        return items[::-1]


class Sort(Arrangement):
    """Numbers, and the same numbers in ascending order."""

    def arrange(self, items: list[int]) -> list[int]:
        return sorted(items)


@dataclass(frozen=True, kw_only=True)
class Addition(Task):
    """Two numbers of `length` digits and their sum, each with the units first.

    With hints, each digit follows a mark. Digits of the same significance have the same mark. The first mark is random
    (Zhou et al. 2024, arXiv 2402.09371).
    """

    paper = "2402.09371"
    digits = range(10)
    hints: int = 0

    @property
    def vocab_size(self) -> int:
        return 12 + self.hints

    @property
    def longest(self) -> int | None:
        return self.hints - 1 if self.hints else None

    def make(self, random: Random, length: int) -> Row:
        first, second = (random.choices(range(10), k=length) for _ in range(2))
        total, carry = [], 0
        for a, b in zip([*first, 0], [*second, 0], strict=True):
            carry, digit = divmod(a + b + carry, 10)
            total.append(digit)
        start = random.randrange(self.hints - length) if self.hints else 0
        numbers = [self._with_hints(digits, start) for digits in (first, second, total)]
        return Row([*numbers[0], 10, *numbers[1], 11], numbers[2])

    def numbers_of(self, length: int) -> list[int]:
        return [] if self.hints else [length, length, length + 1]

    def _with_hints(self, digits: list[int], start: int) -> list[int]:
        if not self.hints:
            return digits
        return [token for place, digit in enumerate(digits, 12 + start) for token in (place, digit)]


@dataclass(frozen=True, kw_only=True)
class Parity(Task):
    """Bits, followed by the parity of the bits up to each bit, as in a scratchpad."""

    @property
    def vocab_size(self) -> int:
        return 3

    def make(self, random: Random, length: int) -> Row:
        bits = random.choices((0, 1), k=length)
        return Row([*bits, 2], [sum(bits[: place + 1]) % 2 for place in range(length)])


@dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """Keys with values, followed by each key in another order, as a question about its value (Arora et al. 2023)."""

    paper = "2312.04927"
    keys: int = 64
    values: int = 16

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values + 1

    @property
    def longest(self) -> int:
        return self.keys

    def make(self, random: Random, length: int) -> Row:
        keys = random.sample(range(self.values, self.values + self.keys), length)
        pairs = [(key, random.randrange(self.values)) for key in keys]
        prompt, answers = [token for pair in pairs for token in pair], random.sample(pairs, length)
        answer = [token for pair in answers for token in pair]
        return Row([*prompt, self.vocab_size - 1], answer, [False, True] * length)


@dataclass(frozen=True, kw_only=True)
class PassKey(Task):
    """Noise of `length` tokens with a mark and a key in it. The key is the answer (Mohtashami & Jaggi 2023)."""

    paper = "2305.16300"
    symbols: int = 16
    size: int = 4

    @property
    def vocab_size(self) -> int:
        return self.symbols + 1

    def make(self, random: Random, length: int) -> Row:
        noise, key = (random.choices(range(self.symbols), k=count) for count in (length, self.size))
        place = random.randint(0, length)
        return Row([*noise[:place], self.symbols, *key, *noise[place:], self.symbols], key)


@dataclass(frozen=True, kw_only=True)
class Indexing(Task):
    """Different symbols, followed by questions about the symbol at some distance to the left or right of a symbol.

    This is the indirect indexing of PoPE (Gopalakrishnan et al. 2025, arXiv 2509.10534).
    """

    paper = "2509.10534"
    symbols: int = 64
    reach: int = 3

    @property
    def vocab_size(self) -> int:
        return self.symbols + 2 * self.reach + 2

    @property
    def longest(self) -> int:
        return self.symbols

    def make(self, random: Random, length: int) -> Row:
        items = random.sample(range(self.symbols), length)
        answer = []
        for place in random.sample(range(length), length):
            target = random.randint(max(0, place - self.reach), min(length - 1, place + self.reach))
            answer += [items[place], self.symbols + self.reach + target - place, items[target]]
        return Row([*items, self.vocab_size - 1], answer, [False, False, True] * length)


@dataclass(frozen=True, kw_only=True)
class FlipFlop(Task):
    """Instructions to write, ignore or read a bit. A read returns the bit that was written last (Liu et al. 2023)."""

    paper = "2306.00946"

    @property
    def vocab_size(self) -> int:
        return 5

    def make(self, random: Random, length: int) -> Row:
        write, ignore, read = 2, 3, 4
        memory = random.randrange(2)
        prompt, answer = [write, memory], []
        for instruction in [*random.choices((write, ignore, read), (0.1, 0.8, 0.1), k=length - 1), read]:
            bit = memory if instruction == read else random.randrange(2)
            memory = bit if instruction == write else memory
            answer += [instruction, bit]
        reads = [place % 2 == 1 and answer[place - 1] == read for place in range(len(answer))]
        return Row(prompt, answer, reads)


@dataclass(frozen=True, kw_only=True)
class Brackets(Task):
    """Brackets of several kinds. The answer closes the brackets that are still open, from the last to the first."""

    kinds: int = 4

    @property
    def vocab_size(self) -> int:
        return 2 * self.kinds + 1

    def make(self, random: Random, length: int) -> Row:
        prompt, unclosed = [], []
        for place in range(length):
            if unclosed and place < length - 1 and random.random() < 0.4:
                prompt.append(self.kinds + unclosed.pop())
            else:
                unclosed.append(random.randrange(self.kinds))
                prompt.append(unclosed[-1])
        return Row([*prompt, 2 * self.kinds], [self.kinds + kind for kind in reversed(unclosed)])


@dataclass(frozen=True, kw_only=True)
class Commands(Task):
    """Commands such as "jump left twice", and their actions: a turn and a jump, twice (after Lake & Baroni 2018)."""

    paper = "1711.00350"
    verbs: int = 4

    @property
    def vocab_size(self) -> int:
        return self.verbs + 8

    def make(self, random: Random, length: int) -> Row:
        none, left, right, once, twice, thrice, then, end = range(self.verbs, self.verbs + 8)
        prompt, answer = [], []
        for _ in range(length):
            verb, turn = random.randrange(self.verbs), random.choice((none, left, right))
            times = random.choice((once, twice, thrice))
            prompt += [verb, turn, times, then]
            answer += ([verb] if turn == none else [turn, verb]) * (times - once + 1)
        return Row([*prompt[:-1], end], answer)


@dataclass(frozen=True, kw_only=True)
class Counting(Task):
    """Two numbers, followed by the `length` numbers from the first to the second. Each number is a token."""

    largest: int = 64

    @property
    def vocab_size(self) -> int:
        return self.largest + 1

    @property
    def longest(self) -> int:
        return self.largest

    def make(self, random: Random, length: int) -> Row:
        first = random.randrange(self.largest - length + 1)
        return Row([first, first + length - 1, self.largest], [*range(first, first + length)])


OWN: dict[str, Task] = {
    "copy": Copy(), "reverse": Reverse(), "sort": Sort(), "addition": Addition(), "addition_hints": Addition(hints=64),
    "parity": Parity(), "mqar": Recall(), "pass_key": PassKey(), "indexing": Indexing(), "flip_flop": FlipFlop(),
    "brackets": Brackets(), "scan": Commands(), "counting": Counting(),
}  # fmt: skip
"""The tasks of this package by name."""


def _check(name: str, value: Task) -> None:
    if not isinstance(value, Task):
        raise RangeError(
            f"got {short_repr(value)} for the task {name}, expected a Task", "pass an object, such as Copy()"
        )
    prompt, answer, counts = value.row(Random(0), 1)
    counted = [True] * len(answer) if counts is None else counts
    if not prompt or not any(counted) or len(counted) != len(answer):
        got = f"got a row without a prompt, or without a token that counts, from the task {name}"
        raise RangeError(got, "return one or more of each")
    if not all(isinstance(token, int) and 0 <= token < value.vocab_size for token in (*prompt, *answer)):
        got = f"got tokens outside of 0 to {value.vocab_size - 1} from the task {name}"
        raise RangeError(got, "use a larger vocab_size")


def _register_own(registry: Registry[Task]) -> None:
    for name, value in OWN.items():
        registry.register(name, value)


TASKS = Registry[Task]("task", "locant.tasks", _check, own=_register_own)
"""All tasks. A package adds a task with an entry point in the group ``locant.tasks`` that refers to its object."""


def task(name: str) -> Task:
    """Return the task with this name. For an unknown name, raise `RangeError` with the nearest name.

    >>> task("counting").row(Random(0), 4)
    Row(prompt=[54, 57, 64], answer=[54, 55, 56, 57], counts=None)
    """
    return TASKS.find(name)


def require_longer(name: str, length: int) -> None:
    """Raise `RangeError` if a task has no rows of `length`, the first measured length beyond the trained length."""
    longest = task(name).longest
    if longest is not None and longest < length:
        got = f"got rows of {length} items to measure for {name}, which has no rows longer than {longest}"
        raise RangeError(got, Remedy(task_length=max(1, longest // 4)))
