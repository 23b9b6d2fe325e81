"""Entries 84a to 84f, 84k and 84l: files of tokens, and what they are when they are not what they were."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from locant import InputError, LocantError, RangeError, Tokenizer
from locant.files import NewFile, write_whole
from locant.text.prepare import prepare
from locant.text.store import ShardWriter, TokenStore, token_dtype
from locant.text.store.formats.shards import read_index
from tests.known_bugs.exhibit import exhibit
from tests.text.store.made import MARKS, TOKENS, index_of, make, make_large

# ------------------------------------------------------------------ 84a: ids that wrap

RoundTrip = Callable[[Path, np.ndarray, int], np.ndarray]


def written_and_read(folder: Path, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    with ShardWriter(folder, 0, vocab_size) as writer:
        writer.append(ids, np.array([len(ids)]))
        writer.close()
    return np.fromfile(folder / "shard-00000.bin", token_dtype(vocab_size))


def cast_to(dtype_of: Callable[[int], type]) -> RoundTrip:
    def round_trip(folder: Path, ids: np.ndarray, vocab_size: int) -> np.ndarray:
        ids.astype(dtype_of(vocab_size)).tofile(folder / "a.bin")
        return np.fromfile(folder / "a.bin", dtype_of(vocab_size))

    return round_trip


def test_84a_ids_neither_wrap_nor_turn_negative() -> None:
    """Ids of a large vocabulary wrap in 16 bits.

    huggingface/transformers#2825, huggingface/datatrove#118, princeton-nlp/LLM-Shearing#65, urvashik/knnlm#6,
    NVIDIA-NeMo/Megatron-Bridge#5561: 45% of the ids were wrong for a vocabulary of 119,547 entries, because they were
    written as uint16. In int16 they turned negative.

    Check: `numpy.memmap(file, dtype).max()` must be larger than 65,535 for a large vocabulary.

    Test: six vocabularies around 2^16 come back; every other id is refused. The first twin wraps; the last one chooses
    well, and believes what it is given.
    """

    def check(write: RoundTrip) -> None:
        """Every id of a vocabulary comes back, and every other is refused."""
        for vocab_size in (65_499, 65_500, 65_535, 65_536, 65_537, 119_547):
            with tempfile.TemporaryDirectory() as name:
                ids = np.arange(0, vocab_size, 7)
                wrong = (write(Path(name), ids, vocab_size) != ids).mean()
                assert not wrong, f"{100 * wrong:.0f} % of ids wrapped at {vocab_size}"
        for vocab_size, other in itertools.product((65_499, 65_535, 65_536, 65_537), (2**16, 0, None)):
            id_ = -1 if other is None else vocab_size + other
            with tempfile.TemporaryDirectory() as name, suppress(RangeError):
                got = write(Path(name), np.array([1, id_]), vocab_size)
                raise AssertionError(f"id {id_} became {got[1]}")

    uint16, int16 = (cast_to(lambda size, of=of: of) for of in (np.uint16, np.int16))
    exhibit(check, written_and_read, twin=uint16, because="45 % of ids wrapped at 119547")
    exhibit(check, written_and_read, twin=int16, because="50 % of ids wrapped at 65499")
    by_size = cast_to(lambda size: np.uint16 if size <= 65_536 else np.int32)
    exhibit(check, written_and_read, twin=by_size, because="id 131035 became 65499")


# ------------------------------------------------------------------ 84b: offsets of 32 bits


def with_offsets_of_32_bits(prefix: Path, place: int) -> int:
    tokens = np.memmap(prefix.with_suffix(".bin"), dtype=np.uint16, mode="r")
    return int(tokens[int(np.array(place).astype(np.int32))])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_large(tmp_path_factory.mktemp("large"))


def test_84b_places_beyond_32_bits_are_the_right_ones(large: Path) -> None:
    """Offsets of 32 bits read other tokens.

    NVIDIA/Megatron-LM#1672, #1056, deepspeedai/Megatron-DeepSpeed#106, vllm-project/vllm#16806: A file of 40 billion
    tokens was read at wrong places. An offset of 32 bits wraps, and raises no error if the place exists.

    Check: Compare the last document of a large file with its text.

    Test: a sparse file of 6.4 billion tokens, through the store and the index. Slices, documents and what Megatron-LM
    itself reads there are in `tests/text/store/test_large.py`.
    """

    def check(read: Callable[[Path, int], int]) -> None:
        for place, mark in MARKS.items():
            got = read(large / "shard-00000", place)
            assert got == mark, f"got {got} at place {place}, which holds {mark}"

    def by_the_store(prefix: Path, place: int) -> int:
        return TokenStore(prefix, format="megatron")[place]

    exhibit(check, by_the_store, twin=with_offsets_of_32_bits, because="got 0 at place 2147483648")


# ------------------------------------------------------------------ 84c: reads that come up short


def opened_in(mode: Any) -> Callable[[Path], Callable[[], np.ndarray]]:
    def opened(folder: Path) -> Callable[[], np.ndarray]:
        store = TokenStore(folder, mode=mode)
        return lambda: store[4:10]

    return opened


def into_an_empty_array(folder: Path) -> Callable[[], np.ndarray]:
    size = (folder / "shard-00002.bin").stat().st_size

    def read() -> np.ndarray:
        ids = np.full(size // 2, 0xDEAD, dtype=np.uint16)  # what memory holds that nobody has written to
        with (folder / "shard-00002.bin").open("rb", buffering=0) as file:
            file.readinto(ids)
        return ids

    return read


def test_84c_a_short_read_is_no_result(tmp_path: Path) -> None:
    """A short read leaves a buffer half filled.

    mindspore/hyper-parallel#156: `readinto` returned how much it had read, and the code did not look at it. The rest of
    the buffer was never written.

    Check: Search for `readinto(` without a use of its result.

    Test: a file cut at every byte after it was opened. The same thread has a view that outlived its map: ours keep it.
    """
    folder = make(tmp_path / "store").path
    path = folder / "shard-00002.bin"
    content = path.read_bytes()

    def check(opened: Callable[[Path], Callable[[], np.ndarray]]) -> None:
        for size in range(len(content)):
            path.write_bytes(content)
            read = opened(folder)
            path.write_bytes(content[:size])
            with suppress(InputError):
                assert 0xDEAD not in read(), f"{size} of {len(content)} bytes were read, the rest was made up"
        path.write_bytes(content)
        assert opened(folder)().tolist() == TOKENS[4:10].tolist()

    exhibit(check, opened_in("read"), opened_in("map"), twin=into_an_empty_array, because="the rest was made up")


# ------------------------------------------------------------------ 84d: a mapped file that shrank

SHRINKING = """
import faulthandler, os, sys
from locant import InputError
from locant.text.store import TokenStore
faulthandler.disable()

