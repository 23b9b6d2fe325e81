"""Ids without a row that a GPU finds: the error is raised by a later call, or when the caller waits for it."""

from __future__ import annotations

import copy
import pickle  # modules are sent to other processes with it; nothing is read here that was not written here
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from locant import InputEmbedding, RangeError
from locant.embedding.deferred_errors import DeferredErrors
from tests.refusal import refuses


def asked(ids: Tensor) -> tuple[Tensor, int, str]:
    return ids, 29, "TokenEmbedding has vocab_size=29"


def test_an_error_that_comes_late() -> None:
    deferred = DeferredErrors()
    assert not deferred.watch(*asked(torch.tensor([[3, 4], [0, 28]]))).any()
    assert deferred.watch(*asked(torch.zeros(0, 3, dtype=torch.long))).shape == (0, 3)
    deferred.raise_arrived()
    for ids in ([[3, 4], [99, 98]], [[3, -1], [-2, 0]]):
        wrong = deferred.watch(*asked(torch.tensor(ids)))
        assert wrong.tolist() == [[not 0 <= each < 29 for each in row] for row in ids]
    assert not copy.deepcopy(deferred)._notes
    assert not pickle.loads(pickle.dumps(deferred))._notes  # noqa: S301  # our own bytes
    with refuses(RangeError, "id 99 at (1, 0) in an earlier call", "TokenEmbedding has vocab_size=29", "NaN"):
        deferred.raise_arrived()
    with refuses(RangeError, "id -1 at (0, 1) in an earlier call"):
        deferred.raise_all()
    deferred.raise_all()


@pytest.mark.parametrize(
    "refill",
    [
        lambda ids: ids.copy_(torch.tensor([[4, 3]])),
        lambda ids: ids.copy_(torch.tensor([[4, 77]])),
        lambda ids: ids.data.copy_(torch.tensor([[4, 3]])),
    ],
)
def test_an_error_that_comes_late_names_no_id_of_a_later_batch(refill: Callable[[Tensor], object]) -> None:
    """Ids of one batch after another are copied into the same memory, as for CUDA graphs."""
    deferred, ids = DeferredErrors(), torch.tensor([[0, 99]])
    deferred.watch(*asked(ids))
    refill(ids)
    with refuses(RangeError, "a bad id at (0, 1) in an earlier call", "TokenEmbedding has vocab_size=29"):
        deferred.raise_all()


def test_an_error_that_comes_late_for_ids_of_inference_mode() -> None:
    """Nobody counts what is written into those."""
    with torch.inference_mode():
        deferred, ids = DeferredErrors(), torch.tensor([[0, 99]])
        deferred.watch(*asked(ids))
        with refuses(RangeError, "a bad id at (0, 1)"):
            deferred.raise_all()


def test_nothing_is_raised_before_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    deferred = DeferredErrors()
    deferred.watch(*asked(torch.tensor([[99]])))
    event = mock.Mock()
    event.query.return_value = False
    object.__setattr__(deferred._notes[0], "arrived", event)
    deferred.raise_arrived()
    with refuses(RangeError, "id 99"):
        deferred.raise_all()
    event.synchronize.assert_called_once_with()


def test_a_capture_is_not_ended_by_asking_for_errors_of_earlier_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses questions about events while a stream is captured, and drops the graph."""
    deferred, event = DeferredErrors(), mock.Mock()
    event.query.side_effect = RuntimeError("CUDA error: operation not permitted when stream is capturing")
    deferred.watch(*asked(torch.tensor([[99]])))
    object.__setattr__(deferred._notes[0], "arrived", event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    deferred.raise_arrived()
    event.query.assert_not_called()
    with refuses(RangeError, "id 99"):
        deferred.raise_all()


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [None, "layer_norm"])
def test_the_device_works_after_a_refusal(norm: str | None) -> None:
    """It is the embedding that says so, not an assertion of the device."""
    module = InputEmbedding(8, 4, norm=norm).cuda()
    for bad in (-1, 8, 2**31, 2**63 - 1):
        module(torch.tensor([[0, bad, 7]], device="cuda"))
        with refuses(RangeError, str(bad)):
            module.raise_deferred_errors()
    torch.cuda.synchronize()
    assert module(torch.tensor([[0, 7]], device="cuda")).isfinite().all()
