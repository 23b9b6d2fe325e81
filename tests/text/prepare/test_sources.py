"""Which files are found, what is refused, and how each kind of them is read."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import sys
from pathlib import Path

import pytest

from locant.errors import InputError
from locant.text.prepare import json_lines, parquet_rows
from locant.text.prepare.byte_ranges import Source, Tally, cut
from locant.text.prepare.readers import documents
from locant.text.prepare.sources import find_sources, read_stdin
from tests.text.prepare.corpus import small_blocks, together

zstandard = pytest.importorskip("zstandard")  # an independent writer; pyarrow reads
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write(folder: Path, **files: bytes) -> None:
    for name, data in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def names(sources: list[Source], folder: Path) -> list[str]:
    return [os.path.relpath(source.path, folder) for source in sources]


def texts(*paths: str | Path, separator: str | None = None, field: str | None = None) -> list[bytes]:
    """All documents, joined where they come in parts."""
    sources = find_sources(paths, separator=separator, field=field)
    ranges = [byte_range for source in sources for byte_range in cut(source, 2**30)]
    return [text for byte_range in ranges for text in together(documents(byte_range, Tally()))]


def from_stdin(data: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: str) -> tuple[list[bytes], str]:
    """The documents of standard input, and its hash."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    source, sha256 = read_stdin(find_sources("-", **options)[0], folder / "stdin")
    (byte_range,) = cut(source, 2**30)
    return together(documents(byte_range, Tally())), sha256


