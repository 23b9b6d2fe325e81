"""The training run of docs/parallel.md, on four processes, stopped and resumed, is the run of one."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from locant import Positions
from tests.tolerances import LOSS

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"

pytestmark = [
    pytest.mark.slow,  # five processes
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch is built without gloo"),
]


def recipe() -> ModuleType:
    code = PAGE.read_text(encoding="utf-8").split("```python\n")[-1].split("```")[0]
    module = ModuleType("recipe")
    exec(compile(code, str(PAGE), "exec"), vars(module))  # noqa: S102  # running our page is the test
    return module


def batches() -> list[tuple[Tensor, Tensor]]:
    ids = torch.randint(101, (4, 2, 2, 24), generator=torch.Generator().manual_seed(3))
    return [(batch[0], batch[1]) for batch in ids]


def run(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store-{world}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=10))
    train, row = recipe().train, Positions.packed([8, 16])
    if world == 1:
        losses = train(batches(), row, ranks=(1, 1))
    else:
        losses = train(batches()[:2], row, save=f"{folder}/checkpoint")
        losses += train(batches()[2:], row, resume=f"{folder}/checkpoint")
    Path(folder, f"{world}-{rank}.json").write_text(json.dumps(losses), encoding="utf-8")
    dist.destroy_process_group()


def test_four_processes_resumed_train_as_one(tmp_path: Path) -> None:
    for world in (1, 4):
        multiprocessing.spawn(run, args=(world, str(tmp_path)), nprocs=world)
    found: dict[str, Any] = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    expected = found.pop("1-0")
    assert expected[-1] < expected[0]
    assert len(found) == 4
    for losses in found.values():
        assert losses == pytest.approx(expected, abs=LOSS)
