"""What Ctrl-C does to `prepare`, at each stage.

Ctrl-C raises `KeyboardInterrupt` in the main thread of the calling process, and in no other process. `prepare` passes
it on, after cleaning up, with a note that says how to go on (`resumable`); on the command line SIGTERM and SIGHUP do
the same, and the exit code is 130. The same call then goes on from what was kept.

===================== ============================================================== ===========================
stage                 what happens                                                   what is kept
===================== ============================================================== ===========================
finding inputs        it ends                                                        nothing was written
starting workers      those that run are killed; they do not receive it themselves       what earlier calls made
                      (`ctrl_c_held`)
reading standard      the folder of the new plan is removed, and that of the store   what earlier calls made
input, planning       if this call made it
making parts in this  raised when a block is encoded (`readers.streams.BLOCK`); the   all parts that are finished
process               part's folder is removed
making parts in       workers are killed; the next call removes the folders of their all parts that are finished
workers               parts
making parts on Ray   a cluster that this call started is stopped                    all parts that are finished
joining               it ends; the next call joins the rest                          everything
===================== ============================================================== ===========================

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
