"""Several processes that work together: each imports nothing anew, and all talk over gloo."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

__all__ = ["found_on", "needs_gloo"]

needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch is built without gloo")

START = "forkserver"
"""One process imports what takes seconds, and every rank begins as a copy of it."""
IMPORTED = ["locant.parallel", "locant.lab", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"]


def found_on(world: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work`, a function of a module, returns on each of so many ranks; it comes back as JSON."""
    get_context(START).set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory(prefix="locant-ranks-") as folder:
        given = (world, Path(folder), work, arguments)
        multiprocessing.start_processes(_one_rank, given, nprocs=world, start_method=START)
        return [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]


def _one_rank(rank: int, world: int, folder: Path, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=10))
    (folder / f"{rank}.json").write_text(json.dumps(work(*arguments)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
