"""Where a training that can be killed at any moment keeps how far it is: one file, replaced as a whole.

Tensors (weights, the moments of the optimizer, the state of the random numbers) and, in the header of the same file,
what is not a tensor, as JSON. It is safetensors: nothing in it is run when it is read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from locant.errors import InputError
from locant.files import replacing

__all__ = ["StateFolder"]

STATE = "state.safetensors"
KEY = "locant"
WEIGHT, RANDOM = "weight.", "random"


class StateFolder:
    """The folder of a run that is not finished, beside the one that it will write."""

    def __init__(self, output: Path) -> None:
        place = output.resolve()
        self.path = place.with_name(f"{place.name}-unfinished")
        self.file = self.path / STATE

    def facts(self) -> dict[str, Any] | None:
        """What is not a tensor; ``None`` where there is no state."""
        if not self.file.is_file():
            return None
        try:
            with safe_open(self.file, framework="pt") as file:
                return json.loads(file.metadata()[KEY])
        except (SafetensorError, KeyError, TypeError, ValueError):
            got = f"got {self.file}, which is no state of an unfinished run"
            raise InputError(got, f"--force, which begins anew, or rm -r {self.path}") from None

    def write(
        self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]
    ) -> None:
        """Replace the state by that of a moment between two steps."""
        tensors = {f"{WEIGHT}{name}": each.detach() for name, each in parameters.items()}
        for name, parameter in parameters.items():
            tensors |= {f"{moment}.{name}": each for moment, each in optimizer.state.get(parameter, {}).items()}
        tensors[RANDOM] = torch.get_rng_state()
        self.path.mkdir(exist_ok=True)
        with replacing(self.file) as temporary:
            save_file({name: each.contiguous() for name, each in tensors.items()}, temporary, {KEY: json.dumps(facts)})

    @torch.no_grad()
    def read(self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Put the state into weights and optimizer, and into the random numbers of torch."""
        with safe_open(self.file, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # not a dictionary
                kind, _, name = key.partition(".")
                if key == RANDOM:
                    torch.set_rng_state(file.get_tensor(key))
                elif kind == WEIGHT[:-1]:
                    parameters[name].copy_(file.get_tensor(key))
                else:
                    optimizer.state[parameters[name]][kind] = file.get_tensor(key)

    def remove(self) -> None:
        """Forget the run."""
        shutil.rmtree(self.path, ignore_errors=True)
