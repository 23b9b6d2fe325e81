"""What each of several processes does in `test_processes.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from locant.lab import TuneSettings, processes, tune, tuning

RANKS = 2
TUNED: dict[str, Any] = {"num_steps": 4, "batch_size": 4, "learning_rate": 1e-2}
ALIKE: dict[str, dict[str, Any]] = {
    "all": {"way": "yarn:2", **TUNED},
    "lora": {"way": "kerple", "train": "lora", "rank": 2, **TUNED},
}


def tuned(folder: Path, model: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Tune a model of a folder, and return the losses."""
    steps = list[int]()
    record = tune(
        folder / model, [str(folder / "text.txt")], TuneSettings(**settings), output=folder / name,
        on_step=lambda done, total, said: steps.append(done),
    )  # fmt: skip
    left = sorted(each.name for each in folder.glob(f"{name}*"))
    return {"train_loss": record["train_loss"], "held_out": record["held_out"], "steps": steps, "left": left}


def interrupted(folder: Path, model: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The same, stopped in the third step, and continued after other random numbers were drawn."""
    update, taken = tuning.update, list[object]()

    def stop(*given: Any) -> None:
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append(update(*given))

    tuning.update, tuning.SAVE_SECONDS = stop, 0.0
    try:
        tuned(folder, model, name, settings)
    except KeyboardInterrupt:
        torch.manual_seed(99)
    tuning.update = update
    return tuned(folder, model, name, settings)


def exchanged() -> dict[str, Any]:
    """Add gradients that only some processes have, and draw random numbers."""
    rank = dist.get_rank()
    both, first, none = parameters = [nn.Parameter(torch.zeros(2, 3)) for _ in range(3)]
    both.grad = torch.full((2, 3), 1.0 + rank)
    if rank == 0:
        first.grad = torch.full((2, 3), 5.0)
    drawn = []
    for step in (7, 8, 7):
        processes.seed_step(3, step)
        drawn.append(torch.rand(4).tolist())
    return {
        "loss": processes.add_gradients(parameters, 0.25 + rank, "cpu"), "both": both.grad.tolist(),
        "first": None if first.grad is None else first.grad.tolist(), "none": none.grad,
        "smallest": processes.smallest(10 - rank, "cpu"), "drawn": drawn,
    }  # fmt: skip


def find_out(place: str) -> dict[str, Any]:
    """All of it. The folder has two models, of which one has dropout."""
    folder = Path(place)
    alike = {name: tuned(folder, "plain", f"two-{name}", settings) for name, settings in ALIKE.items()}
    whole = tuned(folder, "model", "whole", ALIKE["all"])
    again = interrupted(folder, "model", "interrupted", ALIKE["all"])
    return {"alike": alike, "whole": whole, "interrupted": again, "exchanged": exchanged()}
