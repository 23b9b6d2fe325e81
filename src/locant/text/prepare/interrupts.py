"""What Ctrl-C does to `prepare`, at each stage.

Ctrl-C raises `KeyboardInterrupt` in the main thread of the calling process, and in no other process. `prepare` passes
it on, after cleaning up, with a note that says how to go on (`resumable`); on the command line SIGTERM and SIGHUP do
the same, and the exit code is 130. The same call then goes on from what was kept.

* Finding inputs, reading standard input, planning: nothing is left, not even the folder of the store if this call made
  it; what earlier calls made is kept. Workers that run already are killed; they do not receive it (`ctrl_c_held`).
* Making parts: all parts that are finished are kept. In this process it is raised when a block is encoded
  (`readers.streams.BLOCK`), and the folder of the part is removed. Workers are killed, and the next call removes the
  folders of their parts. A Ray cluster that this call started is stopped.
* Joining: it ends, and the next call joins the rest.

A second Ctrl-C, or a kill, leaves at most folders that the next call removes (`locant.text.prepare.folders`), and
workers that end by themselves when their orders end.
"""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ctrl_c_held", "resumable"]


@contextmanager
def resumable(store: Path) -> Generator[None]:
    """On Ctrl-C, say how to go on, if anything was kept."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if store.exists():
            interrupt.add_note(f"stopped: the same command goes on from here, with what is done in {store}")
        raise


@contextmanager
def ctrl_c_held() -> Generator[None]:
    """Ctrl-C waits until the block ends, and processes that are started in it never receive it.

    A terminal sends it to all of its processes. What a process blocks, those that it starts block too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
