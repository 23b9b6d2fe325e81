"""Save the state of a training run in a safetensors file.

The file is replaced as a whole, so the run can be killed at any moment.

The file contains the weights, the moments of the optimizer and the states of the random generators. Everything that is
not a tensor is JSON in the header of the file.
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
from locant.files import lock, replace_file

WEIGHT, RANDOM, DEVICE_RANDOM = "weight", "random", "random_there"
"""The prefix of weights, and the names of random states. The prefix of a moment is its name in the optimizer."""


@contextmanager
def preserve_random_state(device: torch.device) -> Generator[None]:
    """Restore the states of torch's random generators at the end of the block."""
    before = _random_numbers(device)
    try:
        yield
    finally:
        _set_random_numbers(before, device)


def _random_numbers(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the random generators of the CPU and of the device."""
    states = {RANDOM: torch.get_rng_state()}
    if device.type != "cpu":
        states[DEVICE_RANDOM] = torch.get_device_module(device).get_rng_state(*_device_argument(device))
    return states


def _set_random_numbers(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[RANDOM])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[DEVICE_RANDOM], *_device_argument(device))


def _device_argument(device: torch.device) -> tuple[torch.device, ...]:
    """Return the device as an argument if it has a number. The functions of mps, a single device, take no argument."""
    return () if device.index is None else (device,)


@contextmanager
def wrap_write_errors(path: Path) -> Generator[None]:
    """Turn write errors of the system into a short `InputError`. The saved state of the run is kept."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        got = f"cannot write {path}: {getattr(error, 'strerror', None) or error}"
        raise InputError(got, "use a disk with room that you may write to, then run the same command again") from error


class StateFolder:
    """The folder with the state of an unfinished run, next to the folder that the run will write.

    The context locks the folder for this process. At its end, the folder is removed if it contains no state.
    """

    def __init__(self, output: Path, device: torch.device | str = "cpu") -> None:
        self.output, self.device = output.resolve(), torch.device(device)
        self.path = self.output.with_name(f"{self.output.name}-unfinished")
        self.file = self.path / "state.safetensors"

    def __enter__(self) -> StateFolder:
        with wrap_write_errors(self.path):
            self.path.mkdir(exist_ok=True)
            self._lock = (self.path / "lock").open("wb")
        if lock(self._lock) is False:
            self._lock.close()
            got = f"got {self.output}, which another run is about to write"
            raise InputError(got, "use another folder, or wait until the other run has ended")
        for partial in self.path.glob(f".{self.file.stem}.*"):  # files of a killed run
            partial.unlink()
        return self

    def __exit__(self, *error: object) -> None:
        if not self.file.exists():
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def facts(self) -> dict[str, Any] | None:
        """Return all values of the state that are not tensors, or ``None`` if there is no state."""
        if not self.file.is_file():
            return None
        try:
            with safe_open(self.file, framework="pt") as file:
                return json.loads(file.metadata()["locant"])
        except (SafetensorError, KeyError, TypeError, ValueError):
            got = f"got {self.file}, which is not the state of an unfinished run"
            raise InputError(got, Remedy("start again with {}", force=True)) from None

    def write(
        self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]
    ) -> None:
        """Replace the saved state by the current state. Call this between two steps."""
        tensors = {f"{WEIGHT}.{name}": each.detach() for name, each in parameters.items()}
        for name, parameter in parameters.items():
            tensors |= {f"{moment}.{name}": each for moment, each in optimizer.state.get(parameter, {}).items()}
        tensors |= _random_numbers(self.device)
        with wrap_write_errors(self.file), replace_file(self.file) as temporary:
            whole = {name: each.cpu().contiguous() for name, each in tensors.items()}
            save_file(whole, temporary, {"locant": json.dumps(facts)})

    @torch.no_grad()
    def read(self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Load the state into the weights, the optimizer and torch's random generators."""
        random: dict[str, Tensor] = {}
        with safe_open(self.file, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # not a dictionary
                kind, _, name = key.partition(".")
                if kind in (RANDOM, DEVICE_RANDOM):
                    random[kind] = file.get_tensor(key)
                elif kind == WEIGHT:
                    parameters[name].copy_(file.get_tensor(key))
                else:
                    device = parameters[name].device
                    # A copy, because `write` replaces the file. Windows refuses this while its memory is in use.
                    optimizer.state[parameters[name]][kind] = file.get_tensor(key).to(device, copy=True)
        _set_random_numbers(random, self.device)

    def remove(self) -> None:
        """Remove the state and the partial output of a killed run."""
        self.file.unlink(missing_ok=True)
        for partial in self.output.parent.glob(f".{glob.escape(self.output.name)}.{8 * '[0-9a-f]'}"):
            shutil.rmtree(partial, ignore_errors=True)
