"""`Loader`: an epoch shows every window once, however often it is interrupted, and with whatever it is continued."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from locant.errors import InputError, LocantError, RangeError
from locant.text import Windows
from locant.text.windows import BatchSampler, Loader
from locant.text.windows.loader import Permutation
from tests.refusal import refuses
from tests.text.windows.definition import share

N = 37


def windows(n: int = N) -> Windows:
    """Each window holds its own number."""
    return Windows(np.arange(n + 1), 1)


def numbers(batch: Any) -> list[int]:
    return batch["ids"].flatten().tolist()


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


def some(loader: Loader, count: int) -> list[list[int]]:
    """So many batches of the next iteration, then the program is stopped."""
    batches = iter(loader)
    return [numbers(next(batches)) for _ in range(count)]


def resumed(loader: Loader, **options: Any) -> Loader:
    """The loader of a new process, at the place of this one."""
    again = windows().loader(**{"batch_size": 4, "seed": 2, **options})
    again.load_state_dict(through_json(loader.state_dict()))
    return again


def complaint(batches: Iterable[object]) -> str:
    """What is said instead of a batch. Nothing keeps the error, and with it workers that would outlive the test."""
    try:
        next(iter(batches))
    except InputError as error:
        return str(error)
    return ""


class TestAnEpoch:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_is_that_of_the_definition(self, workers: int) -> None:
        loader = windows().loader(4, seed=2, num_workers=workers)
        for epoch in range(2):
            order = Permutation(N, seed=2, epoch=epoch)(np.arange(N)).tolist()
            assert [numbers(batch) for batch in loader] == share(order, 4, 0, 1)
            assert loader.epoch == epoch
        assert len(loader) == 10

    def test_is_chosen_by_its_number(self) -> None:
        loader, other = windows().loader(4), windows().loader(4)
        epochs = [[numbers(batch) for batch in loader] for _ in range(3)]
        other.set_epoch(2)
        assert [numbers(batch) for batch in other] == epochs[2]
        other.set_epoch(0)
        assert [numbers(batch) for batch in other] == epochs[0]
        other.set_epoch(0)
        assert [numbers(batch) for batch in other] == epochs[0]
        assert [numbers(batch) for batch in other] == epochs[1]
        with refuses(RangeError, "got -1 for epoch"):
            other.set_epoch(-1)

    def test_that_was_broken_off_is_followed_by_the_next(self) -> None:
        loader, other = windows().loader(4), windows().loader(4)
        some(loader, 3)
        other.set_epoch(1)
        assert [numbers(batch) for batch in loader] == [numbers(batch) for batch in other]
        assert loader.epoch == 1

    def test_leaves_the_random_numbers_of_the_model_alone(self) -> None:
        before = torch.get_rng_state()
        for workers in (0, 1):
            some(windows().loader(4, num_workers=workers), 2)
        assert torch.equal(torch.get_rng_state(), before)


class TestAResume:
    def test_in_the_middle_goes_on_there_wherever_that_is(self) -> None:
        whole = [numbers(batch) for batch in windows().loader(4, seed=2)]
        for count in range(len(whole) + 1):
            loader = windows().loader(4, seed=2)
            assert some(loader, count) == whole[:count]
            again = resumed(loader)
            assert [numbers(batch) for batch in again] == whole[count:]
            assert again.epoch == 0
            following = windows().loader(4, seed=2)
            following.set_epoch(1)
            assert some(again, 10) == some(following, 10)

    @pytest.mark.parametrize("options", [{"prefetch_factor": 1}, {"prefetch_factor": 5, "persistent_workers": True}])
    def test_counts_what_was_handed_out_and_not_what_workers_have_fetched(self, options: dict[str, Any]) -> None:
        whole = [numbers(batch) for batch in windows().loader(4, seed=2)]
        loader = windows().loader(4, seed=2, num_workers=2, **options)
        seen = some(loader, 3)
        assert loader.state_dict()["windows_seen"] == 12
        loader = resumed(loader, num_workers=1)
        seen += some(loader, 2)
        loader = resumed(loader)
        seen += some(loader, 2)
        loader = resumed(loader, num_workers=2, **options)
        seen += [numbers(batch) for batch in loader]
        assert seen == whole
        following = windows().loader(4, seed=2)
        following.set_epoch(1)
        assert [numbers(batch) for batch in loader] == [numbers(batch) for batch in following]

    @given(
        runs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=4),
        last=st.tuples(st.integers(1, 4), st.integers(1, 6)),
    )
    def test_may_be_with_other_ranks_and_batches(self, runs: list[tuple[int, int, int]], last: tuple[int, int]) -> None:
        """All ranks stop after the same step; whichever of their states is loaded, nothing is lost or repeated."""
        state, seen = None, []
        for world_size, batch_size, steps in [*runs, (*last, 1000)]:
            states = []
            for rank in range(world_size):
                loader = windows().loader(batch_size, seed=2, rank=rank, world_size=world_size)
                if state is not None:
                    loader.load_state_dict(state)
                for _, batch in zip(range(steps), loader, strict=False):
                    seen += numbers(batch)
                left = N if state is None else N - state["windows_seen"]
                if left >= steps * batch_size * world_size:  # else ranks stopped after different steps
                    assert loader.state_dict()["windows_seen"] == N - left + steps * batch_size * world_size
                states.append(through_json(loader.state_dict()))
            state = max(states, key=lambda state: state["windows_seen"])
        assert sorted(seen) == list(range(N))

    def test_keeps_its_place_when_its_epoch_is_chosen_again(self) -> None:
        """Training scripts say `set_epoch` at the top of every epoch, and the first one after a resume too."""
        loader = windows().loader(4, seed=2)
        some(loader, 3)
        again = resumed(loader)
        again.set_epoch(0)
        assert len(list(again)) == 7
        again = resumed(loader)
        again.set_epoch(1)
        assert len(list(again)) == 10

    def test_is_exact_with_drop_last(self) -> None:
        whole = [numbers(batch) for batch in windows().loader(4, seed=2, drop_last=True)]
        loader = windows().loader(4, seed=2, drop_last=True)
        seen = some(loader, 5)
        again = resumed(loader, drop_last=True)
        assert seen + [numbers(batch) for batch in again] == whole
        assert list(resumed(again, drop_last=True)) == []

    @pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
    def test_is_of_one_iteration_at_a_time(self, options: dict[str, Any]) -> None:
        """Workers that persist hand their batches to whoever asks, so that an older iteration would take some."""
        loader = windows().loader(4, seed=2, **options)
        old = iter(loader)
        next(old)
        new = iter(loader)
        seen = numbers(next(new))
        assert "an iteration that another one, set_epoch or load_state_dict has ended" in complaint(old)
        assert loader.state_dict()["windows_seen"] == 4
        seen += [number for batch in new for number in numbers(batch)]
        assert sorted(seen) == list(range(N))
        assert loader.state_dict()["windows_seen"] == N
        assert "try: use one loader" in complaint(zip(loader, loader, strict=True))

    @pytest.mark.parametrize("change", [lambda of: of.set_epoch(3), lambda of: of.load_state_dict(of.state_dict())])
    def test_ends_the_iteration_before_it(self, change: Callable[[Loader], None]) -> None:
        """What it would go on with is another epoch than the one that the state names, or another place of it."""
        loader = windows().loader(4)
        batches = iter(loader)
        next(batches)
        change(loader)
        with refuses(InputError, "an iteration that another one, set_epoch or load_state_dict has ended"):
            next(batches)


class TestAState:
    def test_is_plain_and_small_and_the_same_on_every_rank(self) -> None:
        states = []
        for rank in range(2):
            loader = windows().loader(3, rank=rank, world_size=2)
            some(loader, 2)
            states.append(loader.state_dict())
        assert states[0] == states[1] == through_json(states[0])
        assert states[0]["windows_seen"] == 12
        assert len(json.dumps(states[0])) < 250

    @pytest.mark.parametrize(
        ("other", "word"),
        [
            (lambda: windows(N + 1).loader(4), f"num_windows {N}"),
            (lambda: Windows(np.arange(N + 1)[::-1], 1).loader(4), "windows '"),
            (lambda: Windows(np.arange(2 * N + 1), 2).loader(4), "windows '"),
            (lambda: Windows(np.arange(N + 1), 1, mode="document", documents=[0, N + 1]).loader(4), "windows '"),
            (lambda: windows().loader(4, seed=1), "seed 0"),
            (lambda: windows().loader(4, shuffle=False), "shuffle True"),
        ],
    )
    def test_of_other_windows_or_another_order_is_refused(self, other: Any, word: str) -> None:
        loader = windows().loader(4)
        some(loader, 2)
        with refuses(InputError, "got a state of", word):
            other().load_state_dict(loader.state_dict())

    def test_of_the_same_text_is_taken_whatever_holds_it(self) -> None:
        state = windows().loader(4).state_dict()
        for ids in (list(range(N + 1)), np.arange(N + 1, dtype=np.uint16), torch.arange(N + 1)):
            Windows(ids, 1).loader(4).load_state_dict(state)

    def test_tells_documents_apart_that_give_as_many_windows(self) -> None:
        for mode in ("document", "packed"):
            one, other = (
                Windows(np.arange(9), 4, mode=mode, documents=ends).loader(1) for ends in ([0, 4, 9], [0, 5, 9])
            )
            with refuses(InputError, "got a state of windows"):
                other.load_state_dict(one.state_dict())

    def test_that_is_none_is_refused(self) -> None:
        loader = windows().loader(4)
        state = loader.state_dict()
        with refuses(InputError, "without version, windows, num_windows, shuffle, seed, epoch, windows_seen"):
            loader.load_state_dict({})
        for name, value, kind in [
            ("version", 2, InputError),
            ("epoch", -1, RangeError),
            ("epoch", None, RangeError),
            ("windows_seen", N + 1, RangeError),
            ("windows_seen", "3", RangeError),
            ("windows_seen", -1, RangeError),
            ("windows", np.arange(3), InputError),
            ("windows", torch.arange(3), InputError),
            ("windows", [state["windows"]], InputError),
            ("num_windows", np.array([N, N]), InputError),
        ]:
            with refuses(kind, "got "):
                loader.load_state_dict({**state, "epoch": 3, name: value})
        assert loader.state_dict() == state
        loader.load_state_dict({**state, "num_windows": np.int64(N), "seed": torch.tensor(0)})
        assert loader.state_dict() == state


class TestDataLoaders:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_of_your_own_take_the_sampler(self, workers: int) -> None:
        sampler = BatchSampler(windows(), 4, seed=2)
        loader = DataLoader(windows(), batch_sampler=sampler, collate_fn=windows().collate, num_workers=workers)
        assert len(loader) == 10
        assert [numbers(batch) for batch in loader] == [numbers(batch) for batch in windows().loader(4, seed=2)]
        sampler.set_epoch(1, 24)
        other = windows().loader(4, seed=2)
        other.set_epoch(1)
        assert [numbers(batch) for batch in loader] == [numbers(batch) for batch in other][6:]

    def test_what_decides_the_order_is_the_sampler_s_with_the_same_defaults(self) -> None:
        of_loader, of_sampler = inspect.signature(Windows.loader).parameters, inspect.signature(BatchSampler).parameters
        # as text, because autodoc, which other tests run, replaces annotations by other objects
        assert [*map(str, of_loader.values())][1:-1] == [*map(str, of_sampler.values())][1:]

    def test_options_reach_the_data_loader_and_what_is_ours_does_not(self) -> None:
        options = {"num_workers": 2, "prefetch_factor": 3, "timeout": 60, "in_order": True, "persistent_workers": True}
        made = windows().loader(4, **options, multiprocessing_context="fork", worker_init_fn=print)._data_loader
        assert {name: getattr(made, name) for name in options} == options
        assert (made.multiprocessing_context.get_start_method(), made.worker_init_fn) == ("fork", print)
        for name in ("sampler", "batch_sampler", "collate_fn", "generator", "dataset"):
            with refuses(InputError, f"got {name}, which the loader makes itself"):
                windows().loader(4, **{name: None})

    @pytest.mark.parametrize(
        ("options", "kind", "words"),
        [
            ({"nonsense": 1}, InputError, ["nonsense=1", "num_workers"]),
            ({"num_worker": 1}, InputError, ["num_worker=1", "num_workers="]),
            ({"shuffel": True}, InputError, ["shuffel=True", "shuffle="]),
            ({"num_workers": "2"}, RangeError, ["got '2' for num_workers"]),
            ({"num_workers": 1.5}, RangeError, ["got 1.5 for num_workers"]),
            ({"num_workers": -1}, RangeError, ["got -1 for num_workers"]),
            ({"num_workers": None}, RangeError, ["got None for num_workers"]),
            ({"num_workers": 1, "prefetch_factor": 0}, RangeError, ["got 0 for prefetch_factor"]),
            ({"num_workers": 1, "prefetch_factor": "2"}, RangeError, ["got '2' for prefetch_factor"]),
            ({"num_workers": 1, "timeout": "2"}, RangeError, ["got '2' for timeout"]),
            ({"num_workers": 1, "timeout": -1}, RangeError, ["got -1 for timeout"]),
            ({"num_workers": 1, "timeout": float("nan")}, RangeError, ["got nan for timeout"]),
            ({"num_workers": 1, "timeout": 1e10}, RangeError, ["got 10000000000.0 for timeout"]),
            ({"num_workers": 1, "multiprocessing_context": "thread"}, RangeError, ["thread", "spawn"]),
            ({"num_workers": 1, "multiprocessing_context": 5}, RangeError, ["multiprocessing_context", "spawn"]),
            ({"num_workers": 1, "worker_init_fn": 5}, InputError, ["worker_init_fn=5"]),
            ({"pin_memory": "no"}, RangeError, ["pin_memory"]),
            ({"num_workers": 1, "persistent_workers": 1}, RangeError, ["persistent_workers"]),
            ({"in_order": None}, RangeError, ["in_order"]),
            (
                {"num_workers": 2, "in_order": False},
                InputError,
                ["in_order=False", "the order of batches that a state counts"],
            ),
            ({"shuffle": "no"}, RangeError, ["shuffle"]),
            ({"shuffle": None}, RangeError, ["shuffle"]),
            ({"drop_last": "no"}, RangeError, ["drop_last"]),
            ({"drop_last": np.array([True, False])}, RangeError, ["drop_last"]),
            ({"prefetch_factor": 2}, InputError, ["prefetch_factor=2 without workers", "num_workers=2"]),
            ({"persistent_workers": True}, InputError, ["persistent_workers=True without workers"]),
            ({"timeout": 5}, InputError, ["timeout=5 without workers"]),
            ({"multiprocessing_context": "fork"}, InputError, ["multiprocessing_context='fork' without workers"]),
        ],
    )
    def test_are_never_given_what_they_cannot_take(
        self, options: dict[str, Any], kind: type[LocantError], words: list[str]
    ) -> None:
        with refuses(kind, *words):
            windows().loader(4, **options)

    def test_without_workers_take_the_values_that_mean_none(self) -> None:
        options = {"prefetch_factor": None, "persistent_workers": False, "timeout": 0, "multiprocessing_context": None}
        assert sorted(number for batch in windows().loader(4, **options) for number in numbers(batch)) == [*range(N)]

    def test_draw_from_what_has_a_length(self) -> None:
        with refuses(InputError, "got 5 to draw from"):
            BatchSampler(5, 4)  # type: ignore[arg-type]

    def test_get_batches_with_memory_of_their_own(self) -> None:
        loader = Windows(np.arange(101), 10).loader(2)
        first, second = list(loader)[:2]
        before = second["ids"].clone(), second["targets"].clone(), first["targets"].clone()
        first["ids"].fill_(-7)
        assert torch.equal(second["ids"], before[0])
        assert torch.equal(second["targets"], before[1])
        assert torch.equal(first["targets"], before[2])


def test_ranks_without_a_part_of_the_last_step_are_a_step_behind_until_their_iteration_ends() -> None:
    """Nine windows for four ranks: only one has a batch of the second step, and the others cannot know of it."""
    loaders = [Windows(range(10), 1).loader(2, rank=rank, world_size=4) for rank in range(4)]
    batches = [list_of_states(loader) for loader in loaders]
    assert [len(states) for states in batches] == [1, 1, 1, 2]
    assert [states[0]["windows_seen"] for states in batches] == [8] * 4
    assert batches[3][1]["windows_seen"] == 9
    assert [loader.state_dict()["windows_seen"] for loader in loaders] == [9] * 4
    dropping = [Windows(range(10), 1).loader(2, rank=rank, world_size=4, drop_last=True) for rank in range(4)]
    assert [list_of_states(loader)[-1]["windows_seen"] for loader in dropping] == [8] * 4


def list_of_states(loader: Loader) -> list[dict[str, Any]]:
    """What the state is while each batch is in use."""
    return [loader.state_dict() for _ in loader]


@pytest.mark.parametrize("state", [None, 5, "epoch"])
def test_what_is_no_state_is_refused(state: object) -> None:
    with refuses(InputError, "as a state, expected a dictionary"):
        Windows(range(14), 1).loader(4).load_state_dict(state)  # type: ignore[arg-type]
