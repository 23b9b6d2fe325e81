"""Context parallelism: a row spread over two and four processes gets the numbers of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from locant import ALiBi, Cope, Fox, LocantError, Positions, RangeError, ShapeError
from locant.attention import attend as attend_here
from locant.parallel import attend, head_slice
from locant.parallel.context import SelectedHeads
from tests.parallel.context_ranks import EVERY_ROW, SOME_CASES, find_out
from tests.ranks import found_on, needs_gloo
from tests.refusal import refuses
from tests.tolerances import OVER_RANKS, assert_close

pytestmark = needs_gloo

Found = list[dict[str, Any]]


def require_equal(found: Found, cases: list[tuple[Any, ...]]) -> None:
    for rank, results in enumerate(found):
        for case in ("/".join(map(str, case)) for case in cases):
            assert max(results[case]) <= OVER_RANKS, f"rank {rank}, {case}: they differ by {results[case]}"


def test_two_processes_get_the_loss_and_gradients_of_one() -> None:
    found = found_on(2, find_out, SOME_CASES)
    require_equal(found, SOME_CASES)
    for results in found:
        assert results["bits"] == [True] * 6
        assert "position 0 of document 0 is on ranks 0 and 1" in results["one token on all ranks"]
        assert "got positions of 1x4, 1x5 on the ranks" in results["shards of two sizes"]
        assert "pad the row to a multiple of 4 tokens" in results["shards of two sizes"]


@pytest.mark.slow
def test_four_processes_too_and_the_ring_holds_less_the_more_there_are() -> None:
    found = found_on(4, find_out, EVERY_ROW)
    require_equal(found, EVERY_ROW)
    assert all(all(results["bits"]) for results in found)
    ring, gather = ([found[0][f"{method}/{ranks}"] for ranks in (2, 4)] for method in ("ring", "gather"))
    assert ring[1] <= 0.6 * ring[0]
    assert ring[1] < gather[1]


@pytest.fixture
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
class TestOneProcess:
    @pytest.mark.parametrize("method", ["gather", "ring", "ulysses"])
    def test_returns_the_log_sum_exp_and_takes_sinks(self, method: Any) -> None:
        q, k, v = torch.randn(3, 1, 4, 12, 8, dtype=torch.float64)
        options: dict[str, Any] = {"positions": Positions.packed([5, 7]), "sinks": torch.randn(4), "return_lse": True}
        for found, expected in zip(
            attend(q, k, v, method=method, **options), attend_here(q, k, v, **options), strict=True
        ):
            assert_close(found, expected)

    def test_refuses_what_it_cannot_do(self) -> None:
        q, positions = torch.randn(1, 2, 4, 8), Positions.arange(4)
        with refuses(RangeError, "method"):
            attend(q, q, q, positions=positions, method="star")  # type: ignore[arg-type]
        fox, x = Fox(2, 16), torch.randn(1, 4, 16)
        with refuses(LocantError, "method='ulysses'", "method='ring'"):
            attend(q, q, q, positions=fox.read(x, positions), encoding=fox, method="ulysses")
        with refuses(LocantError, "features of hidden states", "encoding.read(x[:, slots]"):
            fox.read(x, positions).shard(0, 1)
        with refuses(LocantError, "Cope", "method='ring'", "method='gather'"):
            attend(q, q, q, positions=positions, encoding=Cope(8), method="ring")
        with refuses(RangeError, "dropout_p"):
            attend(q, q, q, positions=positions, method="ring", dropout_p=0.1)
        with refuses(ShapeError, "k_positions"):
            attend(q, q, q, positions=positions, k_positions=Positions.arange(5))

    @pytest.mark.parametrize("method", ["gather", "ring", "ulysses"])
    def test_refuses_before_anything_is_sent(self, method: Any) -> None:
        q, positions = torch.randn(1, 4, 6, 8), Positions.packed([2, 4])
        with refuses(ShapeError, "sinks", "(4,)"):
            attend(q, q, q, positions=positions, method=method, sinks=torch.zeros(1))
        with refuses(ShapeError, "k_positions", "gather_positions"):
            attend(q, q, q, positions=positions, method=method, k_positions=Positions.packed([3, 3]))
        with refuses(ShapeError, "ALiBi"):
            attend(q, q, q, positions=positions, method=method, encoding=ALiBi(2))
        with refuses(LocantError, "group"):
            attend(q, q, q, positions=positions, method=method, group="cp")  # type: ignore[arg-type]

    def test_ulysses_refuses_the_heads_of_another_rank(self) -> None:
        q = torch.randn(1, 4, 6, 8)
        with refuses(ShapeError, "head_slice", "all 4 heads"):
            attend(q, q, q, positions=Positions.arange(6), method="ulysses", encoding=ALiBi(12, head_slice=slice(2, 6)))
        attend(q, q, q, positions=Positions.arange(6), method="ulysses", encoding=ALiBi(12, head_slice=slice(4, 8)))

    def test_heads_of_a_bias_that_was_written_for_all_are_refused(self) -> None:
        q, where = torch.randn(1, 2, 6, 8), Positions.arange(6)
        whole = ALiBi(4).bias(torch.randn(1, 4, 6, 8), torch.randn(1, 4, 6, 8), where)
        assert torch.equal(SelectedHeads(ALiBi(4), slice(2, 4)).score_bias(q, q, where, where).dense(), whole[:, 2:])
        encoding = ALiBi(4)
        encoding.bias = lambda *_: 2 * whole  # type: ignore[method-assign]
        with refuses(LocantError, "ALiBi", "returns all heads", "method='gather'"):
            SelectedHeads(encoding, slice(2, 4)).score_bias(q, q, where, where)

    def test_no_heads_have_no_slice(self) -> None:
        with refuses(RangeError, "num_heads"):
            head_slice(0)


def test_without_a_process_group_says_how_to_get_one() -> None:
    q = torch.randn(1, 2, 4, 8)
    with refuses(LocantError, "init_process_group"):
        attend(q, q, q, positions=Positions.arange(4))


@pytest.mark.usefixtures("_alone")
def test_attend_is_refused_inside_of_context_parallel_of_torch() -> None:
    """There ``Positions.arange`` of a shard would silently count from 0 on every rank."""
    from torch.distributed.tensor.experimental import context_parallel

    q, mesh = torch.randn(1, 2, 4, 8), init_device_mesh("cpu", (1,))
    with context_parallel(mesh, buffers=[q], buffer_seq_dims=[2]), refuses(LocantError, "locant.parallel.attend"):
        attend_here(q, q, q, positions=Positions.arange(4))
    attend_here(q, q, q, positions=Positions.arange(4))
