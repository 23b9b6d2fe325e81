"""Parts made on a Ray cluster: the same work as that of local workers, where Ray says it shall be done.

Every node has to see the inputs and the folder of the store under the same names, as on a shared file system.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from locant.errors import InputError, LocantError
from locant.text.prepare.parts import Advance, make_part
from locant.text.prepare.plan import Plan, read_plan
from locant.text.tokenizer.engine import Engine, EngineName

__all__ = ["LOCAL", "make_on_ray"]

LOCAL = "local"
TIMEOUT = 10.0
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
    address: str, plan: Plan, engine: EngineName, parts: list[int], advance: Advance, num_local: int
) -> None:
    """Have the parts with these numbers made by actors of a cluster, one on each of its cores.

    `address` is that of a running cluster, or ``"local"`` for one of `num_local` processes on this machine.
    """
    try:
        import ray
        from ray.exceptions import RayError
        from ray.util import ActorPool
    except ModuleNotFoundError:
        raise InputError("Ray is not installed", "pip install 'locant[ray]', or no ray=") from None
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, address, num_local)
    try:
        cores = num_local if address == LOCAL else int(ray.cluster_resources().get("CPU", 1))
        actor = ray.remote(num_cpus=1)(_Maker)
        actors = [actor.remote(str(plan.store.resolve()), engine) for _ in range(max(1, min(cores, len(parts))))]
        made = ActorPool(actors).map_unordered(lambda actor, number: actor.make.remote(number), parts)
        for read, cause, remedy in made:
            if cause is not None:
                raise InputError(cause, remedy)
            advance(read)
    except RayError as error:
        what = str(error).strip().splitlines()[-1]
        raise InputError(f"the cluster lost a worker: {what}", "the same again: what is done is kept") from None
    finally:
        if ours:
            ray.shutdown()


def _connect(ray: Any, address: str, num_local: int) -> None:
    try:
        if address == LOCAL:
            ray.init(address=LOCAL, num_cpus=num_local, include_dashboard=False, log_to_driver=False)
        else:
            place = urlsplit(address if "://" in address else f"//{address}")
            if place.hostname and place.port:  # Ray itself checks other forms of an address
                socket.create_connection((place.hostname, place.port), timeout=TIMEOUT).close()
            ray.init(address=address, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"cannot reach a Ray cluster at {address!r}: {error}", f"{LOCAL!r}, or ray start") from None
