"""The worker processes of one machine: started, given parts, watched, and stopped at once when anything goes wrong.

They are fresh interpreters, because a fork copies locks that no thread is left to open, and NumPy alone brings threads.
What they are told goes through pipes as JSON: nothing is pickled, and a script that prepares a store needs no
``if __name__ == "__main__"``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any, NoReturn, cast

from locant.errors import InputError
from locant.text.prepare.worker import ONE_THREAD

__all__ = ["Crew", "num_cores"]


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_Worker = subprocess.Popen[bytes]


class Crew:
    """`size` workers, which wait for orders from the moment this is made: they start while the work is planned."""

    def __init__(self, size: int) -> None:
        self._workers: list[_Worker] = []
        self._listeners: list[threading.Thread] = []
        try:
            for _ in range(size):
                self._workers.append(_started())
        except BaseException:
            self._stop()
            raise

    def __len__(self) -> int:
        return len(self._workers)

    def prepare(self, store: Path) -> None:
        """Tell them where the plan is, so that they load its tokenizer while an engine is chosen."""
        for worker in self._workers:
            _order(worker, str(store))

    def make(self, engine: str, numbers: Iterable[int], advance: Callable[[int], None]) -> None:
        """Have the parts with these numbers made, in any order, once `prepare` was called.

        Raises:
            InputError: what a worker could not do, or that one was killed.
        """
        reports: SimpleQueue[tuple[_Worker, dict[str, Any] | None]] = SimpleQueue()
        waiting, at_work = iter(numbers), dict[int, int]()
        self._listeners = [threading.Thread(target=_listen, args=(one, reports), daemon=True) for one in self._workers]
        for listener in self._listeners:
            listener.start()
        for worker in self._workers:
            _order(worker, engine)
            _next(worker, waiting, at_work)
        while at_work:
            worker, report = reports.get()
            if report is None:
                _lost(worker, at_work.get(worker.pid))
            elif "read" in report:
                advance(report["read"])
            elif "done" in report:
                _next(worker, waiting, at_work)
            else:
                _failed(report)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        """Kill them: those that are done have nothing to lose, and the others no more than the parts they are at."""
        for worker in self._workers:
            worker.kill()
            worker.wait()
            _close(worker.stdin)
        for listener in self._listeners:
            listener.join()
        for worker in self._workers:
            _close(worker.stdout)


def _close(pipe: IO[bytes] | None) -> None:
    with suppress(BrokenPipeError):
        _pipe(pipe).close()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    """One end of a worker, which was started with pipes for both."""
    return cast("IO[bytes]", pipe)


def _next(worker: _Worker, waiting: Iterator[int], at_work: dict[int, int]) -> None:
    """Another part for a worker, while there are any."""
    at_work.pop(worker.pid, None)
    for number in waiting:
        at_work[worker.pid] = number
        _order(worker, number)
        return


def _order(worker: _Worker, order: str | int) -> None:
    with suppress(BrokenPipeError):  # it is dead, which `_listen` tells
        orders = _pipe(worker.stdin)
        orders.write(json.dumps(order).encode() + b"\n")
        orders.flush()


def _listen(worker: _Worker, reports: SimpleQueue[tuple[_Worker, dict[str, Any] | None]]) -> None:
    for line in _pipe(worker.stdout):
        if line.endswith(b"\n"):  # else it was killed in the middle of it
            reports.put((worker, json.loads(line)))
    reports.put((worker, None))


def _lost(worker: _Worker, number: int | None) -> NoReturn:
    code = worker.wait()
    how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
    when = "" if number is None else f" while it made part {number}"
    raise InputError(
        f"a worker process {how}{when}; the system kills one when its memory is full",
        "the same again with fewer workers: what is done is kept",
    )


def _failed(report: dict[str, Any]) -> NoReturn:
    if "error" in report:
        raise InputError(report["error"], report["remedy"])
    raise RuntimeError(f"a worker process failed:\n{report.get('crash', report)}")


def _started() -> _Worker:
    """A fresh interpreter that finds its packages where this one does."""
    paths = os.pathsep.join(path for path in sys.path if path)
    with _ctrl_c_waits():
        return subprocess.Popen(
            [sys.executable, "-P", "-c", "from locant.text.prepare.worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": paths},
        )


@contextmanager
def _ctrl_c_waits() -> Generator[None]:
    """A process that is started meanwhile is deaf to Ctrl-C, until it says what it does about it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
