"""The numbers of the essay "From integers to RoPE": each sentence that has some is written here with computed ones."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from docs.generator.stills import FIGURES, FOLDER
from locant import Rotary, Sinusoidal
from locant.positions import Positions
from locant.positions.scaling import scaling_by_name
from tests.tolerances import DOUBLE

ESSAY = (Path(__file__).parents[2] / "docs" / "from-integers-to-rope.md").read_text(encoding="utf-8")
TEXT = re.sub(r"\s+", " ", ESSAY)

TRAINED, FACTOR, DIM, BASE = 4096, 8, 64, 10_000.0
PLAIN = Rotary(DIM, base=BASE).inv_freq.numpy()
EIGHT = Rotary(16, base=BASE).inv_freq.numpy()

SEEDS = {"dog": 1, "man": 2, "bit": 5}


def word(name: str) -> np.ndarray:
    """The made-up vector of a word, as `docs/live/essay.js` makes it."""
    return math.sqrt(2) * np.sin(SEEDS[name] * np.arange(1, DIM + 1) ** 2)


def cosine(position: int) -> float:
    dog, man = word("dog") + position, word("man") + position
    return float(dog @ man / math.sqrt((dog @ dog) * (man @ man)))


def bits(position: int) -> np.ndarray:
    return np.array([1 if position >> bit & 1 else -1 for bit in range(6)])


def added_scores() -> np.ndarray:
    codes = Sinusoidal(DIM).vectors(Positions.arange(200)).double()[0].numpy()
    return np.array([(word("dog") + codes[at]) @ (word("bit") + codes[at - 3]) / 8 for at in range(32, 193)])


def scaled(name: str) -> np.ndarray:
    return Rotary(DIM, base=BASE, scaling=scaling_by_name(f"{name}:{FACTOR}", TRAINED, DIM, BASE)).inv_freq.numpy()


def strange(frequencies: np.ndarray, position: int) -> int:
    """How many hands stand at an angle that was not there in training, to the last bits."""
    seen = TRAINED * PLAIN
    return int(np.sum((seen < 2 * math.pi) & (position * frequencies > seen * (1 + 1e-9))))


def turn(dim: int, base: float) -> float:
    """Tokens in one turn of the slowest hand."""
    return 2 * math.pi / Rotary(dim, base=base).inv_freq[-1].item()


ROUND = int(np.sum(2 * math.pi / TRAINED < PLAIN))
"""Hands that went all the way round in training; the others are open."""
OPEN = 32 - ROUND
AGAIN = 2 * math.pi * 32
"""Tokens until 32 hands at equal steps of frequency meet."""
LONGEST = TRAINED * FACTOR
LOW, HIGH = added_scores().min(), added_scores().max()
YARN = scaling_by_name(f"yarn:{FACTOR}", TRAINED, DIM, BASE).effective_attention_factor

CLAIMS = [
    f'The cosine between "dog" and "man" is {cosine(0):.3f} at position 0',
    f"It is {cosine(10):.3f} at position 10 and {cosine(100):.5f} at position 100",
    f"grows by {1 / 9:.3f} in a text of 10 tokens, and by {1 / 99:.4f} in a text of 100.",
    "Six bits are enough for 64 positions",
    f"From 31 to 32 all six bits change ({31:06b}, {32:06b})",
    f"so these two neighbours have similarity −{-bits(31) @ bits(32) / 6:.0f}, the lowest value.",
    f"Position 63 ({63:06b}) is {63 - 31} tokens away from 31, and has similarity {bits(31) @ bits(63) / 6:.3f}.",
    f"The two words are always 3 tokens apart, and their score is anything from {LOW:.2f} to {HIGH:.2f}.",
    f"it has made {44 // (2 * math.pi):.0f} turns and {44 % (2 * math.pi):.3f} radians at position 44",
    f"44 looks like 0: the cosine is {math.cos(44):.4f}.",
    f"position 10 from 0: its cosine there is {math.cos(10 * EIGHT[-1]):.6f}.",
    f"frequencies from {EIGHT[0]:.0f} to {EIGHT[-1]:.4f} radians per token",
    f"All hands together distinguish 44 from 0: their mean cosine is {np.cos(44 * EIGHT).mean():.3f}.",
    f"With 32 equal steps, all hands meet again after {AGAIN:.0f} tokens. A token {AGAIN:.0f} tokens away",
    f"each factor of ten in distance has {32 / math.log10(BASE):.0f} pairs:",
    f"that hand needs {turn(128, BASE):,.0f} tokens for a turn.",
    f"Llama 3 has base 500,000, and there it needs {turn(128, 5e5) / 1e6:.2f} million.",
    f"Of its 32 hands, {ROUND} went all the way round in training. The other {OPEN} saw",
    f"At position 16,000 all {strange(PLAIN, 16_000)} of them point where no hand ever pointed.",
    f"for $s = {FACTOR}$ the fastest hand now turns by {scaled('linear')[0]:.3f} radians a token instead of 1,",
    f"At position {LONGEST:,}, {strange(scaled('ntk'), LONGEST)} of the {OPEN} are still outside.",
    f"for $s = {FACTOR}$ they are multiplied by {YARN**2:.2f}.",
]


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_sentence_with_numbers_has_those_that_are_computed(claim: str) -> None:
    assert claim in TEXT


def test_what_is_said_of_scalings() -> None:
    """No hand leaves its ring with linear, YaRN and Llama 3; which hands stay, by their turns in training."""
    assert [strange(scaled(name), LONGEST) for name in ("linear", "yarn", "llama3")] == [0, 0, 0]
    turns = TRAINED * PLAIN / (2 * math.pi)
    for name, most in (("yarn", 32), ("llama3", 4)):
        slowed = PLAIN / scaled(name)
        assert slowed[turns > most] == pytest.approx(1, rel=DOUBLE, abs=0)
        assert slowed[turns < 1] == pytest.approx(FACTOR, rel=DOUBLE, abs=0)
    ntk = PLAIN / scaled("ntk")
    assert (ntk[0], ntk[-1]) == pytest.approx((1, FACTOR), rel=DOUBLE, abs=0)
    assert (np.diff(ntk) > 0).all()


def test_every_figure_has_a_still_picture_and_words_for_those_who_see_none() -> None:
    found = re.findall(
        r"```\{figure\} images/essay/(\w+)\.svg\n:figclass: live\n:name: essay-(\w+)\n:alt: (.+)\n", ESSAY
    )
    assert [name for name, _, _ in found] == [name for _, name, _ in found] == list(FIGURES)
    assert all(len(words) > 40 for _, _, words in found)
    assert {file.stem for file in FOLDER.glob("*.svg")} == {*FIGURES, "clocks"}


ALTS = [
    f"Their cosine rises from {cosine(0):.1f} at position 0 to {cosine(10):.2f} at position 10.",
    f"it goes up and down between {LOW:.2f} and {HIGH:.2f}",
    f"the mean cosine to position 0, which is {np.cos(44 * EIGHT).mean():.4f} at position 44",
    f"back at 1 at distances {AGAIN:.0f} and {2 * AGAIN:.0f}",
    f"{ROUND} rings are closed, {OPEN} are open",
    f"The second line is {['ten', 'eleven', 'twelve'][99 // 9 - 10]} times flatter",
]


@pytest.mark.parametrize("claim", ALTS)
def test_the_words_of_a_figure_have_its_numbers(claim: str) -> None:
    assert claim in TEXT
