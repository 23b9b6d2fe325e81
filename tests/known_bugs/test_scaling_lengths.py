"""Entries about scalings that depend on how long a sequence is: which length that is, and what a cache remembers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from locant import KVCache, Positions, Rotary
from locant.positions.scaling import DynamicNTK, LongRoPE, Scaling
from tests.known_bugs.exhibit import exhibit
from tests.known_bugs.oracle import dynamic, plain, rotated
from tests.known_bugs.subjects import WIDTH
from tests.tolerances import DOUBLE

ORIGINAL, TOTAL = 8, 21
PAIRS = WIDTH // 2
SHORT, LONG = tuple(1 + 0.01 * i for i in range(PAIRS)), tuple(1 + 0.5 * i for i in range(PAIRS))
DYNAMIC = DynamicNTK(factor=3.0, original_max_seq_len=ORIGINAL)
LONGROPE = LongRoPE(
    short_factor=SHORT, long_factor=LONG, original_max_seq_len=ORIGINAL, factor=4.0, attention_factor=1.0
)
KEYS = torch.randn(1, 2, TOTAL, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(38))


def frequencies(scaling: Scaling, seq_len: int) -> Tensor:
    """The ones that hold for a sequence of this length in all."""
    if isinstance(scaling, DynamicNTK):
        return dynamic(WIDTH, 10_000.0, scaling.factor, ORIGINAL, seq_len)
    return plain(WIDTH, 10_000.0) / torch.tensor(LONG if seq_len > ORIGINAL else SHORT, dtype=torch.float64)


def off(keys: Tensor, scaling: Scaling, seq_len: int) -> float:
    truth = rotated(KEYS[:, :, :seq_len], range(seq_len), frequencies(scaling, seq_len))
    assert keys.shape == truth.shape
    return float((keys - truth).abs().max())


def rotate(rotary: Rotary, x: Tensor, positions: Positions) -> Tensor:
    return rotary.rotate(x, x, positions)[1]


Decode = Callable[[Scaling], list[Tensor]]


def with_the_last_length(scaling: Scaling) -> list[Tensor]:
    """The length of all is known before the first token."""
    rotary, cache = Rotary(WIDTH, scaling=scaling).for_length(TOTAL), KVCache()
    for step in range(TOTAL):
        positions = Positions.after(step, 1)
        keys, _, _ = cache.append(rotate(rotary, KEYS[:, :, step : step + 1], positions), KEYS[:, :, :1], positions)
    return [keys]


def moving_what_is_cached(scaling: Scaling) -> list[Tensor]:
    """The length is not known: at every step all keys are moved to the new one."""
    rotary = Rotary(WIDTH, scaling=scaling)
    keys, found = KEYS[:, :, :0], []
    for step in range(TOTAL):
        keys = rotary.rerotate(keys, Positions.arange(step), max(step, 1), step + 1)
        last = rotate(rotary.for_length(step + 1), KEYS[:, :, step : step + 1], Positions.after(step, 1))
        keys = torch.cat([keys, last], dim=2)
        found.append(keys)
    return found


def keeping_what_is_cached(scaling: Scaling) -> list[Tensor]:
    """The twin: every key stays as it was rotated at its own step."""
    rotary = Rotary(WIDTH, scaling=scaling)
    steps = [
        rotate(rotary.for_length(step + 1), KEYS[:, :, step : step + 1], Positions.after(step, 1))
        for step in range(TOTAL)
    ]
    return [torch.cat(steps[: step + 1], dim=2) for step in range(TOTAL)]


def cached_keys_are_those_of_one_call(scaling: Scaling) -> Callable[[Decode], None]:
    def check(decode: Decode) -> None:
        for keys in decode(scaling):
            error = off(keys, scaling, keys.shape[2])
            assert error <= DOUBLE, f"after {keys.shape[2]} tokens, cached keys are off by {error:.2g}"

    return check


def test_38_keys_in_a_cache_follow_a_base_that_changes() -> None:
    """Cached keys keep old frequencies under dynamic NTK.

    huggingface/transformers#25104, QwenLM/Qwen#401: With dynamic NTK scaling the base follows from the length of the
    sequence, which grows with every token. Keys in the cache had been rotated with the bases of earlier steps, so no
    query meets them at the right distance.

    Check: Compare the logits of token 5,000 with a cache and without one.

    Test: keys decoded one by one, with the final length given first and with `rerotate` at every step. A rotary that
    was told a smaller length refuses: `tests/positions/encodings/test_rotary.py`.
    """
    follows(DYNAMIC)


def test_46_a_cache_crosses_the_switch_of_longrope() -> None:
    """Cached keys keep short factors past LongRoPE's switch.

    huggingface/transformers#33129: Phi-3 wrote garbage from token 4,097 on. The factors of its frequencies change there
    from short to long, and the keys in the cache had the short ones.

    Check: Generate across token 4,096 with a cache and without one, and compare the tokens.

    Test: as 38, across LongRoPE's switch.
    """
    follows(LONGROPE)


def follows(scaling: Scaling) -> None:
    because = f"after {ORIGINAL + 1} tokens, cached keys are off by"
    ours = with_the_last_length, moving_what_is_cached
    exhibit(cached_keys_are_those_of_one_call(scaling), *ours, twin=keeping_what_is_cached, because=because)


LENGTHS = [5, 30, 5, ORIGINAL, 9, ORIGINAL, 5]

Table = Callable[[int], Tensor]


class Remembers:
    """The twin: frequencies are kept in the object, and computed anew where a sequence is longer than any before."""

    def __init__(self, scaling: Scaling) -> None:
        self.scaling, self.longest = scaling, 0

    def __call__(self, seq_len: int) -> Tensor:
        self.longest = max(self.longest, seq_len)
        return table(self.scaling, self.longest, seq_len)


def table(scaling: Scaling, told: int, seq_len: int) -> Tensor:
    rotary = Rotary(WIDTH, scaling=scaling).for_length(told)
    return torch.cat(rotary.cos_sin(Positions.arange(seq_len)))


@pytest.mark.parametrize("scaling", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_39_a_long_prompt_changes_nothing_later(scaling: Scaling) -> None:
    """One long prompt changes all later answers.

    huggingface/transformers#25306 and #27227: After one long prompt, the answers to all short prompts changed. The base
    was scaled for the long prompt and never set back.

    Check: Run a short prompt, a long one and the short one again: both answers must be equal.

    Test: seven lengths in turn for both scalings that depend on it; every encoding in
    `tests/positions/test_call_orders.py`.
    """
    rotary = Rotary(WIDTH, scaling=scaling)

    def ours(seq_len: int) -> Tensor:
        return torch.cat(rotary.for_length(seq_len).cos_sin(Positions.arange(seq_len)))

    def check(call: Table) -> None:
        first: dict[int, Tensor] = {}
        for seq_len in LENGTHS:
            found = call(seq_len)
            same = torch.equal(first.setdefault(seq_len, found), found)
            assert same, f"{seq_len} tokens: not what they were before longer ones came"

    exhibit(check, ours, twin=Remembers(scaling), because="5 tokens: not what they were before longer ones came")


@pytest.mark.parametrize("angles", ["exact", "float32"])
def test_40_dynamic_scaling_leaves_short_sequences_alone(angles: str) -> None:
    """Scaling called dynamic acts on short sequences too.

    vllm-project/vllm#3488 and #5093: Dynamic scaling was static, and hurt within the trained length. The engine took
    the longest length that the model may ever see for the length of the sequence.

    Check: `locant.probe(rotary, expected=locant.encoding_from_config(config))` lists the pairs that differ.

    Test: plain rotary, bit for bit, up to the trained length; and not past it.
    """
    scaling = DynamicNTK(factor=4.0, original_max_seq_len=64)
    usual = Rotary(WIDTH, angles=angles)  # type: ignore[arg-type]
    scaled = Rotary(WIDTH, scaling=scaling, angles=angles)  # type: ignore[arg-type]

    def check(told: Callable[[int], Rotary]) -> None:
        for seq_len in (1, 2, 63, 64):
            positions = Positions.arange(seq_len)
            for ours, plain_ in zip(told(seq_len).cos_sin(positions), usual.cos_sin(positions), strict=True):
                assert torch.equal(ours, plain_), f"{seq_len} tokens of 64: not plain rotary positions"
        positions = Positions.arange(65)
        assert not torch.equal(told(65).cos_sin(positions)[0], usual.cos_sin(positions)[0]), "nothing is ever scaled"

    exhibit(
        check,
        scaled.for_length, lambda seq_len: scaled if seq_len <= 64 else scaled.for_length(seq_len),
        twin=lambda seq_len: scaled.for_length(4 * 64), because="2 tokens of 64: not plain rotary positions",
    )  # fmt: skip


def cosines(factors: Sequence[float], positions: Positions) -> Tensor:
    """The truth for one of LongRoPE's two lists."""
    radians = plain(WIDTH, 10_000.0) / torch.tensor(factors, dtype=torch.float64)
    return (positions.index[0].double()[:, None] * radians).cos()


