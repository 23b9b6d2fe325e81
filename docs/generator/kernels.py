"""Notebooks begin quickly: their kernels are forked from a process that has imported PyTorch and this package.

To import these takes some three seconds, for each of thirty pages. Nothing is computed in that process: a kernel that
was forked from it differs from one that was started by itself in what `sys.modules` holds, and in where torch's
generator begins, which is the same place for all. No notebook sees what another one did.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import TYPE_CHECKING, Any

from jupyter_client.provisioning import local_provisioner

if TYPE_CHECKING:
    from sphinx.application import Sphinx

__all__ = ["setup"]

IMPORTED = [
    "ipykernel.ipkernel", "ipykernel.kernelapp", "torch", "tokenizers", "locant.figures.canvas",
    "locant.lab.comparison", "locant.models", "matplotlib.backends.backend_agg", "matplotlib.figure",
]  # fmt: skip
"""Not `matplotlib.pyplot`, nor the backend of notebooks: they look for a running shell when they are imported."""


def setup(app: Sphinx) -> dict[str, bool]:
    """Start kernels by forking, where that is possible; Windows cannot."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        local_provisioner.launch_kernel = _launch  # type: ignore[assignment]
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class _Kernel:
    """A forked process, with the methods of `subprocess.Popen` that Jupyter's provisioner calls."""

    stdin = stdout = stderr = None

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def send_signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()


def _launch(command: Sequence[str], *, cwd: str, env: dict[str, str], **ignored: Any) -> _Kernel:
    """What `jupyter_client.launch_kernel` does; of the command, only the file with the addresses matters."""
    context: ForkServerContext = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    ready, begun = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=([*command][command.index("-f") :], cwd, env, begun))
    process.start()
    ready.recv()  # signals are sent to its process group: not before it has one of its own
    return _Kernel(process)


def _run(arguments: list[str], cwd: str, env: dict[str, str], begun: Connection) -> None:
    """In the forked process: become a kernel, in a session of its own, which ends with the process it came from."""
    from ipykernel.kernelapp import IPKernelApp

    os.setsid()
    begun.send(None)
    os.chdir(cwd)
    os.environ.update(env)
    sys.argv = ["ipykernel_launcher", *arguments]
    IPKernelApp.launch_instance(arguments, parent_handle=os.getppid())
