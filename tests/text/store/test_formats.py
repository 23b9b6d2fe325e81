"""Other programs read what we write, and we read what they write: their own code is the oracle both ways."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from locant import InputError, RangeError, Tokenizer
from locant.text.store import ShardWriter, TokenStore, export_store
from tests.refusal import refuses
from tests.text.store.made import BYTES, SHARDS, TOKENS, make
from tests.text.store.other_programs import datatrove_reader, datatrove_writes, megatron_reader, megatron_writes

DOCUMENTS = [document for shard in SHARDS for document in shard]
ENDS = np.cumsum([len(document) for document in DOCUMENTS]).tolist()
WIDE = [[70_000, 1], [], [65_536]]


@pytest.mark.parametrize("mmap", [True, False])
def test_megatron_reads_every_shard_as_it_is(tmp_path: Path, mmap: bool) -> None:
    store = make(tmp_path / "store")
    for number, documents in enumerate(SHARDS):
        if not any(documents):
            continue  # Megatron-LM cannot map a file of no bytes
        theirs = megatron_reader(store.path / f"shard-{number:05d}", mmap=mmap)
        assert [theirs[i].tolist() for i in range(len(theirs))] == documents
        assert theirs.document_indices.tolist() == list(range(len(documents) + 1))
        assert theirs.index.dtype is np.uint16


def test_megatron_reads_a_large_vocabulary(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 0, 70_001) as writer:
        writer.append(np.array([70_000, 65_536, 0]), np.array([1, 2]))
        writer.close()
    theirs = megatron_reader(tmp_path / "shard-00000")
    assert [theirs[i].tolist() for i in range(2)] == [[70_000], [65_536, 0]]
    assert theirs.index.dtype is np.int32


def test_megatron_writes_the_very_same_bytes(tmp_path: Path) -> None:
    store = make(tmp_path / "store")
    megatron_writes(tmp_path / "theirs", [[document] for document in SHARDS[2]], np.uint16)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"theirs.{suffix}").read_bytes() == (store.path / f"shard-00002.{suffix}").read_bytes()


def test_an_exported_nanogpt_file(tmp_path: Path) -> None:
    export = export_store(make(tmp_path / "store"), tmp_path / "out", to="nanogpt")
    assert export.files == ["tokenizer.json", "train.bin"]
    assert np.memmap(tmp_path / "out" / "train.bin", dtype=np.uint16, mode="r").tolist() == TOKENS.tolist()
    assert Tokenizer.load(tmp_path / "out").fingerprint == BYTES.fingerprint


def test_datatrove_reads_exported_files(tmp_path: Path) -> None:
    store = make(tmp_path / "store", [[[5, 6, 7], [8], [9, 10]], [[11], [1, 2, 3, 4, 5, 6]]])
    export_store(store, tmp_path / "out", to="datatrove")
    got = []
    for name in ("00000.ds", "00001.ds"):
        theirs = datatrove_reader(tmp_path / "out" / name, seq_len=2, token_size=2)
        got += [theirs[i] for i in range(len(theirs))]
    assert [item["input_ids"].tolist() for item in got] == [[5, 6, 7], [8, 9, 10], [11, 1, 2], [3, 4, 5]]
    assert got[0]["positions"].tolist() == [0, 1, 2]
    assert got[1]["positions"].tolist() == [0, 0, 1]


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx", None])
def test_megatrons_own_files(tmp_path: Path, suffix: str | None) -> None:
    sequences = [[[1, 2], [3]], [[]], [[4, 5, 6], [], [7]]]
    megatron_writes(tmp_path / "data", sequences, np.uint16)
    store = TokenStore(tmp_path if suffix is None else tmp_path / f"data{suffix}", format="megatron")
    assert (store[:].tolist(), store.dtype) == ([1, 2, 3, 4, 5, 6, 7], np.uint16)
    assert store.documents.tolist() == [0, 3, 3, 7]
    store.verify()
    assert pickle.loads(pickle.dumps(store)) == store  # noqa: S301  # our own


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_megatrons_dtypes(tmp_path: Path, dtype: type) -> None:
    megatron_writes(tmp_path / "data", [[[1, 2]], [[100]]], dtype)
    store = TokenStore(tmp_path / "data", format="megatron")
    assert (store.dtype, store[:].tolist(), store.documents.tolist()) == (dtype, [1, 2, 100], [0, 2, 3])


def test_megatrons_floats_and_pictures_are_refused(tmp_path: Path) -> None:
    megatron_writes(tmp_path / "data", [[[1]]], np.float32)
    with refuses(InputError, "code 7"):
        TokenStore(tmp_path / "data", format="megatron")
    megatron_writes(tmp_path / "data", [[[1]]], np.int32)
    with (tmp_path / "data.idx").open("ab") as file:
        file.write(b"\0")
    with refuses(InputError, "mode for each sequence"):
        TokenStore(tmp_path / "data", format="megatron")


def test_megatrons_truncated_tokens_are_refused(tmp_path: Path) -> None:
    megatron_writes(tmp_path / "data", [[[1, 2, 3]]], np.uint16)
    (tmp_path / "data.bin").write_bytes(b"\1\0\2\0")
    with refuses(InputError, "has 2 tokens", "counts 3"):
        TokenStore(tmp_path / "data", format="megatron")


@pytest.mark.parametrize("token_size", [2, 4])
@pytest.mark.parametrize("metadata", [True, False])
def test_datatroves_own_files(tmp_path: Path, token_size: int, metadata: bool) -> None:
    wide = token_size == 4
    files = {"00000_b.ds": WIDE if wide else DOCUMENTS, "00000_a.ds": [[3, 2], [1]]}
    for name, documents in files.items():
        datatrove_writes(tmp_path, name, documents, token_size, save_final_metadata=metadata)
    store = TokenStore(tmp_path, format="datatrove", dtype=None if metadata else f"uint{8 * token_size}")
    documents = [*files["00000_a.ds"], *files["00000_b.ds"]]
    assert store.dtype == f"uint{8 * token_size}"
    assert store[:].tolist() == [token for document in documents for token in document]
    assert store.documents.tolist() == [0, *np.cumsum([len(document) for document in documents]).tolist()]
    assert len(store.shards) == 2
    store.verify()


def test_datatroves_index_has_to_cover_the_tokens(tmp_path: Path) -> None:
    datatrove_writes(tmp_path, "a.ds", DOCUMENTS, 2)
    store = TokenStore(tmp_path / "a.ds", format="datatrove")
    assert store.documents.tolist() == [0, *ENDS]
    for wrong in ([*ENDS[:-1], ENDS[-1] - 1], [5, 4, ENDS[-1]], [2**63, ENDS[-1]], []):
        (tmp_path / "a.ds.index").write_bytes(np.array(wrong, dtype="<u8").tobytes())
        with refuses(InputError, "a.ds.index"):
            TokenStore(tmp_path / "a.ds", format="datatrove").verify()
    (tmp_path / "a.ds.index").unlink()
    with refuses(InputError, "a.ds.index", "end_of_text"):
        _ = TokenStore(tmp_path / "a.ds", format="datatrove").documents
    assert TokenStore(tmp_path, format="datatrove", end_of_text=256).documents.tolist() == [0, 5, 13]


def test_nanogpts_own_file(tmp_path: Path) -> None:
    """As its `prepare.py` writes it, character by character in a memory map."""
    arr = np.memmap(tmp_path / "train.bin", dtype=np.uint16, mode="w+", shape=(len(TOKENS),))
    arr[:] = TOKENS
    arr.flush()
    store = TokenStore(tmp_path / "train.bin", format="nanogpt")
    assert (store[:].tolist(), store.vocab_size, store.end_of_text) == (TOKENS.tolist(), None, None)
    with refuses(InputError, "where its documents begin", "end_of_text"):
        _ = store.documents
    with refuses(InputError, "no tokenizer", "tokenizer="):
        _ = store.tokenizer
    with refuses(InputError, "no manifest"):
        _ = store.manifest
    with_ends = TokenStore(tmp_path, format="nanogpt", end_of_text=256, tokenizer=BYTES)
    assert with_ends.documents.tolist() == [0, 5, 13]
    assert with_ends.tokenizer is BYTES
    assert with_ends != store


@pytest.mark.parametrize("end_of_text", [-1, 257, "256", True, 1.5])
def test_an_end_of_text_that_no_token_can_be_is_refused(tmp_path: Path, end_of_text: int) -> None:
    TOKENS.astype("<u2").tofile(tmp_path / "train.bin")
    with refuses(RangeError, "end_of_text"):
        TokenStore(tmp_path, format="nanogpt", tokenizer=BYTES, end_of_text=end_of_text)
    if end_of_text == 257:  # without a tokenizer, what the dtype can hold
        assert TokenStore(tmp_path, format="nanogpt", end_of_text=2**16 - 1).documents.tolist() == [0, len(TOKENS)]
        with refuses(RangeError, "at most 65535"):
            TokenStore(tmp_path, format="nanogpt", end_of_text=2**16)


def test_nanogpt_files_of_other_dtypes(tmp_path: Path) -> None:
    np.array([1, 70_000], dtype=np.uint32).tofile(tmp_path / "a.bin")
    assert TokenStore(tmp_path, format="nanogpt", dtype="uint32")[:].tolist() == [1, 70_000]
    for dtype in ("float32", ">u2", "what", "M8[s]"):
        with refuses(InputError, dtype):
            TokenStore(tmp_path, format="nanogpt", dtype=dtype)
    (tmp_path / "a.bin").write_bytes(b"\1\2\3")
    with refuses(InputError, "3 bytes", "uint16"):
        TokenStore(tmp_path / "a.bin", format="nanogpt")


def test_a_training_and_a_validation_split_are_not_joined(tmp_path: Path) -> None:
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(b"\1\0")
    with refuses(InputError, "train.bin, val.bin"):
        TokenStore(tmp_path, format="nanogpt")


@pytest.mark.parametrize("tokenizer", [5, [], 0, b"gpt2"])
def test_what_is_no_tokenizer_is_named(tmp_path: Path, tokenizer: object) -> None:
    (tmp_path / "a.bin").write_bytes(b"\1\0")
    with refuses(InputError, f"got {tokenizer!r} as a tokenizer, expected a path or a name"):
        TokenStore(tmp_path / "a.bin", format="nanogpt", tokenizer=tokenizer)


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, np.uint16), (20240801, 7, np.uint32)])
def test_files_of_llm_c_are_read_without_their_header(tmp_path: Path, magic: int, version: int, dtype: Any) -> None:
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, 5
    for number in range(2):
        tokens = np.arange(5, dtype=dtype) + 10 * number
        (tmp_path / f"fineweb_train_{number:06d}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    store = TokenStore(tmp_path, format="nanogpt")
    assert (store[:].tolist(), store.dtype) == ([0, 1, 2, 3, 4, 10, 11, 12, 13, 14], np.dtype(dtype))
    store.verify()
    with refuses(InputError, "its header states 5"), (tmp_path / "fineweb_train_000000.bin").open("ab") as file:
        file.write(bytes(8))
        file.flush()
        TokenStore(tmp_path / "fineweb_train_000000.bin", format="nanogpt")
    (tmp_path / "fineweb_val_000000.bin").write_bytes(tokens.tobytes())
    with refuses(InputError, "several splits: fineweb_train_000001.bin, fineweb_val_000000.bin", "pass one file"):
        TokenStore(tmp_path, format="nanogpt")
    header[0] = 20240522
    (tmp_path / "hellaswag.bin").write_bytes(header.tobytes())
    with refuses(InputError, "an evaluation file of llm.c"):
        TokenStore(tmp_path / "hellaswag.bin", format="nanogpt")


def test_ids_beyond_the_given_tokenizer_are_found(tmp_path: Path) -> None:
    np.array([1, 257, 3], dtype=np.uint16).tofile(tmp_path / "a.bin")
    store = TokenStore(tmp_path / "a.bin", format="nanogpt", tokenizer=BYTES)
    with refuses(InputError, "id 257 at place 1"):
        store.verify()
    for to in ("nanogpt", "datatrove", "megatron", "locant"):
        with refuses(RangeError, "id 257"):
            export_store(
                TokenStore(tmp_path / "a.bin", format="nanogpt", tokenizer=BYTES, end_of_text=3),
                tmp_path / "out",
                to=to,
            )
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


@pytest.mark.parametrize("format", ["nanogpt", "megatron", "datatrove"])
def test_what_is_not_there(tmp_path: Path, format: str) -> None:  # noqa: A002
    for path in (tmp_path / "nothing", tmp_path):
        with refuses(InputError, str(path)):
            TokenStore(path, format=format)


def test_a_store_goes_round_through_every_format(tmp_path: Path) -> None:
    store = make(tmp_path / "store", end_of_text=256)
    steps = [("megatron", "tokens"), ("datatrove", "."), ("locant", ".")]
    current = store
    for to, name in steps:
        export_store(current, tmp_path / to, to=to)
        options = {} if to == "locant" else {"tokenizer": BYTES, "end_of_text": 256}
        current = TokenStore(tmp_path / to / name, format=to, **options)
    current.verify()
    assert (current[:].tolist(), current.documents.tolist()) == (store[:].tolist(), store.documents.tolist())
    assert (current.end_of_text, current.tokenizer.fingerprint) == (256, BYTES.fingerprint)
    (source,) = current.manifest.sources
    assert source["size"] == 2 * len(TOKENS)


@pytest.mark.parametrize(("vocab_size", "size"), [(65_500, 2), (65_536, 2), (65_537, 4)])
def test_two_bytes_as_long_as_they_suffice(tmp_path: Path, vocab_size: int, size: int) -> None:
    """Megatron-LM goes to four earlier than the others."""
    ids = np.array([0, vocab_size - 1], dtype=np.int32)
    ids.tofile(tmp_path / "a.bin")
    source = TokenStore(tmp_path / "a.bin", format="nanogpt", dtype="int32", end_of_text=vocab_size - 1)
    for to, name in (("nanogpt", "train.bin"), ("datatrove", "00000.ds")):
        export_store(source, tmp_path / to, to=to)
        data = np.fromfile(tmp_path / to / name, f"<u{size}")
        assert data.tolist() == ids.tolist()
    export_store(source, tmp_path / "megatron", to="megatron")
    assert (tmp_path / "megatron" / "tokens.bin").stat().st_size == 8


def test_long_documents_are_exported_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locant.text.store.formats.base.BLOCK", 3)
    store = make(tmp_path / "store", [[[1] * 7, [], [2, 3], [4] * 3, [5], [6] * 4, []]])
    export_store(store, tmp_path / "out", to="megatron")
    theirs = megatron_reader(tmp_path / "out" / "tokens")
    assert [theirs[i].tolist() for i in range(len(theirs))] == [[1] * 7, [], [2, 3], [4] * 3, [5], [6] * 4, []]


def test_a_folder_in_use_stays_as_it_is(tmp_path: Path) -> None:
    store = make(tmp_path / "store")
    before = {path.name: path.read_bytes() for path in store.path.iterdir()}
    with refuses(InputError, "not empty"):
        export_store(store, store.path, to="nanogpt")
    assert {path.name: path.read_bytes() for path in store.path.iterdir()} == before
    with refuses(RangeError, "'parquet'"):
        export_store(store, tmp_path / "out", to="parquet")
    with refuses(InputError, "no folder"):
        export_store(store, tmp_path / "no" / "out", to="nanogpt")


def test_ours_needs_a_tokenizer(tmp_path: Path) -> None:
    np.array([1, 2], dtype=np.uint16).tofile(tmp_path / "a.bin")
    with refuses(InputError, "without a tokenizer"):
        export_store(TokenStore(tmp_path / "a.bin", format="nanogpt"), tmp_path / "out", to="locant")
    assert not (tmp_path / "out").exists()
