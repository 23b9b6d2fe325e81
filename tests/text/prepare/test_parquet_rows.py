"""How Parquet is read, and what is refused; and what is read without pyarrow."""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import pytest

from locant.errors import InputError
from locant.text.prepare import parquet_rows
from locant.text.prepare.sources import find_sources
from tests.text.prepare.corpus import texts, write

zstandard = pytest.importorskip("zstandard")
pa = pytest.importorskip("pyarrow")

parquet = pytest.importorskip("pyarrow.parquet")


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
        monkeypatch.setattr(parquet_rows, "MAX_ROW_GROUP", 100)
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