class TestFinding:
    def test_a_folder_is_all_its_files_of_known_kinds_sorted(self, tmp_path: Path) -> None:
        write(
            tmp_path, b_txt=b"b", a__z_md=b"z", a__b_txt_gz=gzip.compress(b"x"), c_png=b"\0", Z_TXT=b"z", LICENSE=b"l"
        )
        write(tmp_path, _git__a_txt=b"hidden", a___hidden_txt=b"hidden")
        assert names(find_sources(tmp_path), tmp_path) == ["Z.TXT", "a/b.txt.gz", "a/z.md", "b.txt"]

    def test_paths_keep_their_order_and_what_they_find_is_sorted(self, tmp_path: Path) -> None:
        write(tmp_path, z__a_txt=b"1", z__b_txt=b"2", a_txt=b"3", b_md=b"4", c_bin=b"5")
        found = find_sources([tmp_path / "z", tmp_path / "*.*"])
        assert names(found, tmp_path) == ["z/a.txt", "z/b.txt", "a.txt", "b.md"]
        assert names(find_sources(tmp_path / "**" / "*.txt"), tmp_path) == ["a.txt", "z/a.txt", "z/b.txt"]
        assert names(find_sources(str(tmp_path / "**")), tmp_path) == ["a.txt", "b.md", "z/a.txt", "z/b.txt"]

    def test_a_name_that_looks_like_a_pattern_is_a_name_first(self, tmp_path: Path) -> None:
        write(tmp_path, **{"[1]_txt": b"1", "1_txt": b"2"})
        assert names(find_sources(tmp_path / "[1].txt"), tmp_path) == ["[1].txt"]

    def test_kind_compression_and_options_are_told(self, tmp_path: Path) -> None:
        write(tmp_path, a_md=b"1", b_jsonl_zst=zstandard.compress(b"{}"), c_txt=b"three")
        found = find_sources(tmp_path, separator="\n", field="body")
        assert [(s.kind, s.compression, s.separator, s.field) for s in found] == [
            ("text", None, "\n", "body"),
            ("jsonl", "zst", None, "body"),
            ("text", None, "\n", "body"),
        ]
        status = (tmp_path / "c.txt").stat()
        assert (found[2].size, found[2].mtime_ns) == (status.st_size, status.st_mtime_ns)
        assert {source.field for source in find_sources(tmp_path)} == {"text"}

    @pytest.mark.parametrize("spelled", ["./data", "data/", ".//data/.", "./data/a.txt", "data//*.txt"])
    def test_a_path_is_the_same_however_it_is_spelled(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelled: str
    ) -> None:
        write(tmp_path, data__a_txt=b"1")
        monkeypatch.chdir(tmp_path)
        assert find_sources(spelled) == find_sources("data/a.txt")

    def test_a_file_may_be_called_like_standard_input(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("-").write_text("x")
        with pytest.raises(InputError, match="expected a file that ends in"):
            find_sources("./-")

    def test_links_are_followed_and_loops_end(self, tmp_path: Path) -> None:
        write(tmp_path, data__a_txt=b"1", other__b_txt=b"2")
        (tmp_path / "data" / "more").symlink_to(tmp_path / "other")
        (tmp_path / "data" / "loop").symlink_to(tmp_path / "data")
        assert names(find_sources(tmp_path / "data"), tmp_path) == ["data/a.txt", "data/more/b.txt"]

    @pytest.mark.parametrize("again", ["a.txt", "./a.txt", ".", "*.txt", "link.md"])
    def test_a_file_that_is_named_twice_is_refused(self, tmp_path: Path, again: str) -> None:
        write(tmp_path, a_txt=b"1")
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "link.md").symlink_to(tmp_path / "a.txt")
        path = tmp_path / "sub" / again if "link" in again else f"{tmp_path}/{again}"
        with pytest.raises(InputError, match=r"twice.*try: pass it once"):
            find_sources([tmp_path / "a.txt", path])
        with pytest.raises(InputError, match="standard input twice"):
            find_sources(["-", "-"])

    @pytest.mark.parametrize(
        ("name", "data", "message"),
        [
            ("a.csv", b"x", r"expected a file that ends in \.txt, \.md, .*, with or .*; try: pass - < .*csv to read"),
            ("a.csv.xz", b"x", r"expected a file that ends in .*; try: xz -dc .*a.csv.xz \| locant prepare -"),
            ("a.gz", gzip.compress(b"x", mtime=0), "expected a file that ends in"),
            ("a.txt", b"PNG\0", "is binary: byte 3 is NUL"),
            ("a.txt", "PNG\0".encode("utf-16"), "is binary: byte 3 is NUL"),
            ("a.txt.gz", b"not zipped", "is not a complete gzip file: .*try: test it with gzip -t"),
            ("a.txt.gz", gzip.compress(b"PNG\0", mtime=0), "is binary: byte 3 is NUL"),
            ("a.txt.zst", b"not zipped", "is not a complete Zstandard file: .*try: test it with zstd -t"),
            ("a.txt.gz", b"", "is not a complete gzip file: it is empty"),
            ("a.txt.zst", b"", "is not a complete Zstandard file: it is empty"),
            ("a.parquet", b"PAR0...", "is not a Parquet file"),
        ],
    )
    def test_what_cannot_be_read_is_refused_when_it_is_found(
        self, tmp_path: Path, name: str, data: bytes, message: str
    ) -> None:
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(InputError, match=message) as caught:
            find_sources(path)
        assert str(path) in caught.value.cause

    def test_what_is_not_there_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"cannot read .*nowhere\.txt: no such file"):
            find_sources(tmp_path / "nowhere.txt")
        with pytest.raises(InputError, match="there is no file to read in"):
            find_sources(tmp_path)
        with pytest.raises(InputError, match=r"no file to read matches .*\*\.md"):
            find_sources(tmp_path / "*.md")
        with pytest.raises(InputError, match="got no path"):
            find_sources([])
        with pytest.raises(InputError, match="cannot be the name of a file"):
            find_sources("a\0.txt")

    def test_a_pipe_is_refused_without_waiting_for_it(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "a.txt")
        with pytest.raises(InputError, match="not a regular file"):
            find_sources(tmp_path / "a.txt")


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


GZIP = gzip.compress(b"one\n" * 50, mtime=0) + gzip.compress(b"two", mtime=0)
ZSTD = (
    zstandard.ZstdCompressor(write_checksum=True).compress(b"one\n" * 50)
    + b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"  # a frame to skip
    + zstandard.ZstdCompressor().compress(b"two")
)
ENDS = {"gz": {len(gzip.compress(b"one\n" * 50, mtime=0))}, "zst": set[int]()}
ENDS["zst"] = {len(ZSTD) - len(zstandard.ZstdCompressor().compress(b"two")) - skipped for skipped in (0, 11)}


