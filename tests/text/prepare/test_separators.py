"""How the documents of texts are read."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from locant.errors import InputError
from locant.text.prepare.byte_ranges import Tally, cut
from locant.text.prepare.readers import documents
from locant.text.prepare.sources import find_sources
from tests.text.prepare.corpus import from_stdin, texts, write


class TestText:
    def test_is_kept_as_it_stands(self, tmp_path: Path) -> None:
        data = b"\r\n one\r two\n\n\t \xff\xc2\x85 \xe2\x80\xa8 \r\n"
        write(tmp_path, a_txt=b"\xef\xbb\xbf" * 2 + data)
        assert texts(tmp_path) == [b"\xef\xbb\xbf" + data]

    def test_that_is_empty_is_no_document(self, tmp_path: Path) -> None:
        write(tmp_path, a_txt=b"", b_txt=b"\xef\xbb\xbf", c_txt=b" ", d_jsonl=b"\n\n \n")
        assert texts(tmp_path) == [b" "]

    def test_may_hold_a_nul_further_on(self, tmp_path: Path) -> None:
        text = b"a" * 9000 + b"\0"
        write(tmp_path, a_txt=text, b_txt_gz=gzip.compress(text))
        assert texts(tmp_path) == [text, text]

    @pytest.mark.parametrize("separator", ["\r\n", "é", "<|endoftext|>", "\udcff"])
    def test_is_split_at_any_separator(self, tmp_path: Path, separator: str) -> None:
        """A surrogate is how the command line hands over a byte that is no UTF-8."""
        between = separator.encode(errors="surrogateescape")
        write(tmp_path, a_txt=between.join([b"one", b"", b"two", b""]))
        assert texts(tmp_path, separator=separator) == [b"one", b"two"]

    def test_from_standard_input(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        data = b"\xef\xbb\xbfone\r\n\n\ntwo"
        found = from_stdin(data, tmp_path, monkeypatch, separator="\n\n")
        assert found == ([b"one\r", b"\ntwo"], hashlib.sha256(data).hexdigest())

    def test_from_standard_input_is_looked_at_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(InputError, match="standard input is binary: byte 1 is NUL"):
            from_stdin(b"a\0", tmp_path, monkeypatch)

    def test_that_changed_meanwhile_is_refused(self, tmp_path: Path) -> None:
        for separator in ("\n", None):
            write(tmp_path, a_txt=b"one\ntwo")
            (byte_range,) = cut(find_sources(tmp_path, separator=separator)[0], 100)
            write(tmp_path, a_txt=b"one")
            with pytest.raises(InputError, match="has changed"):
                list(documents(byte_range, Tally()))
