"""The native call reads what NumPy reads, refuses what it refuses, and touches nothing else."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from locant.kernels import native
from locant.positions import Positions
from locant.text import TokenStore, Windows
from locant.text.windows import tokens as gathering
from locant.text.windows.tokens import FUNCTION, Memory, gather, memory_of
from tests.kernels.conftest import variant as variant  # a fixture
from tests.text.windows.definition import PAD, window_places

needs_library = pytest.mark.skipif(native.function(FUNCTION) is None, reason=f"native kernels are {native.status()}")

DTYPES = [f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)]
POISON = -7_777


def shards_of(parts: list[np.ndarray]) -> Memory:
    """Each with a negative number before and behind it, where no token is."""
    gap = np.full(1, np.iinfo(parts[0].dtype).max, dtype=parts[0].dtype)
    starts = np.cumsum([0, *map(len, parts)])
    ids = np.concatenate([half for part in parts for half in (gap, part)] + [gap])
    memory = memory_of(ids, starts, np.arange(1, len(parts) + 1))
    assert memory is not None
    return memory


class Guarded:
    """What `np.empty` hands out: memory that is poisoned, and poisoned around it."""

    def __init__(self) -> None:
        self.around: list[np.ndarray] = []

    def __call__(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        size = int(np.prod(shape))
        whole = np.full(size + 32, POISON, dtype=dtype)
        self.around += [whole[:16], whole[-16:]]
        return whole[16:-16].reshape(shape)

    def untouched(self) -> bool:
        return all((part == POISON).all() for part in self.around)


@needs_library
@pytest.mark.usefixtures("variant")
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(lambda sizes: sum(sizes) > 1),
    chosen=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=9),
    length=st.integers(1, 70),
    step=st.integers(1, 5),
)
def test_slices_of_any_shards_are_inputs_and_targets(
    dtype: str, sizes: list[int], chosen: list[tuple[int, int]], length: int, step: int
) -> None:
    n = sum(sizes)
    top = np.iinfo(dtype).max
    ids = [(place * 7919 + place**5) % (min(top, 2**63 - 1) + 1) for place in range(n)]
    memory = shards_of(np.split(np.array(ids, dtype=dtype), np.cumsum(sizes)[:-1]))
    starts = [start % ((n - 2) // step + 1) for start, _ in chosen]
    counts = [1 + size % min(length, n - 1 - step * start) for start, (_, size) in zip(starts, chosen, strict=True)]
    guarded = Guarded()
    with mock.patch.object(gathering.np, "empty", guarded):
        rows = gather(memory, np.array(starts), np.array(counts), length, step=step, pad_id=5)
    assert rows is not None
    assert guarded.untouched()
    halves = (half.tolist() for half in rows)
    for begin, count, inputs, targets, index, document in zip(starts, counts, *halves, strict=True):
        begin *= step
        rest = length - count
        assert inputs == ids[begin : begin + count] + [5] * rest
        assert targets == ids[begin + 1 : begin + count + 1] + [PAD] * rest
        assert index == [*range(count)] + [count - 1] * rest
        assert document == [0] * count + [-1] * rest


@needs_library
@pytest.mark.parametrize("shards", [[50], [20, 0, 30], [1] * 50])
@pytest.mark.usefixtures("variant")
def test_what_is_no_slice_of_the_text_is_refused(shards: list[int]) -> None:
    memory = shards_of(np.split(np.arange(50, dtype=np.uint16), np.cumsum(shards)[:-1]))

    def read(start: int, size: int | None = None, *, step: int = 1) -> bool:
        return (
            gather(memory, np.array([3, start]), None if size is None else np.array([1, size]), 9, step=step)
            is not None
        )

    assert [read(start) for start in (-1, 0, 1)] == [False, True, True]
    assert [read(start) for start in (39, 40, 41)] == [True, True, False]
    assert [read(start, 1) for start in (47, 48, 49)] == [True, True, False]
    assert [read(0, size) for size in (0, 1, 9, 10, -1)] == [False, True, True, False, False]
    assert [read(start, step=8) for start in (4, 5, 6)] == [True, True, False]
    assert [read(start, step=9) for start in (3, 4, 5)] == [True, True, False]  # 5 * 9 + 9 is beyond the last target
    for start, step in ((2**62, 4), (2**61, 8), (-(2**62), 4), (2**63 - 1, 2**62), (-(2**63), 2)):  # 0 or so in 64 bits
        assert not read(start, step=step)


@needs_library
@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u8"])
@pytest.mark.usefixtures("variant")
def test_a_negative_id_is_refused_wherever_it_stands(dtype: str) -> None:
    for place, length in itertools.product(range(60), (1, 20, 33)):
        ids = np.full(60, 3, dtype=dtype)
        ids[place] = 2**63 if dtype == "u8" else -1
        read = gather(shards_of([ids]), np.array([0, 20]), None, length)
        assert (read is None) == (0 <= place <= length or 20 <= place <= 20 + length)


@needs_library
@pytest.mark.usefixtures("variant")
def test_large_batches_take_all_threads_and_are_the_same() -> None:
    ids = np.random.default_rng(0).integers(0, 2**16, 70_000).astype(np.uint16)
    memory, starts = shards_of([ids[:30_000], ids[30_000:]]), np.random.default_rng(1).integers(0, 60_000, 700)
    with mock.patch.object(native, "threads", return_value=3):
        rows = gather(memory, starts, None, 2_000)
        outside = np.append(starts, 69_999)
        assert gather(memory, outside, None, 2_000) is None
    assert rows is not None
    places = starts[:, None] + np.arange(2_000)
    assert (rows[0] == ids[places]).all()
    assert (rows[1] == ids[places + 1]).all()


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_library), False])
class TestBothWays:
    """Where there is no library, and where there is."""

    @pytest.fixture(autouse=True)
    def _way(self, is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        if not is_native:
            monkeypatch.setattr(native, "function", lambda name: None)

    @pytest.mark.parametrize("stride", [3, 8, 11])
    @pytest.mark.parametrize("documents", [[0, 61], [0, 1, 20, 20, 48, 61]])
    def test_give_the_windows_of_the_definition(self, documents: list[int], stride: int, is_native: bool) -> None:
        mode = "flat" if len(documents) == 2 else "document"
        options = {} if mode == "flat" else {"documents": documents}
        windows = Windows(np.arange(61, dtype=np.uint16), 8, stride, mode, pad_id=99, **options)  # type: ignore[arg-type]
        assert (windows._tokens.memory is not None) == is_native
        wanted = window_places(documents, 8, stride)
        assert len(windows) == len(wanted)
        batch = windows.__getitems__(np.arange(len(windows))[::-1])
        for inputs, targets, window in zip(batch["ids"].tolist(), batch["targets"].tolist(), wanted[::-1], strict=True):
            rest = 8 - len(window)
            assert inputs == [place for place, _ in window] + [99] * rest
            assert targets == [place for _, place in window] + [PAD] * rest
        mask = torch.tensor([[1] * len(window) + [0] * (8 - len(window)) for window in wanted[::-1]])
        assert batch["positions"] == (Positions.arange(8) if mask.all() else Positions.from_mask(mask))

    def test_read_what_c_cannot(self) -> None:
        for ids in (np.arange(40)[::2], np.arange(0, 40, 2).astype(">u2"), np.arange(38, -1, -2)[::-1]):
            windows = Windows(ids, 4, 3)
            assert windows._tokens.memory is None
            assert windows.__getitems__([1, 2])["ids"].tolist() == [[6, 8, 10, 12], [12, 14, 16, 18]]

    def test_own_their_inputs_and_their_targets(self) -> None:
        ids = np.arange(20)
        windows = Windows(ids, 4)
        for item, targets in ((windows.__getitems__([0, 1]), [[1, 2, 3, 4], [5, 6, 7, 8]]), (windows[0], [1, 2, 3, 4])):
            item["ids"].fill_(7)
            assert item["targets"].tolist() == targets
            item["targets"].fill_(8)
            assert ids.tolist() == [*range(20)]


@needs_library
def test_a_store_that_maps_nothing_is_not_read_by_address(tmp_path: Path) -> None:
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    for mode in ("map", "read"):
        windows = Windows(TokenStore(tmp_path / "ids.bin", format="nanogpt", mode=mode), 4)  # type: ignore[arg-type]
        assert (windows._tokens.memory is not None) == (mode == "map")
        assert windows[1]["ids"].tolist() == [4, 5, 6, 7]


@needs_library
def test_outputs_are_on_the_host_whatever_torch_makes_by_default() -> None:
    windows = Windows(np.arange(20), 4)
    with torch.device("meta"):
        assert windows.__getitems__([0, 1])["ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@needs_library
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_read_natively_after_their_parent_did(context: str) -> None:
    windows = Windows(np.arange(9_000, dtype=np.uint16), 8)
    torch.ones(10**6).exp()  # the parent's pool has threads
    before = windows.__getitems__([0, 1])
    loader = DataLoader(windows, 32, num_workers=2, multiprocessing_context=context, timeout=60)
    seen = torch.cat([batch["ids"].ravel() for batch in loader])
    assert seen[: len(before["ids"].ravel())].tolist() == before["ids"].ravel().tolist()
    assert seen[:8_999].tolist() == list(range(8_999))
