"""`ShardWriter` and `token_dtype`: what is written is what was given, or it is refused."""

from __future__ import annotations

import hashlib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from locant import RangeError, ShapeError
from locant.files import NewFile
from locant.text.store import FileRecord, ShardWriter, token_dtype
from locant.text.store.formats.shards import IndexWriter, read_index
from tests.refusal import refuses

INTEGERS = [np.dtype(order + kind) for order in "<>" for kind in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")]
EDGES = [65_499, 65_500, 65_535, 65_536, 65_537]


def tokens_of(folder: Path, vocab_size: int) -> np.ndarray:
    """Without our reader: the dtype from Megatron-LM's rule, and nothing but tokens in the file."""
    return np.fromfile(folder / "shard-00000.bin", "<u2" if vocab_size < 65_500 else "<i4")


@pytest.mark.parametrize(
    ("vocab_size", "name"),
    [(1, "<u2"), (65_499, "<u2"), (65_500, "<i4"), (65_535, "<i4"), (65_536, "<i4"), (65_537, "<i4"), (2**31, "<i4")],
)
def test_the_dtype_of_a_vocabulary(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size) == np.dtype(name)


@pytest.mark.parametrize("vocab_size", [0, -1, 2**31 + 1])
def test_a_vocabulary_has_to_fit(vocab_size: int) -> None:
    with refuses(RangeError, str(vocab_size)):
        token_dtype(vocab_size)


@given(st.sampled_from(INTEGERS), st.sampled_from([1, 100, 127, 128, 129, 255, 256, 257, *EDGES, 2**31]), st.data())
def test_every_integer_dtype_is_kept_or_refused(
    tmp_path_factory: pytest.TempPathFactory, dtype: np.dtype, vocab_size: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    info = np.iinfo(dtype)
    edges = [n for n in (-1, 0, vocab_size - 1, vocab_size, info.min, info.max) if info.min <= n <= info.max]
    numbers = data.draw(st.lists(st.integers(info.min, info.max) | st.sampled_from(edges), max_size=8))
    ids = np.array(numbers, dtype=dtype)[::-1]
    with ShardWriter(folder, 0, vocab_size) as writer:
        if all(0 <= number < vocab_size for number in numbers):
            writer.append(ids, np.array([len(ids)], dtype=np.uint8))
            writer.close()
            assert tokens_of(folder, vocab_size).tolist() == numbers[::-1]
        else:
            with refuses(RangeError, "got id"):
                writer.append(ids, np.array([len(ids)]))
            assert (writer.tokens, writer.documents) == (0, 0)


@given(st.lists(st.lists(st.integers(0, 5), max_size=5), max_size=6))
def test_documents_of_any_length(tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]]) -> None:
    folder = tmp_path_factory.mktemp("shard")
    with ShardWriter(folder, 0, 300) as writer:
        for lengths in batches:
            writer.append(np.arange(sum(lengths)), np.array(lengths, dtype=np.int32))
        record = writer.close()
    lengths = [length for batch in batches for length in batch]
    assert read_index(folder / "shard-00000.idx").sequences.tolist() == lengths
    assert (record.tokens, record.documents) == (sum(lengths), len(lengths))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.lists(st.integers(0, 40), max_size=6))
def test_a_document_may_come_in_parts(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], cuts: list[int]
) -> None:
    """Cut anywhere, also where a document ends or has no token, the files are those of one call."""
    folders = [tmp_path_factory.mktemp("shard") for _ in range(2)]
    ids = np.arange(sum(lengths))
    with ShardWriter(folders[0], 0, 300) as writer:
        writer.append(ids, np.array(lengths))
        whole = writer.close()
    with ShardWriter(folders[1], 0, 300) as writer:
        for number, length in enumerate(lengths):
            document = ids[sum(lengths[:number]) : sum(lengths[: number + 1])]
            for part, piece in enumerate(np.split(document, sorted(cut for cut in cuts if cut <= length))):
                writer.append(piece, np.array([len(piece)]), continues=part > 0)
        assert writer.documents == len(lengths)
        assert writer.close() == whole


def test_the_record_is_what_lies_on_the_disk(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 12, 70_000) as writer:
        writer.append(np.array([69_999, 3]), np.array([0, 2]))
        assert (writer.tokens, writer.documents) == (2, 2)
        record = writer.close()
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert files.keys() == {"shard-00012.bin", "shard-00012.idx"}
    for name, said in (("shard-00012.bin", record.bin), ("shard-00012.idx", record.idx)):
        assert said == FileRecord(size=len(files[name]), sha256=hashlib.sha256(files[name]).hexdigest())


@pytest.mark.parametrize(
    ("ids", "lengths"),
    [
        ([1, 2, 3], [2]), ([1, 2, 3], [2, 2]), ([1, 2, 3], [4, -1]), ([1], []), ([], [1]), ([1], [0]),
        ([], [2**62, 2**62, 2**62, 2**62]),
    ],
)  # fmt: skip
def test_lengths_have_to_add_up(tmp_path: Path, ids: list[int], lengths: list[int]) -> None:
    with ShardWriter(tmp_path, 0, 300) as writer:
        with refuses(ShapeError, f"{len(ids)} ids"):
            writer.append(np.array(ids, dtype=np.int64), np.array(lengths, dtype=np.int64))
        assert (writer.tokens, writer.documents) == (0, 0)


def test_what_is_no_axis_of_integers(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 0, 300) as writer:
        for wrong in (np.array([1.0]), np.array([[1]]), [1], np.array([True])):
            with refuses(ShapeError, "ids"):
                writer.append(wrong, np.array([1]))
            with refuses(ShapeError, "lengths"):
                writer.append(np.array([1]), wrong)
        with refuses(ShapeError, "continues"):
            writer.append(np.array([1]), np.array([1]), continues=True)


def test_an_unfinished_shard_leaves_nothing(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 0, 300) as writer:
        writer.append(np.array([1]), np.array([1]))
        assert len(list(tmp_path.iterdir())) == 2
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError), ShardWriter(tmp_path, 0, 300):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_document_longer_than_the_format_can_say(tmp_path: Path) -> None:
    longest = 2**31 - 1
    with NewFile(tmp_path / "a.idx") as file:
        writer = IndexWriter(file, np.dtype("<u2"))
        writer.append(np.array([longest]), continues=False)
        for lengths, continues in (([1], True), ([5, longest + 1], False)):
            with refuses(RangeError, str(longest + 1), "separator"):
                writer.append(np.array(lengths), continues=continues)
        writer.append(np.array([0, 7]), continues=True)
        writer.finish()
        file.fsync()
        file.publish()
    assert read_index(tmp_path / "a.idx").sequences.tolist() == [longest, 7]


def test_memory_does_not_grow_with_the_shard(tmp_path: Path) -> None:
    """Many times the buffers, in tokens and in documents."""
    ids, lengths = np.zeros(100_000, dtype=np.int64), np.ones(100_000, dtype=np.int64)
    peaks = []
    for times in (10, 30):
        with ShardWriter(tmp_path, 0, 300) as writer:
            tracemalloc.start()
            for _ in range(times):
                writer.append(ids, lengths)
            writer.close()
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]
    index = read_index(tmp_path / "shard-00000.idx")  # which compares all places with the lengths
    assert (len(index.sequences), index.sequences.min(), index.sequences.max()) == (3_000_000, 1, 1)
    assert np.array_equal(index.documents, np.arange(3_000_001))
