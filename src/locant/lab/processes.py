"""Train one model in several processes. Each process reads a different part of every batch.

`torchrun` or `accelerate launch` starts the processes and sets the environment variables that describe them. Each
process holds the whole model and its optimizer. The processes add their gradients before every step, so their weights
stay equal.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from locant.errors import InputError, Remedy
from locant.lab.language_model import device_of


@contextmanager
def join_process_group(device: str = "auto") -> Generator[str]:
    """Join the process group of the launcher until the block ends, and yield the device of this process.

    Only the first process prints. Without a launcher, there is no group, and `device` is yielded unchanged.

    Args:
        device: the kind of device, such as ``cuda``. Each process gets a different device.

    Raises:
        InputError: `device` has a number, but the processes cannot share one device.
    """
    if _num_launched() < 2:
        yield device
        return
    process_device = device_of(device)
    if process_device.type != "cpu":
        if ":" in device:
            got = f"got {device} for {os.environ['WORLD_SIZE']} processes, each of which needs a device of its own"
            raise InputError(got, Remedy(device=process_device.type))
        process_device = device_of(f"{process_device.type}:{os.environ['LOCAL_RANK']}")
        torch.accelerator.set_device_index(process_device.index or 0)
    dist.init_process_group(dist.get_default_backend_for_device(process_device))
    try:
        if rank() == 0:
            yield str(process_device)
        else:
            with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield str(process_device)
    finally:
        dist.destroy_process_group()


def _num_launched() -> int:
    """Return the number of processes that a launcher started.

    A scheduler alone may set some of these variables, but not all.
    """
    variables = [os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")]
    return int(variables[0]) if all(variables) and variables[0].isdecimal() else 1


def rank() -> int:
    """Return the rank of this process, which is 0 without a process group."""
    return dist.get_rank() if _has_group() else 0


def world_size() -> int:
    """Return the number of processes, which is 1 without a process group."""
    return dist.get_world_size() if _has_group() else 1


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def wait_for_all() -> None:
    """Wait until every process has made this call."""
    if world_size() > 1:
        dist.barrier()


def smallest(number: int, device: torch.device | str) -> int:
    """Return the smallest of the numbers that all processes pass."""
    if world_size() == 1:
        return number
    shared = torch.tensor(number, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MIN)
    return int(shared)


def add_gradients(parameters: Collection[nn.Parameter], loss: float, device: torch.device | str) -> float:
    """Replace each gradient by its sum over all processes, and return the sum of the losses.

    If a parameter has no gradient in any process, such as an expert that no token chose, its gradient remains ``None``.
    """
    if world_size() == 1:
        return loss
    has_gradient = [0.0 if each.grad is None else 1.0 for each in parameters]
    shared = torch.tensor([loss, *has_gradient], device=device)
    dist.all_reduce(shared)
    total, *counts = shared.tolist()
    for parameter, count in zip(parameters, counts, strict=True):
        if count:
            parameter.grad = _gradient_or_zeros(parameter)
            dist.all_reduce(parameter.grad)
    return total


def _gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def seed_step(seed: int, step: int) -> None:
    """Give each process different random numbers for dropout. They depend on the step, so that a run can continue."""
    if world_size() > 1:
        torch.manual_seed((seed * 2**20 + step) * world_size() + rank() & 2**63 - 1)
