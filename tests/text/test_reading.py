"""Texts are read as they stand, and what is no text is refused by name and place."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from locant.errors import InputError
from locant.text import read_texts, sample_text


class TestSampleText:
    def test_it_is_a_long_english_text(self) -> None:
        text = sample_text()
        words = text.split()
        assert 400_000 < len(text) < 700_000
        assert words.count("the") > 3_000
        assert not {"\0", "\r"} & set(text)

    def test_it_holds_every_topic_once(self) -> None:
        from pydoc_data.topics import topics

        text = sample_text()
        assert all(topic.strip("\n") in text for topic in topics.values())
        assert len(text) < sum(map(len, topics.values())) + 3 * len(topics)

    def test_it_is_the_same_in_every_run(self) -> None:
        code = "import sys; from locant.text import sample_text; sys.stdout.buffer.write(sample_text().encode())"
        environment = {**os.environ, "PYTHONHASHSEED": "7"}
        other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
        assert other.stdout.decode() == sample_text()

    def test_a_python_without_it_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pydoc_data", None)
        with pytest.raises(InputError, match=r"has none; try: pass a text file"):
            sample_text()


class TestReadTexts:
    def test_one_document_per_file_in_the_given_order(self, tmp_path: Path) -> None:
        for name in ("b.txt", "a.md"):
            (tmp_path / name).write_text(f"in {name}", encoding="utf-8")
        assert read_texts([tmp_path / "b.txt", str(tmp_path / "a.md")]) == ["in b.txt", "in a.md"]
        assert read_texts([]) == []

    def test_newlines_and_spaces_stay_as_they_are(self, tmp_path: Path) -> None:
        data = b"\r\n one\r two\n\n\tthree \r\n\x0b\x0c\x85 \xe2\x80\xa8".replace(b"\x85", b"\xc2\x85")
        (tmp_path / "a.txt").write_bytes(data)
        assert read_texts(tmp_path / "a.txt")[0].encode() == data

    def test_only_the_first_byte_order_mark_goes(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" * 2 + b"text")
        assert read_texts(str(tmp_path / "a.txt")) == ["\ufefftext"]

    def test_a_dash_is_standard_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("né\r\n".encode()), encoding="latin-1"))
        assert read_texts("-") == ["né\r\n"]

    def test_bad_standard_input_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
        with pytest.raises(InputError, match="standard input is empty"):
            read_texts(["-"])

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "is empty"),
            (b"\xef\xbb\xbf", "is empty"),
            (b"PNG\x00\x01", "is binary: byte 3 is NUL"),
            (b"\x00", "is binary: byte 0 is NUL"),
            (b"caf\xe9 au lait", r"is not UTF-8: byte 3 is 0xe9 \(invalid continuation byte\)"),
            (b"\xef\xbb\xbfa\xff", "byte 4 is 0xff"),
            (b"abc\xe2\x82", "byte 3 is 0xe2"),
            (b"\xed\xa0\x80", "byte 0 is 0xed"),  # a surrogate is no character
            ("né".encode("utf-16"), "begins like UTF-16"),
            ("né".encode("utf-32"), "begins like UTF-32"),
            ("né".encode("utf-16-be"), "byte 0 is NUL"),
        ],
    )
    def test_what_is_no_text_is_refused_with_the_offset(self, tmp_path: Path, data: bytes, message: str) -> None:
        path = tmp_path / "given.txt"
        path.write_bytes(data)
        with pytest.raises(InputError, match=message) as caught:
            read_texts(path)
        assert str(path) in caught.value.cause
        assert caught.value.remedy

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            (Path("nowhere.txt"), r"nowhere\.txt, but there is no such file; try: "),
            (Path(), r"is a folder, expected a text file; try: .*\*\.txt"),
            ("a\0b", r"'a\\x00b', which cannot be the name of a file"), ("a" * 5000, "cannot read"),
            ("/dev/zero", "/dev/zero, which is a device"),
        ],
    )  # fmt: skip
    def test_what_is_no_file_is_named(self, path: str | Path, message: str) -> None:
        with pytest.raises(InputError, match=message):
            read_texts([path])

    def test_a_file_that_may_not_be_read_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(
            InputError, match=r"cannot read .*a\.txt: Permission denied; try: use a file that you may read"
        ):
            read_texts(tmp_path / "a.txt")
