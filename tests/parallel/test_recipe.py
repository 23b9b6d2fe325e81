"""The training run of docs/parallel.md, on four processes, stopped and resumed, is the run of one."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from locant import Positions
from tests.ranks import found_on, needs_gloo
from tests.tolerances import LOSS

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"

pytestmark = [pytest.mark.slow, needs_gloo]  # four processes


def recipe() -> ModuleType:
    code = PAGE.read_text(encoding="utf-8").split("```python\n")[-1].split("```")[0]
    module = ModuleType("recipe")
    exec(compile(code, str(PAGE), "exec"), vars(module))  # noqa: S102  # running our page is the test
    return module


def batches() -> list[tuple[Tensor, Tensor]]:
    ids = torch.randint(101, (4, 2, 2, 24), generator=torch.Generator().manual_seed(3))
    return [(batch[0], batch[1]) for batch in ids]


ROW = Positions.packed([8, 16])


def stopped_and_resumed(checkpoint: str) -> list[float]:
    train = recipe().train
    return train(batches()[:2], ROW, save=checkpoint) + train(batches()[2:], ROW, resume=checkpoint)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # torch, of the last block
def test_four_processes_resumed_train_as_one(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = recipe().train(batches(), ROW, ranks=(1, 1))
    finally:
        dist.destroy_process_group()
    assert expected[-1] < expected[0]
    for losses in found_on(4, stopped_and_resumed, str(tmp_path / "checkpoint")):
        assert losses == pytest.approx(expected, abs=LOSS)