def of_rotary(seq_len: int, positions: Positions, factor: float = 4.0) -> Tensor:
    scaling = replace(LONGROPE, factor=factor)
    return Rotary(WIDTH, scaling=scaling).for_length(seq_len).cos_sin(positions, torch.float64)[0][0]


def test_47_the_length_of_the_sequence_decides_and_not_the_room_for_it() -> None:
    """LongRoPE's factors follow the size of the cache.

    vllm-project/vllm#27431, ggml-org/llama.cpp#24823, #24875 and #8995: Short texts were read with long factors, or the
    output was garbage. The engine chose LongRoPE's factors by the number of tokens that it had made room for.

    Check: Read one short text with a small and a large maximum length: the logits must be equal.

    Test: the trained length and one token more, with room for more or less.
    """

    def ours(seq_len: int, room: int) -> Tensor:
        return of_rotary(seq_len, Positions.arange(seq_len), factor=room / ORIGINAL)

    def by_room(seq_len: int, room: int) -> Tensor:
        return of_rotary(room, Positions.arange(seq_len))

    def check(chosen: Callable[[int, int], Tensor]) -> None:
        for room in (4 * ORIGINAL, 1000 * ORIGINAL):
            for seq_len, factors in ((2, SHORT), (ORIGINAL, SHORT), (ORIGINAL + 1, LONG), (ORIGINAL * 3, LONG)):
                off = (chosen(seq_len, room) - cosines(factors, Positions.arange(seq_len))).abs().max()
                assert off <= DOUBLE, f"{seq_len} tokens of {ORIGINAL}, with room for {room}: the other factors"

    exhibit(check, ours, twin=by_room, because="2 tokens of 8, with room for 32: the other factors")


