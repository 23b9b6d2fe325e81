"""Which files are found, and what is refused."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from locant.errors import InputError
from locant.text.prepare.byte_ranges import Source
from locant.text.prepare.sources import find_sources
from tests.text.prepare.corpus import write

zstandard = pytest.importorskip("zstandard")  # an independent writer; pyarrow reads

pa = pytest.importorskip("pyarrow")

parquet = pytest.importorskip("pyarrow.parquet")


def names(sources: list[Source], folder: Path) -> list[str]:
    return [os.path.relpath(source.path, folder) for source in sources]


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
