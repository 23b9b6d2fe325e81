"""What Ctrl-C does to `prepare`, at each stage.

Ctrl-C raises `KeyboardInterrupt` in the main thread of the calling process, and in no other process. `prepare` passes
it on, after cleaning up, with a note that says how to go on (`resumable`); on the command line SIGTERM and SIGHUP do
the same, and the exit code is 130. The same call then goes on from what was kept.

=============================== ================================================== =============================
stage                           what happens                                       what is kept
=============================== ================================================== =============================
finding inputs                  it ends                                            nothing was written
reading standard input,         the folder of the new plan is removed, and that of an earlier plan, if there is one
planning                        the store, if this call made it
starting workers                those that run are killed; none is left over,      the plan
                                because they start deaf to Ctrl-C (`ctrl_c_held`)
making parts in this process    heard after `HEARD_AFTER` bytes are encoded        all parts that are finished
                                (`in_small_batches`); the part's folder is removed
making parts in workers         workers are killed; the folders of their parts are all parts that are finished
                                removed by the next call
making parts on Ray             a cluster that this call started is stopped        all parts that are finished
joining                         it ends; the next call joins the rest              everything
=============================== ================================================== =============================

A second Ctrl-C, or a kill, leaves at most folders that the next call removes (`locant.text.prepare.folders`), and
workers that end by themselves when their orders end.
"""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from locant.text.prepare.readers import Batch

__all__ = ["ctrl_c_held", "in_small_batches", "resumable"]

HEARD_AFTER = 2**20
"""Bytes that are encoded at a time: Ctrl-C has to wait for an engine, and the slow one takes a while."""


@contextmanager
def resumable(store: Path) -> Generator[None]:
    """On Ctrl-C, say how to go on, if anything was kept in the folder of the store."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if store.exists():
            interrupt.add_note(f"stopped: the same command goes on from here, with what is done in {store}")
        raise


@contextmanager
def ctrl_c_held() -> Generator[None]:
    """Ctrl-C waits until the block ends, and processes that are started in it never hear it.

    A terminal sends it to all of its processes. What a process blocks, those that it starts block too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def in_small_batches(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same documents, `HEARD_AFTER` bytes or a document at a time."""
    for texts, unfinished in batches:
        some: list[bytes] = []
        size = 0
        for text in texts[:-1]:
            some.append(text)
            size += len(text)
            if size >= HEARD_AFTER:
                yield Batch(some, unfinished=False)
                some, size = [], 0
        yield Batch([*some, *texts[-1:]], unfinished)