def test_48_the_length_counts_from_the_first_position() -> None:
    """LongRoPE's factors follow the start of a chunk.

    EricLBuehler/mistral.rs#251: A long prompt was read with short factors. The length was taken from where a chunk
    begins, and the first chunk of any prompt begins at 0.

    Check: Compare the logits of a long prompt in one chunk and in several.

    Test: chunks that begin at 0 and elsewhere.
    """

    def ours(positions: Positions) -> Tensor:
        return of_rotary(int(positions.index.max()) + 1, positions)

    def by_offset(positions: Positions) -> Tensor:
        return cosines(LONG if int(positions.index[0, 0]) > ORIGINAL else SHORT, positions)

    def check(chosen: Callable[[Positions], Tensor]) -> None:
        for begin, count in ((0, TOTAL), (0, ORIGINAL), (0, ORIGINAL + 1), (3, 9), (ORIGINAL, 1), (100, 2)):
            positions = Positions.after(begin, count)
            truth = cosines(LONG if begin + count > ORIGINAL else SHORT, positions)
            same = (chosen(positions) - truth).abs().max() <= DOUBLE
            assert same, f"{count} tokens from position {begin} on: the other factors"

    exhibit(check, ours, twin=by_offset, because="21 tokens from position 0 on: the other factors")
