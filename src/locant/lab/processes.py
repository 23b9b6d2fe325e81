"""Several processes that train one model together. Each reads its own part of every batch.

`torchrun` or `accelerate launch` starts them, and describes them in the environment. Each process holds the whole model
and its optimizer. They add their gradients before every step, so their weights stay equal.
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
def joined(device: str = "auto") -> Generator[str]:
    """Join the other processes of the launcher until the block ends, and yield the device of this process.

    Only the first process prints. A process that was started without a launcher joins nothing.

    Args:
        device: the kind of device, such as ``cuda``. Each process gets one of its own.

    Raises:
        InputError: a device with a number, which the processes cannot share.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield device
        return
    own = device_of(device)
    if own.type != "cpu":
        if ":" in device:
            got = f"got {device} for {os.environ['WORLD_SIZE']} processes, each of which needs a device of its own"
            raise InputError(got, Remedy(device=own.type))
        own = device_of(f"{own.type}:{os.environ['LOCAL_RANK']}")
        torch.accelerator.set_device_index(own.index or 0)
    dist.init_process_group(dist.get_default_backend_for_device(own))
    try:
        if rank() == 0:
            yield str(own)
        else:
            with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield str(own)
    finally:
        dist.destroy_process_group()


def rank() -> int:
    """Return the number of this process. Without a process group it is 0."""
    return dist.get_rank() if _has_group() else 0


def world_size() -> int:
    """Return the number of processes. Without a process group it is 1."""
    return dist.get_world_size() if _has_group() else 1


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def wait_for_all() -> None:
    """Wait until every process has come here."""
    if world_size() > 1:
        dist.barrier()


def smallest(number: int, device: torch.device | str) -> int:
    """Return the smallest of the numbers that the processes have."""
    if world_size() == 1:
        return number
    shared = torch.tensor(number, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MIN)
    return int(shared)


def add_gradients(parameters: Collection[nn.Parameter], loss: float, device: torch.device | str) -> float:
    """Replace the gradients by their sums over all processes, and return the sum of the losses.

    A parameter without a gradient in any process, such as an expert that no token chose, stays without one.
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
    """Give each process other random numbers for dropout, which depend on the step, so that a run can be continued."""
    if world_size() > 1:
        torch.manual_seed((seed * 2**20 + step) * world_size() + rank() & 2**63 - 1)