@pytest.mark.parametrize(("suffix", "data"), [("gz", GZIP), ("zst", ZSTD)])
class TestCompressed:
    def test_is_read_to_the_end_of_its_last_member(self, tmp_path: Path, suffix: str, data: bytes) -> None:
        (tmp_path / f"a.txt.{suffix}").write_bytes(data)
        assert texts(tmp_path) == [b"one\n" * 50 + b"two"]
        (byte_range,) = cut(find_sources(tmp_path)[0], 5)
        tally = Tally()
        assert [*documents(byte_range, tally)]
        assert (tally.bytes, tally.sha256) == (len(data), hashlib.sha256(data).hexdigest())

    def test_that_breaks_off_anywhere_is_an_error(self, tmp_path: Path, suffix: str, data: bytes) -> None:
        path = tmp_path / f"a.txt.{suffix}"
        for size in range(len(data)):
            path.write_bytes(data[:size])
            if size not in ENDS[suffix]:  # a file of one member less
                with pytest.raises(InputError, match=r"a\.txt\.\w+ is not a complete"):
                    texts(path)

    def test_that_is_followed_by_something_else_is_an_error(self, tmp_path: Path, suffix: str, data: bytes) -> None:
        path = tmp_path / f"a.txt.{suffix}"
        path.write_bytes(data + b"something else")
        with pytest.raises(InputError, match="is not a complete"):
            texts(path)

    def test_with_a_flipped_bit_is_an_error_or_the_same(self, tmp_path: Path, suffix: str, data: bytes) -> None:
        if suffix == "zst":  # its second frame has no checksum, as the tool writes by default from a program
            data = zstandard.ZstdCompressor(write_checksum=True).compress(b"one\n" * 50)
        path = tmp_path / f"a.txt.{suffix}"
        path.write_bytes(data)
        whole = texts(path)
        for bit in range(len(data) * 8):
            path.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
            try:
                found = texts(path)
            except InputError:
                continue
            assert found == whole, bit


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


class TestParquet:
    @pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
    @pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
    @pytest.mark.parametrize("dictionary", [True, False])
    def test_any_column_of_texts_is_read(
        self, tmp_path: Path, kind: object, compression: str, dictionary: bool
    ) -> None:
        rows = ["one", None, "", "two é", "one"] * 3
        table = pa.table({"n": list(range(15)), "body": pa.array(rows, pa.string()).cast(kind)})
        options = {"row_group_size": 4, "compression": compression, "use_dictionary": dictionary}
        parquet.write_table(table, tmp_path / "a.parquet", **options)
        assert texts(tmp_path, field="body") == [row.encode() for row in rows if row]

    def test_a_column_may_lie_within(self, tmp_path: Path) -> None:
        rows = [{"body": "one", "n": 1}, None, {"body": None, "n": 2}, {"body": "two", "n": 3}]
        parquet.write_table(pa.table({"meta": rows}), tmp_path / "a.parquet")
        assert texts(tmp_path, field="meta.body") == [b"one", b"two"]

    @pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("zst", zstandard.compress)])
    def test_a_file_may_be_compressed_as_a_whole(self, tmp_path: Path, suffix: str, pack: object) -> None:
        sink = io.BytesIO()
        parquet.write_table(pa.table({"text": ["one", "two"]}), sink)
        (tmp_path / f"a.parquet.{suffix}").write_bytes(pack(sink.getvalue()))  # type: ignore[operator]
        assert texts(tmp_path) == [b"one", b"two"]

    def test_a_column_that_holds_no_text_is_refused(self, tmp_path: Path) -> None:
        parquet.write_table(pa.table({"n": [1], "lists": [["a", "b"]]}), tmp_path / "a.parquet")
        with pytest.raises(InputError, match=r"no column 'text'; its columns are: 'n', 'lists\.list\.element'"):
            texts(tmp_path)
        with pytest.raises(InputError, match="has INT64 in 'n', expected one text in each row"):
            texts(tmp_path, field="n")
        with pytest.raises(InputError, match="expected one text in each row"):
            texts(tmp_path, field="lists.list.element")

    def test_that_breaks_off_is_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        parquet.write_table(pa.table({"text": ["one", "two"]}), path)
        data = path.read_bytes()
        for size in range(4, len(data), 7):
            path.write_bytes(data[:size])
            with pytest.raises(InputError, match="cannot be read as Parquet"):
                texts(path)

    def test_that_claims_too_much_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parquet_rows, "LARGEST", 100)
        parquet.write_table(pa.table({"text": ["x" * 50, "y" * 60]}), tmp_path / "a.parquet")
        with pytest.raises(InputError, match=r"row group 0 has \d+ bytes of text, expected 100 at most"):
            texts(tmp_path)


class TestWithoutPyarrow:
    @pytest.mark.parametrize("name", ["a.parquet", "a.txt.zst"])
    def test_the_extra_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        (tmp_path / name).write_bytes(zstandard.compress(b"x") if name.endswith("zst") else b"PAR1")
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(InputError, match=rf"{name} needs pyarrow.*try: pip install 'locant\[data\]'"):
            find_sources(tmp_path)

    def test_everything_else_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        write(tmp_path, a_txt_gz=gzip.compress(b"one"), b_jsonl=b'{"text": "two"}')
        assert texts(tmp_path) == [b"one", b"two"]
