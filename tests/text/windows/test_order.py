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
from locant.text.windows.loader import LISTED, Permutation
from tests.refusal import refuses
from tests.text.windows.definition import permuted, share

LARGE = [LISTED - 1, LISTED, LISTED + 1, 300**2 - 1, 300**2, 300**2 + 1, 300 * 301 + 1, 999_983]


class TestAnOrder:
    def test_holds_everything_once_for_every_small_number(self) -> None:
        for n in range(1, 2001):
            assert np.array_equal(np.sort(Permutation(n, seed=n % 7, epoch=n % 3)(np.arange(n))), np.arange(n)), n

    @pytest.mark.parametrize("n", LARGE)
    def test_holds_everything_once_for_large_numbers(self, n: int) -> None:
        assert np.array_equal(np.sort(Permutation(n, seed=3, epoch=1)(np.arange(n))), np.arange(n))

    @pytest.mark.parametrize("n", [2**31 - 1, 2**32, 2**32 + 1, 10**12 + 39, 2**61 + 5])
    def test_repeats_nothing_for_numbers_that_no_list_holds(self, n: int) -> None:
        places = np.concatenate(
            [np.arange(50_000), np.arange(n - 50_000, n), np.arange(50_000) * (n // 60_000) + 50_000]
        )
        places = np.unique(places)
        found = Permutation(n, seed=0, epoch=0)(places)
        assert found.min() >= 0
        assert found.max() < n
        assert len(np.unique(found)) == len(places)

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


def too_uneven(values: np.ndarray, n: int, cells: int = 64) -> bool:
    """Pearson's chi-square of values in 0 .. n - 1, ten standard deviations out."""
    counts = np.bincount(values * cells // n, minlength=cells)
    expected = len(values) / cells
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return abs(chi_square - (cells - 1)) > 10 * (2 * (cells - 1)) ** 0.5


def is_random(values: np.ndarray, n: int) -> bool:
    """Windows of a stretch of the order come from everywhere, and so do the steps between one and the next."""
    steps = [(values[lag:] - values[:-lag]) % n for lag in (1, 2, 3, 16, 395)]
    return not any(too_uneven(numbers, n) for numbers in (values, values[::2], *steps))


class TestRandomness:
    @pytest.mark.parametrize("n", [LISTED - 1, 156_248, 10**7, 10**12])
    def test_a_stretch_of_an_order_looks_random(self, n: int) -> None:
        for epoch in range(3):
            assert is_random(Permutation(n, seed=0, epoch=epoch)(np.arange(30_000)), n)
            assert is_random(Permutation(n, seed=0, epoch=epoch)(n - 30_000 + np.arange(30_000)), n)

    @pytest.mark.parametrize("n", [1000, 156_248, 10**12])
    def test_what_stands_at_a_place_is_even_over_epochs_and_over_seeds(self, n: int) -> None:
        for place in (0, 1, n // 2, n - 1):
            by_epoch = [int(Permutation(n, seed=1, epoch=k)(np.array([place]))[0]) for k in range(300)]
            by_seed = [int(Permutation(n, seed=k, epoch=1)(np.array([place]))[0]) for k in range(300)]
            assert not too_uneven(np.array(by_epoch), n, cells=8)
            assert not too_uneven(np.array(by_seed), n, cells=8)

    def test_all_orders_of_a_few_are_equally_likely(self) -> None:
        seen = [tuple(Permutation(4, seed=0, epoch=epoch)(np.arange(4)).tolist()) for epoch in range(4800)]
        numbers = {order: number for number, order in enumerate(itertools.permutations(range(4)))}
        assert not too_uneven(np.array([numbers[order] for order in seen]), 24, cells=24)

    def test_orders_that_are_not_random_are_told(self) -> None:
        n, places = 999_983, np.arange(30_000)
        assert is_random(np.random.default_rng(0).permutation(n)[:30_000], n)
        for twin in (places, places * 7919 % n, places * 314_159 % n, (places // 2 * 314_159 + places % 2) % n):
            assert not is_random(twin, n)


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

    def test_make_as_many_steps_each_with_drop_last_and_one_less_at_most_without(self) -> None:
        for n in range(6, 40):
            steps = [len(BatchSampler(range(n), 2, rank=rank, world_size=3)) for rank in range(3)]
            assert max(steps) - min(steps) <= 1
            whole = {len(BatchSampler(range(n), 2, rank=rank, world_size=3, drop_last=True)) for rank in range(3)}
            assert whole == {n // 6}

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
