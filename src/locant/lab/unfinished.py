"""How far a training is that can be killed at any moment: one file of safetensors, replaced as a whole.

It holds weights, the moments of the optimizer, the state of the random numbers and, in its header, what is not a
tensor, as JSON.
"""

from __future__ import annotations

import glob
import json
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from locant.errors import InputError, Remedy
from locant.files import lock, replacing

WEIGHT, RANDOM, RANDOM_THERE = "weight", "random", "random_there"
"""What tensors are called; moments of the optimizer have its names for them."""


@contextmanager
def random_numbers_kept(device: torch.device) -> Generator[None]:
    """What is drawn in the block leaves no trace in torch's generators."""
    before = _random_numbers(device)
    try:
        yield
    finally:
        _set_random_numbers(before, device)


def _random_numbers(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators that a training on a device draws from: the host's, and its own."""
    states = {RANDOM: torch.get_rng_state()}
    if device.type != "cpu":
        states[RANDOM_THERE] = torch.get_device_module(device).get_rng_state(*_numbered(device))
    return states


def _set_random_numbers(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[RANDOM])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[RANDOM_THERE], *_numbered(device))


def _numbered(device: torch.device) -> tuple[torch.device, ...]:
    """A device with a number; the functions of a kind of which there is only one (mps) take none."""
    return () if device.index is None else (device,)


@contextmanager
def refusing_to_lose(path: Path) -> Generator[None]:
    """What the system says where it cannot write, as one line; how far the run was stays as it is."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        got = f"cannot write {path}: {getattr(error, 'strerror', None) or error}"
        raise InputError(got, "a disk with room that you may write to; then the same command goes on") from error


class StateFolder:
    """The folder of a run that is not finished, beside the one that it will write.

    As a context it is this process's alone. It vanishes with the context where there is no state in it.
    """

    def __init__(self, output: Path, device: torch.device | str = "cpu") -> None:
        self.output, self.device = output.resolve(), torch.device(device)
        self.path = self.output.with_name(f"{self.output.name}-unfinished")
        self.file = self.path / "state.safetensors"

    def __enter__(self) -> StateFolder:
        with refusing_to_lose(self.path):
            self.path.mkdir(exist_ok=True)
            self._lock = (self.path / "lock").open("wb")
        if lock(self._lock) is False:
            self._lock.close()
            got = f"got {self.output}, which another run is about to write"
            raise InputError(got, "another folder, or the same when that one has ended")
        for half in self.path.glob(f".{self.file.stem}.*"):  # of a run that was killed
            half.unlink()
        return self

    def __exit__(self, *error: object) -> None:
        if not self.file.exists():
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def facts(self) -> dict[str, Any] | None:
        """What is not a tensor; ``None`` where there is no state."""
        if not self.file.is_file():
            return None
        try:
            with safe_open(self.file, framework="pt") as file:
                return json.loads(file.metadata()["locant"])
        except (SafetensorError, KeyError, TypeError, ValueError):
            got = f"got {self.file}, which is no state of an unfinished run"
            raise InputError(got, Remedy("{}, which begins anew", force=True)) from None

    def write(
        self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]
    ) -> None:
        """Replace the state by that of a moment between two steps."""
        tensors = {f"{WEIGHT}.{name}": each.detach() for name, each in parameters.items()}
        for name, parameter in parameters.items():
            tensors |= {f"{moment}.{name}": each for moment, each in optimizer.state.get(parameter, {}).items()}
        tensors |= _random_numbers(self.device)
        with refusing_to_lose(self.file), replacing(self.file) as temporary:
            whole = {name: each.cpu().contiguous() for name, each in tensors.items()}
            save_file(whole, temporary, {"locant": json.dumps(facts)})

    @torch.no_grad()
    def read(self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Put the state into weights and optimizer, and into the random numbers of torch."""
        random: dict[str, Tensor] = {}
        with safe_open(self.file, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # not a dictionary
                kind, _, name = key.partition(".")
                if kind in (RANDOM, RANDOM_THERE):
                    random[kind] = file.get_tensor(key)
                elif kind == WEIGHT:
                    parameters[name].copy_(file.get_tensor(key))
                else:
                    there = parameters[name].device
                    # Not the file's own memory: `write` replaces the file, which Windows refuses while that is in use.
                    optimizer.state[parameters[name]][kind] = file.get_tensor(key).to(there, copy=True)
        _set_random_numbers(random, self.device)

    def remove(self) -> None:
        """Forget the run, and what a killed one had begun to write of its output."""
        self.file.unlink(missing_ok=True)
        for half in self.output.parent.glob(f".{glob.escape(self.output.name)}.{8 * '[0-9a-f]'}"):
            shutil.rmtree(half, ignore_errors=True)
