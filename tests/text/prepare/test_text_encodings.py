"""The encoding of texts: the one that is named, the one of a mark, and what is likely another."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
from pathlib import Path

import pytest

from locant import InputError
from locant.text.prepare import estimate, prepare, problems
from locant.text.prepare.sources import find_sources
from locant.text.prepare.text_encodings import likely_other_encoding
from locant.text.store import TokenStore
from tests.refusal import refuses
from tests.text.prepare.corpus import small_blocks


def documents(store: TokenStore) -> list[str]:
    return [
        bytes(store[a : b - 1].tolist()).decode() for a, b in zip(store.documents, store.documents[1:], strict=False)
    ]


TEXT = {"cp1252": "déjà vu, à l'été. " * 50, "gbk": "日本語の文章、中国。" * 50, "utf-16-le": "plain text. " * 50}


class TestEncodings:
    @pytest.mark.parametrize("kind", ["a.txt", "a.txt.gz", "a.jsonl"])
    @pytest.mark.parametrize("encoding", [*TEXT, "utf-16"])
    def test_a_file_is_read_in_the_one_that_is_named(self, tmp_path: Path, encoding: str, kind: str) -> None:
        text = TEXT.get(encoding, "né 日本")
        data = json.dumps({"text": text}, ensure_ascii=False) if "json" in kind else text
        encoded = data.encode(encoding)
        (tmp_path / kind).write_bytes(gzip.compress(encoded) if "gz" in kind else encoded)
        assert documents(prepare(tmp_path, tmp_path / "store", tokenizer="bytes", encoding=encoding)) == [text]

    @pytest.mark.parametrize(("encoding", "remedy"), [("utf-16-le", "utf-16-le"), ("utf-16-be", "utf-16-be")])
    def test_utf_16_is_told_from_a_binary_file(self, tmp_path: Path, encoding: str, remedy: str) -> None:
        (tmp_path / "a.txt").write_bytes(TEXT["utf-16-le"].encode(encoding))
        with refuses(InputError, "likely UTF-16", f"encoding='{remedy}'"):
            find_sources(tmp_path)

    @pytest.mark.parametrize(
        ("encoding", "remedy"), [("cp1252", "encoding='cp1252'"), ("gbk", "encoding= with .* example gb18030")]
    )
    def test_a_likely_other_one_is_warned_of(self, tmp_path: Path, encoding: str, remedy: str) -> None:
        (tmp_path / "a.txt").write_bytes(TEXT[encoding].encode(encoding))
        with pytest.warns(UserWarning, match=rf"a\.txt is likely not UTF-8: .*; try: pass {remedy}"):
            find_sources(tmp_path)
        find_sources(tmp_path, encoding=encoding)  # where it is named, nothing is warned of

    def test_what_is_utf_8_is_not_doubted(self) -> None:
        texts = [*TEXT.values(), "\x1b[1mred\x1b[0m\f" * 9, "日本\ufffd" * 9, "x" * 2000 + "\x01" * 9, ""]
        assert [likely_other_encoding(text.encode()) for text in texts] == [None] * len(texts)
        assert likely_other_encoding("漢字かな交じり文".encode("utf-16-le") * 9)

    @pytest.mark.parametrize(("foreign", "one_in"), [(b"\xe9", 200), (b"\x01", 10)])
    def test_a_warning_needs_four_characters_and_a_share_of_all(self, foreign: bytes, one_in: int) -> None:
        """More than one in 200 that is not UTF-8, or more than one in ten that is a control character."""
        for count in (3, 4, 9):
            limit = count * one_in
            assert likely_other_encoding(foreign * count + b"x" * (limit - count)) is None
            more = likely_other_encoding(foreign * count + b"x" * (limit - count - 1))
            assert (more is not None) == (count >= 4)

    @pytest.mark.parametrize("stated", [None, "cp1252", "utf-16-le"])
    @pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
    def test_a_byte_order_mark_decides(self, tmp_path: Path, encoding: str, stated: str | None) -> None:
        text, corpus = "né 日本 " * 9, tmp_path / "corpus"
        corpus.mkdir()
        (corpus / "a.txt").write_bytes(text.encode(encoding))
        line = json.dumps({"text": text}, ensure_ascii=False).encode(encoding)
        (corpus / "b.jsonl.gz").write_bytes(gzip.compress(line))
        for _ in range(2):  # the second call compares its input with the finished store
            assert documents(prepare(corpus, tmp_path / "store", tokenizer="bytes", encoding=stated)) == [text, text]

    def test_a_byte_order_mark_of_standard_input_decides(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for _ in range(2):  # the second call compares its input with the finished store
            stdin = io.TextIOWrapper(io.BytesIO("né".encode("utf-16")))
            monkeypatch.setattr(sys, "stdin", stdin)
            assert documents(prepare("-", tmp_path / "store", tokenizer="bytes")) == ["né"]

    def test_utf_8_that_is_read_as_another_one_is_warned_of(self, tmp_path: Path) -> None:
        data = {
            "ascii": b"plain text", "western": "déjà vu".encode("cp1252"), "short": "é".encode("cp1252"), "empty": b"",
            "{utf8}": "déjà vu".encode(), "long": ("é" * 9000).encode(),
        }  # fmt: skip
        for name, one in data.items():
            (tmp_path / f"{name}.txt").write_bytes(one)
        listed = re.escape(f"cp1252: {tmp_path}/long.txt, {tmp_path}/{{utf8}}.txt; if they are UTF-8, prepare them ")
        with pytest.warns(UserWarning, match=f"^2 files are valid UTF-8 but were read as {listed}without encoding=$"):
            find_sources(tmp_path, encoding="cp1252")
        (tmp_path / "japanese.txt").write_bytes("日本 text".encode("iso2022_jp"))
        find_sources(tmp_path / "japanese.txt", encoding="iso2022_jp")
        with pytest.warns(UserWarning, match=r"ascii\.txt is valid UTF-8 but was read as cp037; if it is UTF-8"):
            find_sources(tmp_path / "ascii.txt", encoding="cp037")

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be"])
    def test_utf_8_is_not_read_as_utf_16(self, tmp_path: Path, encoding: str) -> None:
        (tmp_path / "a.txt").write_bytes(b"plain text")
        (tmp_path / "b.txt").write_bytes(
            "Привет".encode(encoding)
        )  # its UTF-16 is valid UTF-8, too: control characters
        with refuses(InputError, f"a.txt is not {encoding}: it has no NUL byte", "without encoding="):
            find_sources(tmp_path, encoding=encoding)
        assert len(find_sources(tmp_path / "b.txt", encoding=encoding)) == 1
        (tmp_path / "b.txt").write_bytes("plain".encode("utf-16-le"))
        with refuses(InputError, "b.txt has no byte order mark, which utf-16 needs", "encoding='utf-16-le'"):
            find_sources(tmp_path / "b.txt", encoding="utf-16")

    @pytest.mark.parametrize("block", [7, 2**20])
    def test_documents_with_other_bytes_are_counted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
    ) -> None:
        small_blocks(monkeypatch, block)
        corpus = tmp_path / "corpus"
        corpus.mkdir()
        good = "日本語 é 🙂 " * 99
        bad = good.encode() + b"\xff" + good.encode() + b"\xfe"
        (corpus / "a.txt").write_bytes(b"|".join([good.encode(), bad, b"x", bad, good.encode()[:-2]]))
        lines = [b'{"text": "%s"}' % text for text in (good.encode(), b"\xff", "\ufffd".encode(), b"\xff")]
        (corpus / "b.jsonl").write_bytes(b"\n".join(lines))
        with pytest.warns(UserWarning, match=r"5 documents were read with replace.*a\.txt \(3\), .*b\.jsonl \(2\)"):
            store = prepare(corpus, tmp_path / "store", tokenizer="bytes", separator="|", workers=1)
        found = {Path(path).name: count for path, count in problems(store).not_utf8.items()}
        assert found == {"a.txt": 3, "b.jsonl": 2}

    @pytest.mark.parametrize("name", ["klingon", "idna", "punycode", "undefined", "rot13", "base64", "hex", "zip"])
    def test_what_is_not_an_encoding_of_files_is_refused_before_they_are_read(self, tmp_path: Path, name: str) -> None:
        for call in (find_sources, lambda paths, encoding: estimate(paths, tokenizer="bytes", encoding=encoding)):
            with refuses(InputError, f"got '{name}', which Python does not know as an encoding of text files"):
                call(tmp_path, encoding=name)