def shrink(path, mode):
    os.truncate(path, 2_000_000)
    store = TokenStore(path, format="nanogpt", mode=mode)
    assert store[0] == 0
    os.truncate(path, 100)
    try:
        store[500_000:500_100].sum()
    except InputError:
        return 7
    return 0

for mode in sys.argv[2:]:
    child = os.fork()
    if not child:
        os._exit(shrink(sys.argv[1], mode))
    print(mode, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_84d_there_is_a_way_to_read_that_cannot_crash(tmp_path: Path) -> None:
    """A file that is cut while it is mapped ends the process.

    python/cpython#148650, NVIDIA/TensorRT-LLM#17368 (on Lustre), pie-project/pie#423: A process that reads a mapped
    file ends with SIGBUS if the file is cut. No program can catch that.

    Check: `locant.TokenStore(path, mode="read")` reads without a map.

    Test: a file that is cut while it is mapped ends the process, so there is `mode="read"`; the twin is our own other
    mode; files that were cut before in `tests/text/store/test_damage.py`.
    """
    (tmp_path / "a.bin").touch()
    command = [sys.executable, "-c", SHRINKING, str(tmp_path / "a.bin"), "read", "map"]
    ended = dict(line.split() for line in subprocess.check_output(command, text=True).splitlines())

    def check(mode: str) -> None:
        assert ended[mode] != str(-signal.SIGBUS), "SIGBUS ended the process"
        assert ended[mode] == "7"

    exhibit(check, "read", twin="map", because="SIGBUS ended the process")


# ------------------------------------------------------------------ 84e: half of a store

TEXTS = [f"document {number}. " * (1 + number % 3) for number in range(4)]
Progress = Callable[[int, int], None]


class Killed(BaseException):
    """Nothing catches it, and nobody cleans up after it: the folder is copied away before it is raised."""


class Prepared:
    """Our store."""

    def prepare(self, text: Path, out: Path, progress: Progress) -> None:
        prepare(text, out, tokenizer=Tokenizer.bytes(), separator="\n\n", shard_size=10, workers=1, progress=progress)

    def load(self, out: Path) -> list[int] | None:
        with suppress(ValueError):
            return TokenStore(out)[:].tolist()
        return None


class Appended:
    """A file that is appended to under its final name, and taken for done because it is there."""

    def prepare(self, text: Path, out: Path, progress: Progress) -> None:
        out.mkdir(exist_ok=True)
        if not (out / "cache.bin").exists():
            with (out / "cache.bin").open("wb", buffering=0) as file:
                for number, one in enumerate(text.read_text().split("\n\n")):
                    file.write(np.array([*one.encode(), 256], dtype="<u2").tobytes())
                    progress(number, len(TEXTS))

    def load(self, out: Path) -> list[int] | None:
        return np.fromfile(out / "cache.bin", dtype="<u2").tolist()


def test_84e_half_a_cache_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted run leaves half a file under the final name.

    huggingface/datasets#460 and NVIDIA/Megatron-LM#852: An interrupted run left half of its output under the final
    name. The next run used it as if it were complete.

    Check: Stop your preparation with `kill -9` halfway, and run it again.

    Test: a death at every call to the system, and gone on: the same store, and before that none.
    """
    monkeypatch.setattr("os.fsync", lambda _: None)
    (text := tmp_path / "texts.txt").write_text("\n\n".join(TEXTS))
    whole = [byte for one in TEXTS for byte in [*one.encode(), 256]]

    def check(subject: Prepared | Appended) -> None:
        for last in range(1, 40):
            out, copy = (tmp_path / f"{type(subject).__name__}-{last}-{name}" for name in ("all", "killed"))
            calls: list[int] = []

            def die(done: int, total: int, out: Path = out, copy: Path = copy, calls: list[int] = calls) -> None:
                calls.append(done)
                if len(calls) == last:  # noqa: B023  # called within this round
                    shutil.copytree(out, copy)
                    raise Killed

            try:
                subject.prepare(text, out, die)
            except Killed:
                assert subject.load(copy) in (None, whole), "half a cache is loaded as if it were whole"
                subject.prepare(text, copy, lambda done, total: None)
                assert subject.load(copy) == whole, "what goes on does not end where a run in one go ends"
            else:
                assert last > 5, "it has hardly any place to be killed at"
                return
        pytest.fail("it never comes to an end")

    exhibit(check, Prepared(), twin=Appended(), because="half a cache is loaded")


# ------------------------------------------------------------------ 84f: a file overwritten in place

Write = Callable[[Path, bytes], None]


def with_new_file(path: Path, content: bytes) -> None:
    with NewFile(path) as file:
        for first in range(0, len(content), 1000):
            file.write(content[first : first + 1000])
        file.fsync()
        file.publish()


def written(path: Path, content: bytes, flags: int) -> None:
    handle = os.open(path, os.O_WRONLY | flags)
    os.write(handle, content)
    os.close(handle)


def in_place(path: Path, content: bytes) -> None:
    written(path, content, os.O_TRUNC)


def removed_first(path: Path, content: bytes) -> None:
    path.rename(f"{path}.old")
    written(path, content, os.O_CREAT)


def test_84f_a_file_is_the_old_one_or_the_new_one_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is neither the old one nor the new one after a kill.

    Lightning-AI/pytorch-lightning#688, #19970, #20011, tracel-ai/burn#5479, #5399: A process was killed while it wrote
    a checkpoint. The file was then neither the old one nor the new one.

    Check: Search for `open(path, "wb")` on the final path: write another file, then `os.replace`.

    Test: after every call to the system there is the old file or the new one.
    """
    path, old, new = tmp_path / "a.ckpt", b"old" * 1000, b"new" * 2000
    seen: list[bytes | None] = []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            returned = call(*args, **options)
            seen.append(path.read_bytes() if path.exists() else None)
            return returned

        return run

    for name in ("open", "write", "fsync", "close", "replace", "rename"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))

    def check(write: Write) -> None:
        path.write_bytes(old)
        seen.clear()
        write(path, new)
        assert len(seen) > 2
        assert set(seen) <= {old, new}, "there was a moment with neither the old file nor the new one"
        assert seen[0] == old
        assert seen[-1] == new == path.read_bytes()

    for twin in (in_place, removed_first):
        exhibit(check, write_whole, with_new_file, twin=twin, because="neither the old file nor the new one")


