"""A Ray cluster that does the work of a call: a running one by its address, or one of processes on this machine."""

from __future__ import annotations

import logging
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from locant.errors import InputError, Remedy
from locant.extras import install_command, is_installed

LOCAL = "local"
TIMEOUT = 10.0
"""Seconds until an address that does not answer is given up; Ray alone tries for minutes."""

ASKS_FOR_A_TOKEN = f"RAY_AUTH_MODE=token in the environment, if the cluster asks for a token; {LOCAL!r} needs none"
"""Ray sends its token to an address only where the environment says so."""


@contextmanager
def connected(address: str, num_local: int) -> Generator[Any]:
    """The package `ray`, connected to a cluster; one that this call has started ends with the context.

    Args:
        address: of a running cluster, or ``"local"`` for one of `num_local` processes on this machine.

    Raises:
        InputError: Ray is not installed, the address does not answer, or the cluster has lost a worker for good.
    """
    if not is_installed("ray"):
        raise InputError("Ray is not installed", Remedy(f"{install_command('ray')}, or no {{}}", ray=...))
    import ray
    from ray.exceptions import RayError

    ours = not ray.is_initialized()
    if ours:
        _connect(ray, address, num_local)
    try:
        yield ray
    except RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise InputError(f"the cluster lost a worker: {reason}", "the same again: what is done is kept") from None
    finally:
        if ours:
            ray.shutdown()


def _connect(ray: Any, address: str, num_local: int) -> None:
    from ray.exceptions import RayError

    remedy = f"{LOCAL!r}, or ray start"
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}  # what goes wrong is raised
    try:
        if address == LOCAL:
            ray.init(address=LOCAL, num_cpus=num_local, include_dashboard=False, **quiet)
        else:
            place = urlsplit(address if "://" in address else f"//{address}")
            if place.hostname and place.port:  # Ray itself checks other forms of an address
                socket.create_connection((place.hostname, place.port), timeout=TIMEOUT).close()
                remedy = ASKS_FOR_A_TOKEN
            ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise InputError(f"cannot reach a Ray cluster at {address!r}: {error}", remedy) from None
