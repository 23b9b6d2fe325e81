"""A format from outside the package does all that the built-in ones do."""

from __future__ import annotations

import pickle
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from locant import InputError, RangeError, Windows, formats
from locant.formats import ExportSource, StoreFormat, StoreOptions
from locant.text.store import TokenStore, export_store
from locant.text.store.formats import FORMATS
from tests.refusal import refuses
from tests.registries import restore
from tests.text.store.made import BYTES, SHARDS, TOKENS, make

OFFSETS = [0, *np.cumsum([len(document) for shard in SHARDS for document in shard]).tolist()]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    restore(FORMATS, monkeypatch)
    formats.register_format("npy", Npy)


@pytest.mark.parametrize("mode", ["map", "read"])
def test_it_is_written_and_read(tmp_path: Path, mode: str) -> None:
    export = export_store(make(tmp_path / "store"), tmp_path / "npy", to="npy")
    assert (export.dtype, export.files) == ("uint16", ["documents.npy", "tokenizer.json", "tokens.npy"])
    assert np.load(tmp_path / "npy" / "tokens.npy").tolist() == TOKENS.tolist()
    opened = TokenStore(tmp_path / "npy", format="npy", mode=mode, tokenizer=BYTES)
    opened.verify()
    assert (opened[:].tolist(), opened[3:9].tolist(), opened[-1]) == (TOKENS.tolist(), TOKENS[3:9].tolist(), TOKENS[-1])
    assert opened[::-3].tolist() == TOKENS[::-3].tolist()
    assert opened.documents.tolist() == OFFSETS
    assert pickle.loads(pickle.dumps(opened)) == opened  # noqa: S301  # our own
    for batch, ids in zip(Windows(opened, 5), Windows(TOKENS, 5), strict=True):
        assert batch["targets"].tolist() == ids["targets"].tolist()


def test_it_becomes_a_locant_store_and_any_other(tmp_path: Path) -> None:
    export_store(make(tmp_path / "store", end_of_text=256), tmp_path / "npy", to="npy")
    opened = TokenStore(tmp_path / "npy", format="npy", tokenizer=BYTES, end_of_text=256)
    for to in ("locant", "megatron", "nanogpt", "datatrove"):
        export_store(opened, tmp_path / to, to=to)
    back = TokenStore(tmp_path / "locant")
    back.verify()
    assert (back[:].tolist(), back.documents.tolist(), back.end_of_text) == (TOKENS.tolist(), OFFSETS, 256)
    assert back.manifest.sources[0]["size"] == (tmp_path / "npy" / "tokens.npy").stat().st_size
    assert np.fromfile(tmp_path / "nanogpt" / "train.bin", np.uint16).tolist() == TOKENS.tolist()


def test_an_installed_package_offers_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = EntryPoint("numpy_arrays", "tests.text.store.test_registered_format:Npy", "locant.formats")
    monkeypatch.setattr("locant.registry.entry_points", lambda group: [entry] if group == "locant.formats" else [])
    monkeypatch.setattr(FORMATS, "_offers", None)
    monkeypatch.setattr("locant.registry.LOADED", [])
    export_store(make(tmp_path / "store"), tmp_path / "npy", to="numpy_arrays")
    assert TokenStore(tmp_path / "npy", format="numpy_arrays")[:].tolist() == TOKENS.tolist()


def test_what_is_no_format_is_refused() -> None:
    for wrong in (TokenStore, 5, Npy.write):
        with refuses(RangeError, "'other'", "StoreFormat"):
            formats.register_format("other", wrong)  # type: ignore[arg-type]
    with refuses(RangeError, "'megatron'"):
        formats.register_format("megatron", Npy)


def test_a_format_without_write_can_only_be_read(tmp_path: Path) -> None:
    formats.register_format("tokens_only", type("TokensOnly", (formats.StoreFormat,), {}))
    with refuses(InputError, "TokensOnly"):
        export_store(make(tmp_path / "store"), tmp_path / "out", to="tokens_only")
    assert not (tmp_path / "out").exists()


class Npy(StoreFormat):
    """``tokens.npy``, and ``documents.npy`` with where each document begins."""

    def __init__(self, path: Path, options: StoreOptions) -> None:
        tokens = np.load(path / "tokens.npy", mmap_mode="r")
        super().__init__([path / "tokens.npy"], tokens.dtype, options, header=tokens.offset)
        self._documents = path / "documents.npy"

    def offsets(self, shard: int) -> np.ndarray:
        return np.load(self._documents)

    @classmethod
    def write(cls, source: ExportSource, folder: Path) -> np.dtype:
        np.save(folder / "tokens.npy", np.concatenate([*source.blocks()]).astype(source.dtype))
        np.save(folder / "documents.npy", source.store.all_offsets())
        return source.dtype
