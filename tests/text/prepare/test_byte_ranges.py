"""However a file is cut, its byte ranges give its documents, each once, in order, and hash its bytes, each once."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from locant.text.prepare import separators
from locant.text.prepare.byte_ranges import BLOCK, ByteRange, Tally, cut
from locant.text.prepare.readers import documents
from locant.text.prepare.sources import find_sources
from tests.text.prepare.corpus import small_blocks, together

BOM = b"\xef\xbb\xbf"


def read(byte_ranges: list[ByteRange]) -> tuple[list[bytes], list[Tally]]:
    found, tallies = [], []
    for byte_range in byte_ranges:
        tally = Tally()
        its = together([*documents(byte_range, tally)])
        assert tally.documents == len(its)
        found += its
        tallies.append(tally)
    return found, tallies


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


SEPARATORS = st.one_of(
    st.sampled_from(["\n\n", "\n", "aba", "aa", "abab", "--", "<|endoftext|>", "\r\n\r\n", "é\n", "\ufeff"]),
    st.text("ab\n", min_size=1, max_size=4),
)


@st.composite
def contents(draw: st.DrawFn) -> tuple[bytes, str]:
    """A file and a separator that it has many of, whole and half."""
    separator = draw(SEPARATORS)
    data = separator.encode()
    halves = [data[:i] for i in range(1, len(data))] + [data[i:] for i in range(1, len(data))]
    atoms = st.sampled_from([data, data, data + data[:1], *halves, b"a", b"b", b"\n", b"xyz" * 5, b"\xff", b"\x80"])
    content = b"".join(draw(st.lists(atoms, max_size=25)))
    return draw(st.sampled_from([b"", b"", BOM])) + content, separator


class TestByteRanges:
    @settings(max_examples=40)
    @given(given=contents(), range_bytes=st.integers(1, 60), block=st.integers(1, 40))
    @example(given=(b"xxxxxaby", "ab"), range_bytes=60, block=6)  # a separator across the longest that is handed on
    def test_have_the_documents_that_split_gives(
        self, tmp_path_factory: pytest.TempPathFactory, given: tuple[bytes, str], range_bytes: int, block: int
    ) -> None:
        content, separator = given
        path, packed = (tmp_path_factory.mktemp("one") / name for name in ("a.txt", "a.md.gz"))
        path.write_bytes(content)
        packed.write_bytes(gzip.compress(content))
        expected = [text for text in content.removeprefix(BOM).split(separator.encode()) if text]
        with pytest.MonkeyPatch.context() as patch:
            small_blocks(patch, block)
            (source,) = find_sources(path, separator=separator)
            found, tallies = read(cut(source, range_bytes))
            assert found == expected
            # The range that holds all is not the same code.
            assert read(cut(source, len(content) + 1))[0] == expected
            # A compressed file has one range.
            (byte_range,) = cut(find_sources(packed, separator=separator)[0], 3)
            found, (whole,) = read([byte_range])
            assert (found, whole.sha256) == (expected, hashlib.sha256(packed.read_bytes()).hexdigest())
        assert sum(tally.bytes for tally in tallies) == len(content)
        for number, tally in enumerate(tallies):
            begin = number * range_bytes
            assert tally.sha256 == hashlib.sha256(content[begin : begin + range_bytes]).hexdigest()

    @given(
        lines=st.lists(st.one_of(st.none(), st.text(max_size=30)), max_size=12),
        end=st.sampled_from(["\n", "\r\n", "\n\n"]),
        range_bytes=st.integers(1, 80),
        block=st.integers(1, 40),
    )
    def test_have_each_line_of_json(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        lines: list[str | None],
        end: str,
        range_bytes: int,
        block: int,
    ) -> None:
        path = tmp_path_factory.mktemp("one") / "a.jsonl"
        path.write_bytes(end.join(json.dumps({"n": 1, "text": line}) for line in lines).encode())
        with pytest.MonkeyPatch.context() as patch:
            small_blocks(patch, block)
            (source,) = find_sources(path)
            found, _ = read(cut(source, range_bytes))
        assert found == [line.encode() for line in lines if line]

    @settings(max_examples=8)  # each writes a file and opens it for every range
    @given(
        rows=st.lists(st.one_of(st.none(), st.text(max_size=20)), min_size=1, max_size=40),
        group=st.integers(1, 9),
        range_bytes=st.integers(100, 3000),
    )
    def test_have_each_row_group_of_parquet(
        self, tmp_path_factory: pytest.TempPathFactory, rows: list[str | None], group: int, range_bytes: int
    ) -> None:
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        path = tmp_path_factory.mktemp("one") / "a.parquet"
        table = arrow.table({"other": list(range(len(rows))), "text": arrow.array(rows, arrow.string())})
        parquet.write_table(table, path, row_group_size=group)
        (source,) = find_sources(path)
        byte_ranges = cut(source, range_bytes)
        found, tallies = read(byte_ranges)
        assert found == [row.encode() for row in rows if row]
        data = path.read_bytes()
        for (_, start, stop), tally in zip(byte_ranges, tallies, strict=True):
            assert tally.sha256 == hashlib.sha256(data[start:stop]).hexdigest()

    @pytest.mark.parametrize("text", [b"ab\n" * 100_000, b"a" * 299_999 + b"\n"], ids=["short", "long"])
    def test_cost_little_more_than_they_hold(self, folder: Path, monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
        """A file is read about once, or twice for a long document, not to its end for each range."""
        path = folder / "a.txt"
        path.write_bytes(text)
        (source,) = find_sources(path, separator="\n")
        taken = 0
        real = separators._split

        def counting(blocks: object, more: object, *args: object, **options: object) -> object:
            def counted(them: object) -> object:
                nonlocal taken
                for block in them:  # type: ignore[attr-defined]
                    taken += len(block)
                    yield block

            return real(counted(blocks), counted(more), *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(separators, "_split", counting)
        found, _ = read(cut(source, 10_000))
        assert found == text.split(b"\n")[:-1]
        assert taken <= len(text) + max(len(found[0]), 30 * 4096)


class TestLongDocuments:
    @pytest.mark.parametrize("separator", [None, "\n\n", "\n"])
    def test_never_stand_in_memory_as_a_whole(self, folder: Path, separator: str | None) -> None:
        path = folder / "a.txt"
        with path.open("wb") as file:
            for _ in range(16):
                file.write(b"some words " * 190_000)  # two megabytes
        (byte_range,) = cut(find_sources(path, separator=separator)[0], 2**40)
        sizes = [sum(map(len, batch.texts)) for batch in documents(byte_range, Tally())]
        assert sum(sizes) == path.stat().st_size
        assert max(sizes) < 2 * BLOCK
