"""Parts made on a Ray cluster: the same work as that of local workers, where Ray says it shall be done.

Every node has to see the inputs and the folder of the store under the same names, as on a shared file system.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from locant.errors import InputError, LocantError
from locant.text.prepare.part import make_part
from locant.text.prepare.plan import Plan, read_plan
from locant.text.tokenizer.engine import Engine, EngineName

__all__ = ["LOCAL", "make_on_ray"]

LOCAL = "local"
PATIENCE = 10.0
"""Seconds until an address that does not answer is given up; Ray alone tries for minutes."""


class _Maker:
    """Lives in a process of the cluster, with an engine of its own."""

    def __init__(self, store: str, engine: EngineName) -> None:
        plan = read_plan(Path(store))
        if plan is None:
            raise InputError(f"a node of the cluster sees no {store}", "a folder that all nodes share")
        self._plan = plan
        self._engine = Engine(plan.tokenizer(), engine, parallel=False)

    def make(self, number: int) -> tuple[int, str | None, str]:
        """Bytes read; and cause and remedy, where something is wrong."""
        read: list[int] = []
        try:
            make_part(self._plan, number, self._engine, read.append)
        except LocantError as error:
            return 0, error.cause, error.remedy
        return sum(read), None, ""


def make_on_ray(
    address: str, plan: Plan, engine: EngineName, numbers: list[int], advance: Callable[[int], None], size: int
) -> None:
    """Have parts made by actors of a cluster, one on each of its cores but no more than there are parts.

    Args:
        address: of a running cluster, or ``"local"`` for one of `size` processes on this machine.
        plan, engine, numbers, advance: as for local workers.
        size: how many actors on this machine.

    Raises:
        InputError: Ray is not installed or not reached, a node lost a worker, or a part cannot be made.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise InputError("Ray is not installed", "pip install 'locant[ray]', or no ray=") from None
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, address, size)
    try:
        cores = size if address == LOCAL else int(ray.cluster_resources().get("CPU", 1))
        actor = ray.remote(num_cpus=1)(_Maker)
        crew = [actor.remote(str(plan.store.resolve()), engine) for _ in range(max(1, min(cores, len(numbers))))]
        _run(ray, crew, iter(numbers), advance)
    finally:
        if ours:
            ray.shutdown()


def _connect(ray: Any, address: str, size: int) -> None:
    try:
        if address == LOCAL:
            ray.init(address=LOCAL, num_cpus=size, include_dashboard=False, log_to_driver=False)
        else:
            _require_answer(address)
            ray.init(address=address, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"cannot reach a Ray cluster at {address!r}: {error}", f"{LOCAL!r}, or ray start") from None


def _require_answer(address: str) -> None:
    """Knock at ``host:port`` and ``ray://host:port``; other addresses are Ray's to know."""
    place = urlsplit(address if "://" in address else f"//{address}")
    if place.hostname and place.port:
        socket.create_connection((place.hostname, place.port), timeout=PATIENCE).close()


def _run(ray: Any, crew: list[Any], numbers: Iterator[int], advance: Callable[[int], None]) -> None:
    """Each of the crew gets another part when it is done with one."""
    at_work = {actor.make.remote(number): actor for actor, number in zip(crew, numbers, strict=False)}
    while at_work:
        (done,), _ = ray.wait([*at_work], num_returns=1)
        actor = at_work.pop(done)
        try:
            read, cause, remedy = ray.get(done)
        except ray.exceptions.RayError as error:
            what = str(error).strip().splitlines()[-1]
            raise InputError(f"the cluster lost a worker: {what}", "the same again: what is done is kept") from None
        if cause is not None:
            raise InputError(cause, remedy)
        advance(read)
        for number in numbers:
            at_work[actor.make.remote(number)] = actor
            break
