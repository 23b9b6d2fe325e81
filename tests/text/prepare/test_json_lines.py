"""How JSON lines are read, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from locant.errors import InputError
from locant.text.prepare import json_lines
from locant.text.prepare.byte_ranges import Tally, cut
from locant.text.prepare.readers import documents
from locant.text.prepare.sources import find_sources
from tests.text.prepare.corpus import from_stdin, small_blocks, texts, write


class TestJsonLines:
    def test_lines_may_be_blank_or_end_in_any_way(self, tmp_path: Path) -> None:
        write(
            tmp_path,
            a_jsonl=b'\xef\xbb\xbf{"text": "one"}\r\n\r\n \n{"text": "two\\n\xc3\xa9"}\n{"text": null}\n{"text": ""}',
        )
        assert texts(tmp_path) == [b"one", "two\né".encode()]

    def test_the_field_may_lie_within(self, tmp_path: Path) -> None:
        write(tmp_path, a_jsonl=b'{"a": {"b": {"c": "deep"}}}\n{"a": {"b.c": "dotted"}}\n{"a.b.c": "flat", "a": 1}')
        assert texts(tmp_path, field="a.b.c") == [b"deep", b"dotted", b"flat"]

    def test_surrogates_and_bad_bytes_are_defined(self, tmp_path: Path) -> None:
        write(tmp_path, a_jsonl=b'{"text": "\\ud83d\\ude42 \\ud83d"}\n{"text": "\xff"}')
        assert texts(tmp_path) == ["🙂 \ufffd".encode(), "\ufffd".encode()]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b"{", "is not JSON: Expecting property name"),
            (b"[" * 100_000, "is not JSON: maximum recursion"),
            (b'{"text": ' + b"1" * 5000 + b"}", "is not JSON: Exceeds the limit"),
            (b'["text"]', "is a JSON list, expected an object"),
            (b"null", "is a JSON NoneType, expected an object"),
            (b'{"text": 3}', "has a int in 'text', expected a string"),
            (b'{"title": "x", "body": "y"}', "has no field 'text'; its fields are: 'title', 'body'"),
            (b"{}", "has no field 'text'; its fields are: none"),
        ],
    )
    @pytest.mark.parametrize("range_bytes", [2**30, 40])
    def test_a_bad_line_is_named(self, tmp_path: Path, line: bytes, message: str, range_bytes: int) -> None:
        """In whatever byte range it lies; the line before it is long enough to be one."""
        before = b'{"text": "' + b"x" * 100 + b'"}\n'
        path = tmp_path / "a.jsonl"
        path.write_bytes(before + b"\n" + before + line + b"\n" + before)
        place = 2 * len(before) + 1
        with pytest.raises(InputError, match=rf"a\.jsonl, line 4 \(at byte {place}\) {message}"):
            [
                batch
                for byte_range in cut(find_sources(path)[0], range_bytes)
                for batch in documents(byte_range, Tally())
            ]
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        with pytest.raises(InputError, match=rf"a\.jsonl\.gz, line 4 \(at byte {place}\)"):
            texts(tmp_path / "a.jsonl.gz")

    def test_a_line_without_end_is_refused_in_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(json_lines, "LONGEST_LINE", 1000)
        small_blocks(monkeypatch, 100)
        write(tmp_path, a_jsonl=b" \n" * 3 + b" " * 5000)
        with pytest.raises(InputError, match=r"line 4 \(at byte 6\) has more than"):
            texts(tmp_path)

    def test_from_standard_input_where_a_field_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        data = b'{"text": "one"}\n{"text": "two"}'
        assert from_stdin(data, tmp_path, monkeypatch, field="text")[0] == [b"one", b"two"]
