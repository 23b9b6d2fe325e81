"""Where a text may be cut, its parts have the ids of the whole; and where it may not, there is a text that shows it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from locant.text import Tokenizer
from locant.text.tokenizer import engine as engines
from locant.text.tokenizer.definition import last_cut, why_not_cut
from locant.text.tokenizer.engine import Engine
from tests.text.tokenizer.zoo import ATOMS, KINDS, SPLITS, byte_level, loaded, with_split

WHOLE = {
    "byte level, a space before", "byte level, spaces dropped", "byte level, a token strips", "unigram", "words",
    "byte fallback",
}  # fmt: skip
CUT = [kind for kind in (*KINDS, *SPLITS) if kind not in WHOLE]

MIXED = st.lists(st.one_of(st.sampled_from(ATOMS), st.text(max_size=3)), max_size=30).map("".join)


def cuts(text: bytes) -> list[int]:
    """Every place, from the last to the first."""
    found, end = [], len(text)
    while place := last_cut(text, 0, end):
        found.append(place)
        end = place
    return found


def ids(kind: str, *parts: bytes) -> list[int]:
    return [number for part in parts for number in loaded(kind).encode(part).tolist()]


class TestCuts:
    @pytest.mark.parametrize("kind", CUT)
    @given(text=MIXED, bad=st.binary(max_size=2), place=st.integers(0, 200))
    def test_change_no_id(self, kind: str, text: str, bad: bytes, place: int) -> None:
        data = text.encode()
        data = data[:place] + bad + data[place:]
        whole = ids(kind, data)
        for cut in cuts(data):
            assert ids(kind, data[:cut], data[cut:]) == whole
        between = [0, *reversed(cuts(data)), len(data)]
        assert ids(kind, *(data[low:high] for low, high in itertools.pairwise(between))) == whole

    @pytest.mark.parametrize("kind", [*SPLITS, "word piece", "byte level, whole words", "byte level, every flag"])
    def test_change_no_id_of_any_short_text(self, kind: str) -> None:
        """Every text of four atoms that matter, with a cut in its middle."""
        matter = ["a", "'", "s", "1", "!", "\n", " ", "\t", "\u00a0", "\r", "日"]
        texts = [
            (f"{before}a", f"{space}{after}{last}")
            for before, space, after, last in itertools.product([*matter, ""], [" ", "\n", "\t"], matter, matter)
        ]
        rows = loaded(kind).encode_batch([text for pair in texts for text in ("".join(pair), *pair)])
        for number in range(len(texts)):
            whole, left, right = rows[3 * number : 3 * number + 3]
            assert whole.tolist() == [*left.tolist(), *right.tolist()], texts[number]

    def test_are_found_behind_letters_of_many_scripts(self) -> None:
        others = "தழবকհ" + "ფქአማກນခকਕગ" + "ಕతമක\u1780Ꮳᐃᚠܐª" + "ÅŁΩЖ𐌀"  # Tamil, Bengali, Armenian, Georgian, ...
        for letter in "azAZéÿαωàАя" + "אתايक日本字あカ한글กฮ" + others:
            for space in (" ", "\n", "\t", "\r"):
                text = f"1{letter}{space}1".encode()
                assert last_cut(text) == len(text) - 2, letter

    def test_are_found_nowhere_else(self) -> None:
        assert all(
            not last_cut(text)
            for text in (
                b"",
                b"a",
                b"a1 ",
                b"a\xc2\xa0",
                b"1 a",
                b"\xcc\x81 ",
                b"\xff ",
                b"!\n",
                *(f"{sign} ".encode() for sign in "ிা。፡№①\u0660꟎"),
                b"\xed\xa0\x80 ",
                b"\xe0\x80\x80 ",
            )
        )
        assert last_cut(b"a b c d", 0, 6) == 5
        assert last_cut(b"a b c d", 4, 5) == 0
        assert last_cut(b"ab " + b"x" * 9000) == 2


# What the argument in the module forbids, each with a text over which it falls.
COUNTEREXAMPLES = [
    ("GPT-2", b"a\n", b"\n\nB"),  # within white space: all but its last were one word
    ("GPT-2", b"a\n\n", b"a"),  # behind white space: the two newlines were two words
    ("Llama 3", b"a!?", b"\n\na"),  # behind punctuation: newlines belong to it
    ("GPT-4o", b"a-\n", b"/a"),  # between white space and punctuation
    ("GPT-4o", b"the", b"'re"),  # before an apostrophe
    ("GPT-2", b"a'r", b"e"),  # within a word
    ("Llama 3", b"23", b"23"),  # between digits
    ("DeepSeek", b"-", b"the a"),  # between punctuation and a letter
    ("byte level, every flag", b"a\n", b"\n\nb"),  # within an added token
    ("byte level, normalized", b"e", "\u0301 ".encode()),  # before an accent
]


@pytest.mark.parametrize(("kind", "left", "right"), COUNTEREXAMPLES)
def test_other_places_change_ids(kind: str, left: bytes, right: bytes) -> None:
    assert ids(kind, left, right) != ids(kind, left + right)
    assert len(left) not in cuts(left + right)


class TestWhoMayCut:
    def test_is_known_for_every_kind(self) -> None:
        faults = {kind: Engine(loaded(kind)).why_not_cut for kind in (*KINDS, *SPLITS)}
        assert {kind for kind, fault in faults.items() if fault} == WHOLE
        assert faults["byte level, a token strips"] == "its token '<think>' may lie across white space"
        assert "that does not end at white space: {'type': 'Metaspace'" in (faults["unigram"] or "")

    @pytest.mark.parametrize(
        ("pattern", "left", "right"),
        [
            (r"\p{L}+ \p{L}+|\s+", b"the a", b" the"),  # two words at a time
            (r"\p{N}", b"the a", b" the"),  # no split at white space at all
            (r"(?<=a) b|\s+|\p{L}+", b"a", b" b"),  # looks back
            (r"a(?= b)|\p{L}+|\s+", b"xa", b" b"),  # looks forward
        ],
    )
    def test_is_nobody_whose_split_is_unknown(self, pattern: str, left: bytes, right: bytes) -> None:
        made = with_split(pattern)
        assert "white space" in (Engine(made).why_not_cut or "")
        assert last_cut(left + right) == len(left)

    def test_is_nobody_with_a_token_across_white_space(self) -> None:
        for token in ("a b", "x\ny z", "one\t"):
            library = byte_level()
            library.add_tokens([AddedToken(token, normalized=False)])
            made = Tokenizer.from_json(library.to_str())
            assert Engine(made).why_not_cut == f"its token {token!r} may lie across white space"
        library = byte_level()
        library.add_tokens([AddedToken("  ", normalized=False), AddedToken("<a> <b>", normalized=False)])
        made = Tokenizer.from_json(library.to_str())
        assert Engine(made).why_not_cut is None
        for left, right in ((b"a", b"  b"), (b"a", b"   b"), (b"x a", b" <a> <b> c")):
            parts = [*made.encode(left).tolist(), *made.encode(right).tolist()]
            assert parts == made.encode(left + right).tolist()

    def test_is_whoever_splits_at_white_space_first(self) -> None:
        library = byte_level()
        steps = [pre_tokenizers.Digits(True), pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(False)]
        library.pre_tokenizer = pre_tokenizers.Sequence(steps)
        library.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.NFKC()])
        assert why_not_cut(Tokenizer.from_json(library.to_str()).plain_definition) is None
        library.normalizer = normalizers.Strip()
        assert "Strip" in (why_not_cut(Tokenizer.from_json(library.to_str()).plain_definition) or "")


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[bytes], list[tuple[list[bytes], bool]]]:
    """Documents, and the same in parts that end anywhere."""
    documents = [text.encode() for text in draw(st.lists(MIXED.filter(bool), min_size=1, max_size=5))]
    parts: list[tuple[list[bytes], bool]] = []
    batch: list[bytes] = []
    for document in documents:
        places = sorted(draw(st.sets(st.integers(1, len(document)), max_size=3)))
        bounds = [0, *places, len(document)]
        pieces = [document[low:high] for low, high in itertools.pairwise(bounds)]
        for piece in pieces[:-1]:
            parts.append(([*batch, piece], True))
            batch = []
        batch.append(pieces[-1])
        if draw(st.booleans()):
            parts.append((batch, False))
            batch = []
    return documents, [*parts, (batch, False)] if batch else parts


class TestStream:
    @pytest.mark.parametrize("kind", ["byte level", "bytes", "Llama 3", "byte fallback", "byte level, every flag"])
    @given(given=batches(), part=st.sampled_from([1, 8, 2**20]))
    def test_is_encode_of_each_document(
        self, kind: str, part: int, given: tuple[list[bytes], list[tuple[list[bytes], bool]]]
    ) -> None:
        documents, parts = given
        found: list[list[int]] = []
        goes_on = False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engines, "PART_BYTES", part)
            for numbers, lengths, unfinished in Engine(loaded(kind)).stream(parts):
                assert lengths.sum() == len(numbers)
                for i, row in enumerate(np.split(numbers, np.cumsum(lengths)[:-1])):
                    if goes_on and i == 0:
                        found[-1] += row.tolist()
                    else:
                        found.append(row.tolist())
                goes_on = unfinished
        assert found == [loaded(kind).encode(document).tolist() for document in documents]

    def test_holds_only_what_comes_after_the_last_cut(self) -> None:
        engine = Engine(loaded("byte level"))
        parts = [([b"some more words and" + b" some more words and" * 2000], True)] * 3
        sizes = [len(numbers) for numbers, _, _ in engine.stream([*parts, ([b"end"], False)])]
        assert min(sizes[:3]) > 10_000
        assert sizes[3] < 20
