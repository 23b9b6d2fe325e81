"""The order of an epoch and what each rank gets of it: everything once, in an order that no list holds."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st

from locant.errors import InputError, RangeError
from locant.text.windows import BatchSampler
from locant.text.windows.loader import MAX_LISTED, Permutation
from tests.refusal import refuses
from tests.text.windows.definition import permuted, share

LARGE = [MAX_LISTED - 1, MAX_LISTED, MAX_LISTED + 1, 300**2 - 1, 300**2, 300**2 + 1, 300 * 301 + 1, 999_983]


class TestAnOrder:
    def test_holds_everything_once_for_every_small_number(self) -> None:
        for n in range(1, 2001):
            assert np.array_equal(np.sort(Permutation(n, seed=n % 7, epoch=n % 3)(np.arange(n))), np.arange(n)), n

    @pytest.mark.parametrize("n", LARGE)
    def test_holds_everything_once_for_large_numbers(self, n: int) -> None:
        assert np.array_equal(np.sort(Permutation(n, seed=3, epoch=1)(np.arange(n))), np.arange(n))

    @pytest.mark.parametrize("n", [1000, 10**5, 10**9])
    def test_is_asked_for_in_any_pieces(self, n: int) -> None:
        order, places = Permutation(n, seed=5, epoch=2), np.array([3, 999, 0, 17, 500])
        assert order(places).tolist() == [int(order(np.array([place]))[0]) for place in places]

    def test_is_another_for_every_seed_and_epoch(self) -> None:
        for n in (50, 10**6):
            orders = {
                tuple(Permutation(n, seed=seed, epoch=epoch)(np.arange(20)).tolist())
                for seed, epoch in itertools.product([0, 1, 2, 11, 2**64 - 1], [0, 1, 2, 11, 111])
            }
            assert len(orders) == 25

    def test_never_changes(self) -> None:
        """Frozen: whoever resumes a run with a later version has to find the same order."""
        assert Permutation(12, seed=0, epoch=0)(np.arange(12)).tolist() == [6, 11, 7, 1, 10, 9, 8, 0, 3, 2, 4, 5]
        assert Permutation(10**12, seed=7, epoch=3)(np.arange(4)).tolist() == [
            269088520726,
            245968073422,
            258882324359,
            896597490855,
        ]

    @pytest.mark.parametrize("n", [*LARGE[1:], 2**32 + 1, 10**12 + 39, 2**61 + 5])
    def test_is_that_of_the_definition(self, n: int) -> None:
        places = [0, 1, 255, 256, n // 3, n - 2, n - 1, *range(1000, 1300)]
        for seed, epoch in ((0, 0), (2**64 - 1, 12)):
            found = Permutation(n, seed=seed, epoch=epoch)(np.array(places)).tolist()
            assert found == [permuted(place, n, seed, epoch) for place in places]

    def test_takes_no_memory(self) -> None:
        tracemalloc.start()
        batches = iter(BatchSampler(range(10**12), 256))
        for batch in itertools.islice(batches, 500):
            assert len(batch) == 256
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4_000_000


class TestRanks:
    @given(
        n=st.integers(1, 60), batch_size=st.integers(1, 7), world_size=st.integers(1, 5), drop_last=st.booleans(),
        shuffle=st.booleans(), data=st.data(),
    )  # fmt: skip
    def test_get_what_the_definition_gives_them(
        self, n: int, batch_size: int, world_size: int, drop_last: bool, shuffle: bool, data: st.DataObject
    ) -> None:
        start = data.draw(st.integers(0, n))
        order = Permutation(n, seed=4, epoch=6)(np.arange(n)).tolist() if shuffle else list(range(n))
        if drop_last and n < batch_size * world_size:
            with pytest.raises(InputError, match="and drop_last"):
                BatchSampler(range(n), batch_size, world_size=world_size, rank=0, drop_last=True)
            return
        seen: list[int] = []
        for rank in range(world_size):
            sampler = BatchSampler(
                range(n), batch_size, shuffle=shuffle, seed=4, rank=rank, world_size=world_size, drop_last=drop_last
            )
            sampler.set_epoch(6)
            assert len(sampler) == len(share(order, batch_size, rank, world_size, drop_last=drop_last))
            sampler.set_epoch(6, start)
            batches = [batch.tolist() for batch in sampler]
            assert batches == share(order[start:], batch_size, rank, world_size, drop_last=drop_last)
            seen += [number for batch in batches for number in batch]
        left_out = (n - start) % (batch_size * world_size) if drop_last else 0
        assert sorted(seen) == sorted(order[start : n - left_out])

    def test_are_those_of_torch_distributed_where_it_is_initialised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        alone = BatchSampler(range(9), 2)
        assert (alone.rank, alone.world_size) == (0, 1)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
        spread = BatchSampler(range(9), 2)
        assert (spread.rank, spread.world_size) == (2, 3)
        mine = BatchSampler(range(9), 2, rank=0, world_size=2)
        assert (mine.rank, mine.world_size) == (0, 2)

    @pytest.mark.parametrize(
        ("options", "kind", "words"),
        [
            ({"batch_size": 0}, RangeError, "got 0 for batch_size"),
            ({"batch_size": 2.0}, RangeError, "got 2.0 for batch_size"),
            ({"seed": -1}, RangeError, "got -1 for seed"),
            ({"rank": 0}, InputError, "got rank=0 and world_size=None"),
            ({"world_size": 2}, InputError, "got rank=None and world_size=2"),
            ({"rank": 2, "world_size": 2}, RangeError, "got 2 for rank"),
            ({"rank": -1, "world_size": 2}, RangeError, "got -1 for rank"),
            ({"rank": 0, "world_size": 0}, RangeError, "got 0 for world_size"),
        ],
    )
    def test_that_are_none_are_refused(self, options: dict[str, object], kind: type, words: str) -> None:
        with refuses(kind, words):
            BatchSampler(range(9), **{"batch_size": 2, **options})  # type: ignore[arg-type]

    def test_an_epoch_that_is_none_is_refused(self) -> None:
        sampler = BatchSampler(range(9), 2)
        for epoch, start in ((-1, 0), (1.5, 0), (0, 10), (0, -1)):
            with refuses(RangeError, "got "):
                sampler.set_epoch(epoch, start)  # type: ignore[arg-type]
