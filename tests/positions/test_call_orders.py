"""What an encoding returns depends on its arguments, and not on earlier calls.

The usual ways to get this wrong are a table that grows, a base that follows the longest sequence seen so far, and a
cache whose key lacks one of the arguments. All are right the first time. So one object is asked in many random orders,
and every answer is held against that of an object which was never asked anything.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor

from locant import LocantError, PositionEncoding, Positions, Rotary
from locant.positions import ModelShape, OffsetBias
from locant.positions.registry import encodings
from locant.positions.scaling import DynamicNTK, Llama3, LongRoPE, YaRN

MAX = 12
HEADS, HEAD_DIM = 4, 8
SHAPE = ModelShape(d_model=HEADS * HEAD_DIM, num_heads=HEADS, max_seq_len=MAX)
PAIRS = HEAD_DIM // 2

SCALINGS = {
    "dynamic ntk": DynamicNTK(factor=4.0, original_max_seq_len=MAX),
    "longrope": LongRoPE(
        short_factor=(1.0,) * PAIRS, long_factor=(1.0, 2.0, 4.0, 8.0), original_max_seq_len=MAX, factor=4.0
    ),
    "yarn": YaRN(factor=4.0, original_max_seq_len=MAX),
    "llama3": Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=MAX),
}


def _seeded(build: Callable[[], PositionEncoding]) -> Callable[[], PositionEncoding]:
    """Parameters that differ from zero, the same for every object."""

    def seeded() -> PositionEncoding:
        encoding = build()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in encoding.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
        return encoding

    return seeded


BUILDS: dict[str, Callable[[], PositionEncoding]] = {
    **{name: _seeded(lambda kind=kind: kind.for_model(SHAPE)) for name, kind in encodings().items()},
    "rotary float32 interleaved": partial(Rotary, HEAD_DIM, angles="float32", layout="interleaved"),
    **{f"rotary {name}": partial(Rotary, HEAD_DIM, scaling=scaling) for name, scaling in SCALINGS.items()},
    "rotary float32 dynamic ntk": partial(Rotary, HEAD_DIM, scaling=SCALINGS["dynamic ntk"], angles="float32"),
    "rotary float32 longrope": partial(Rotary, HEAD_DIM, scaling=SCALINGS["longrope"], angles="float32"),
}

Method = Literal["embed", "rotate", "bias", "score_mod"]
Answer = tuple[Tensor, ...] | str


@dataclass(frozen=True)
class Call:
    """One question: a method, how many tokens, where they stand, and the length that a rotary is made for."""

    method: Method
    length: int
    where: Literal["from 0", "behind a cache", "padded"]
    dtype: torch.dtype
    for_length: int | None = None

    def __call__(self, encoding: PositionEncoding) -> Answer:
        """What comes out, or the message of the error."""
        if self.for_length is not None and isinstance(encoding, Rotary):
            encoding = encoding.for_length(self.for_length)
        try:
            return self._through(encoding)
        except LocantError as error:
            return str(error)

    def _through(self, encoding: PositionEncoding) -> Answer:
        positions, keys = self._positions()
        q, k = (_tokens(where, self.dtype) for where in (positions, keys))
        past = Positions.arange(positions.start) if self.where == "behind a cache" and positions.start else None
        if past is not None:
            past = encoding.read(_hidden(_tokens(past, self.dtype)), past)
        positions, keys = encoding.read(_hidden(q), positions, past), encoding.read(_hidden(k), keys)
        if self.method == "embed":
            return (encoding.embed(_hidden(q), positions),)
        if self.method == "rotate":
            return encoding.rotate(q, k, positions, keys)
        if self.method == "bias":
            bias = encoding.bias(q, k, positions, keys)
            return () if bias is None else (bias,)
        return _spelt_out(encoding, q, k, positions, keys)

    def _positions(self) -> tuple[Positions, Positions]:
        if self.where == "behind a cache":
            return Positions.after(max(self.length - 1, 0), min(self.length, 1)), Positions.arange(self.length)
        if self.where == "padded":
            mask = torch.ones(1, self.length, dtype=torch.long)
            mask[:, : self.length // 3] = 0
            return Positions.from_mask(mask), Positions.from_mask(mask)
        return Positions.arange(self.length), Positions.arange(self.length)


DTYPES = (torch.float32, torch.bfloat16, torch.float64)
TOKENS = torch.randn(1, HEADS, 2 * MAX, HEAD_DIM, generator=torch.Generator().manual_seed(1))
OF_DTYPE = {dtype: TOKENS.to(dtype, copy=True) for dtype in DTYPES}


def _tokens(positions: Positions, dtype: torch.dtype) -> Tensor:
    """The same tokens for the same slots, whatever the length."""
    return OF_DTYPE[dtype][:, :, : positions.seq_len]


def _hidden(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _spelt_out(encoding: PositionEncoding, q: Tensor, k: Tensor, positions: Positions, keys: Positions) -> Answer:
    score_mod = encoding.score_mod(q, k, positions, keys)
    if score_mod is None:
        return ()
    head = torch.arange(HEADS)[:, None, None]
    query, key = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    scores = torch.zeros(HEADS, q.shape[2], k.shape[2])
    return (score_mod(scores, torch.zeros((), dtype=torch.long), head, query, key),)


def _drawn(rng: random.Random, encoding: PositionEncoding) -> Call:
    methods = [method for method in ("embed", "rotate", "bias") if method in encoding.methods()]
    methods += ["score_mod"] if "bias" in methods else []
    return Call(
        method=rng.choice(methods or ["embed", "rotate", "bias", "score_mod"]),  # type: ignore[arg-type]
        length=rng.choice([0, 1, MAX - 1, MAX, MAX + 1, 2 * MAX, rng.randint(0, 2 * MAX)]),
        where=rng.choice(["from 0", "behind a cache", "padded"]),  # type: ignore[arg-type]
        dtype=rng.choice(DTYPES),
        for_length=rng.choice([None, None, None, 1, MAX + 1, 2 * MAX]) if isinstance(encoding, Rotary) else None,
    )


def same(one: Answer, other: Answer) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


@torch.no_grad()
def answers_depend_on_arguments_only(build: Callable[[], PositionEncoding], pool: int) -> list[Answer]:
    """Raise where they do not, or where a call writes into an earlier answer or the tokens.

    Returns the answers of fresh objects.
    """
    rng = random.Random(0)
    shared = build()
    calls = [_drawn(rng, shared) for _ in range(pool)]
    fresh = [call(build()) for call in calls]
    given: list[tuple[Answer, Answer]] = []
    before: list[Call] = []
    for number in rng.sample([*range(pool)] * 2, 2 * pool):
        answer = calls[number](shared)
        assert same(answer, fresh[number]), f"another answer to {calls[number]} after {before[-3:]}"
        given.append((answer, fresh[number]))
        before.append(calls[number])
    assert all(same(answer, right) for answer, right in given), "answers already given were overwritten"
    for dtype, tokens in OF_DTYPE.items():
        assert torch.equal(tokens, TOKENS.to(dtype)), f"the tokens in {dtype} were overwritten"
    return fresh


@pytest.mark.parametrize("pool", [22, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BUILDS)
def test_any_order_of_calls_gives_the_answers_of_fresh_objects(name: str, pool: int) -> None:
    refused = [answer for answer in answers_depend_on_arguments_only(BUILDS[name], pool) if isinstance(answer, str)]
    ends = name in ("learned", "learned_grid", "convolutional") or isinstance(BUILDS[name](), OffsetBias)
    limited = ends or name.endswith(("dynamic ntk", "longrope"))
    assert bool(refused) == limited, "past the end, and only there, the answer is an error"
    assert all("; try: " in message for message in refused)


@pytest.mark.parametrize("name", ["dynamic ntk", "longrope"])
def test_a_copy_for_a_length_leaves_the_original_alone(name: str) -> None:
    """And two copies for one length are one another, however they were come by."""
    rotary = Rotary(HEAD_DIM, scaling=SCALINGS[name])
    where = Positions.arange(MAX)
    before = rotary.cos_sin(where)
    far, near = rotary.for_length(2 * MAX), rotary.for_length(4 * MAX).for_length(MAX)
    assert not torch.equal(far.cos_sin(where)[0], before[0])
    assert same(near.cos_sin(where), before)
    assert same(rotary.cos_sin(where), before)
    assert same(near.for_length(2 * MAX).cos_sin(where), far.cos_sin(where))
    assert rotary.seq_len is None