# ------------------------------------------------------------------ 84k: files that run what they hold


class Bomb:
    """Whoever unpickles it makes a folder."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.trace),)


def test_84k_nothing_that_is_opened_runs(tmp_path: Path) -> None:
    """Loading a file runs its code.

    CVE-2025-32434, CVE-2026-24747, CVE-2025-24357, Dao-AILab/flash-attention#2585: `torch.load` runs code that is in
    the file. A file of weights or tokens from somebody else can therefore do anything.

    Check: Search for `torch.load(` and `pickle.load(`.

    Test: every file of a store in turn a pickle. That no module of the package could read one is shown in
    `tests/house/test_no_pickle.py`.
    """
    folder = make(tmp_path / "store").path
    trace = tmp_path / "it-ran"
    bombs = [pickle.dumps(Bomb(trace), protocol) for protocol in (0, 2, 4)]

    def check(load: Callable[[Path], object]) -> None:
        for path in sorted(folder.iterdir()):
            before = path.read_bytes()
            for bomb in bombs:
                path.write_bytes(bomb)
                with suppress(LocantError, pickle.UnpicklingError):
                    load(path)
                assert not trace.exists(), f"{path.name} ran what it held"
            path.write_bytes(before)

    ours = (
        lambda path: TokenStore(folder).verify(),
        lambda path: TokenStore(path, format="nanogpt", dtype="uint8").verify(),
        read_index,
    )

    def as_a_checkpoint(path: Path) -> None:
        pickle.loads(path.read_bytes())  # noqa: S301  # this is the bug

    exhibit(check, *ours, twin=as_a_checkpoint, because="ran what it held")


# ------------------------------------------------------------------ 84l: headers


def believed(path: Path) -> np.ndarray:
    """The count decides how much is allocated, and then how much is read."""
    with path.open("rb") as file:
        _, _, _, count, _ = struct.unpack("<9sQBQQ", file.read(34))
        lengths = np.zeros(count % 2**63, dtype="<i4")
        file.readinto(lengths)
    return lengths


def test_84l_a_count_is_held_against_the_file_before_memory_is_taken(tmp_path: Path) -> None:
    """A count in a file header exhausts the memory.

    huggingface/safetensors#668, #669, coreweave/tensorizer#208, ztxz16/fastllm#713: Counts in a file's header wrapped,
    or made the reader ask for all memory. They were not compared with the size of the file first.

    Check: Load a file whose header claims 2⁶⁰ entries: it must raise an error at once.

    Test: five false counts before memory is taken; manifests that contradict themselves in `tests/text/store`.
    """
    path, sound = tmp_path / "a.idx", index_of([3, 0, 5])

    def check(read: Callable[[Path], np.ndarray]) -> None:
        path.write_bytes(sound)
        assert read(path).tolist() == [3, 0, 5]
        for count in (10_000_000, 2**61, 2**62 + 3, 2**63, 2**64 - 1):
            path.write_bytes(sound[:18] + struct.pack("<Q", count) + sound[26:])
            tracemalloc.start()
            try:
                read(path)
            except InputError:
                pass
            except MemoryError:
                raise AssertionError("all memory was asked for") from None
            finally:
                taken = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert taken < 100_000, f"{taken} bytes were taken for a file of {len(sound)}"

    exhibit(
        check, lambda path: read_index(path).sequences, twin=believed, because="4000.* bytes were taken for a file of"
    )
