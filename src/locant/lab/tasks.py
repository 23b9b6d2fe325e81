"""Tasks whose rows are generated: what is right is known, of any length, and needs no text.

A row is a prompt and an answer, made of small numbers. A model reads both, and is trained and measured on the tokens of
the answer that count: those that follow from what stands before them. A row is right where each of these is the most
probable token: where all of an answer count, the model writes it by itself.

Lengths are numbers of items: digits, pairs, symbols, commands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, NamedTuple

from locant.arguments import shown, whole
from locant.errors import RangeError, Remedy
from locant.registry import Registry


class Row(NamedTuple):
    """One example: `answer` follows `prompt`; where `counts` is given, only those tokens of the answer count."""

    prompt: list[int]
    answer: list[int]
    counts: list[bool] | None = None


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A source of rows; a subclass says how many tokens there are, and makes a row."""

    paper: ClassVar[str] = ""
    """Its number at arXiv, where the task comes from one."""

    digits: ClassVar[Sequence[int]] = ()
    """Tokens that are digits of numbers, for positions that count them (`locant.positions.generalizing.abacus`)."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens are the numbers below it."""

    @property
    def longest(self) -> int | None:
        """The largest length that there are different symbols for; ``None``: any."""
        return None

    @abstractmethod
    def make(self, random: Random, length: int) -> Row:
        """A row of `length` items, from 1 to `longest`."""

    def row(self, random: Random, length: int) -> Row:
        """A row of `length` items; the same random numbers make the same row.

        Raises:
            RangeError: a length below 1 or above `longest`.

        >>> Sort().row(Random(0), 4)
        Row(prompt=[13, 12, 6, 4, 16], answer=[4, 6, 12, 13], counts=None)
        """
        return self.make(random, whole("length", length, 1, self.longest, remedy=f"length={self.longest or 12}"))

    def numbers_of(self, length: int) -> list[int]:
        """How many digits each number of a row has, where a row is ``653+49=207``; else empty."""
        return []


@dataclass(frozen=True, kw_only=True)
class Arrangement(Task):
    """Symbols, a mark, and the same symbols in an order that a subclass gives them."""

    symbols: int = 16

    @property
    def vocab_size(self) -> int:
        return self.symbols + 1

    def make(self, random: Random, length: int) -> Row:
        items = random.choices(range(self.symbols), k=length)
        return Row([*items, self.symbols], self.arranged(items))

    @abstractmethod
    def arranged(self, items: list[int]) -> list[int]:
        """The answer."""


class Copy(Arrangement):
    """Symbols, and the same again."""

    def arranged(self, items: list[int]) -> list[int]:
        return items


class Reverse(Arrangement):
    """Symbols, and the same from the last to the first."""

    def arranged(self, items: list[int]) -> list[int]:
        return items[::-1]


class Sort(Arrangement):
    """Numbers, and the same from small to large."""

    def arranged(self, items: list[int]) -> list[int]:
        return sorted(items)


@dataclass(frozen=True, kw_only=True)
class Addition(Task):
    """Two numbers of `length` digits and their sum, all with their units first.

    With hints, a mark stands before each digit, the same for those of one significance; the first mark is drawn
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
        numbers = [self._marked(digits, start) for digits in (first, second, total)]
        return Row([*numbers[0], 10, *numbers[1], 11], numbers[2])

    def numbers_of(self, length: int) -> list[int]:
        return [] if self.hints else [length, length, length + 1]

    def _marked(self, digits: list[int], start: int) -> list[int]:
        if not self.hints:
            return digits
        return [token for place, digit in enumerate(digits, 12 + start) for token in (place, digit)]


@dataclass(frozen=True, kw_only=True)
class Parity(Task):
    """Bits, and after each whether an odd number of ones has been read: the scratchpad of a parity."""

    @property
    def vocab_size(self) -> int:
        return 3

    def make(self, random: Random, length: int) -> Row:
        bits = random.choices((0, 1), k=length)
        return Row([*bits, 2], [sum(bits[: place + 1]) % 2 for place in range(length)])


@dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """Keys with values, then each key again, in another order: its value is asked (Arora et al. 2023)."""

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
        told, asked = [token for pair in pairs for token in pair], random.sample(pairs, length)
        return Row([*told, self.vocab_size - 1], [token for pair in asked for token in pair], [False, True] * length)


@dataclass(frozen=True, kw_only=True)
class PassKey(Task):
    """Noise of `length` tokens, somewhere in it a mark and a key, which is asked for (Mohtashami & Jaggi 2023)."""

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
    """Different symbols; then symbols and how far from them, to the left or the right: which stands there is asked.

    The indirect indexing of PoPE (Gopalakrishnan et al. 2025, arXiv 2509.10534).
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
    """Instructions to write, ignore or read a bit; what is read is what was last written (Liu et al. 2023)."""

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
    """Brackets of several kinds, some still open; the answer closes them, from the last to the first."""

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
    """Commands such as "jump left twice", and what is done: a turn and a jump, twice (after Lake & Baroni 2018)."""

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
    """Two numbers, and all from the first to the second, `length` of them; numbers are tokens."""

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
"""This package's tasks by name."""


def _check(name: str, value: Task) -> None:
    if not isinstance(value, Task):
        raise RangeError(f"got {shown(value)} for the task {name}, expected a Task", "an object, such as Copy()")
    prompt, answer, counts = value.row(Random(0), 1)
    counted = [True] * len(answer) if counts is None else counts
    if not prompt or not any(counted) or len(counted) != len(answer):
        got = f"got a row without a prompt, or without a token that counts, from the task {name}"
        raise RangeError(got, "one or more of each")
    if not all(isinstance(token, int) and 0 <= token < value.vocab_size for token in (*prompt, *answer)):
        got = f"got tokens outside of 0 to {value.vocab_size - 1} from the task {name}"
        raise RangeError(got, "a larger vocab_size")


def _own(registry: Registry[Task]) -> None:
    for name, value in OWN.items():
        registry.register(name, value)


TASKS = Registry[Task]("task", "locant.tasks", _check, own=_own)
"""All tasks; a package offers its own by an entry point of the group ``locant.tasks``: a name, and an object."""


def task(name: str) -> Task:
    """The task of a name; a `RangeError` with the nearest one for an unknown name.

    >>> task("counting").row(Random(0), 4)
    Row(prompt=[54, 57, 64], answer=[54, 55, 56, 57], counts=None)
    """
    return TASKS.find(name)


def require_longer(name: str, length: int) -> None:
    """A `RangeError` unless a task has rows as long, the first that are measured beyond the trained length."""
    longest = task(name).longest
    if longest is not None and longest < length:
        got = f"got rows of {length} items of {name} to measure, which has none longer than {longest}"
        raise RangeError(got, Remedy(task_length=max(1, longest // 4)))
