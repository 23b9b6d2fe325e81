"""Connect to a running Ray cluster by its address, or start one with processes on this machine."""

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
"""Seconds to wait for an address to answer. Ray alone would try for minutes."""

TOKEN_REMEDY = f"set RAY_AUTH_MODE=token in the environment if the cluster requires a token; {LOCAL!r} needs none"
"""Ray sends its token to an address only if this variable is set."""


@contextmanager
def connect_ray(address: str, num_local: int) -> Generator[Any]:
    """Yield the package `ray`, connected to a cluster. A cluster that this call starts ends with the context.

    Args:
        address: the address of a running cluster, or ``"local"`` to start `num_local` processes on this machine.

    Raises:
        InputError: Ray is not installed, the address does not answer, or the cluster has lost a worker for good.
    """
    if not is_installed("ray"):
        raise InputError("Ray is not installed", Remedy(f"{install_command('ray')}, or omit {{}}", ray=...))
    import ray
    from ray.exceptions import RayError

    starts_here = not ray.is_initialized()
    if starts_here:
        _connect(ray, address, num_local)
    try:
        yield ray
    except RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise InputError(f"the cluster lost a worker: {reason}", "run it again: finished work is kept") from None
    finally:
        if starts_here:
            ray.shutdown()


def _connect(ray: Any, address: str, num_local: int) -> None:
    from ray.exceptions import RayError

    remedy = f"{LOCAL!r}, or ray start"
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}  # errors are raised
    try:
        if address == LOCAL:
            ray.init(address=LOCAL, num_cpus=num_local, include_dashboard=False, **quiet)
        else:
            url = urlsplit(address if "://" in address else f"//{address}")
            if url.hostname and url.port:  # Ray itself checks other forms of an address
                socket.create_connection((url.hostname, url.port), timeout=TIMEOUT).close()
                remedy = TOKEN_REMEDY
            ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise InputError(f"cannot reach a Ray cluster at {address!r}: {error}", remedy) from None
