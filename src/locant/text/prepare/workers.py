"""The worker processes of one machine: started, given parts, watched, and killed as soon as anything goes wrong.

They are fresh interpreters, because a fork copies locks that no thread is left to open, and NumPy alone brings threads.
Orders go in and reports come out through pipes, as lines of JSON: nothing is pickled, and a script that prepares a
store needs no ``if __name__ == "__main__"``. A worker whose orders end, because the process that gave them is done or
dead, ends too; the part that it was at is made again by the next run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NoReturn, cast

from locant.errors import InputError, LocantError
from locant.text.prepare.encode import Advance
from locant.text.prepare.interrupts import ctrl_c_held
from locant.text.prepare.parts import make_part
from locant.text.prepare.plan import read_plan
from locant.text.tokenizer.engine import Engine, EngineName

__all__ = ["Workers", "main", "num_cores"]

ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""There is a worker for every core already."""

_Worker = subprocess.Popen[bytes]


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """`size` workers, which wait for orders from the moment this is made: they start while the work is planned.

    `close` them in the end.
    """

    def __init__(self, size: int) -> None:
        self._workers: list[_Worker] = []
        self._listeners: list[threading.Thread] = []
        try:
            for _ in range(size):
                self._workers.append(_started())
        except BaseException:
            self.close()
            raise

    def load(self, store: Path) -> None:
        """Have them load the plan of a store, and its tokenizer, while an engine is chosen."""
        for worker in self._workers:
            _order(worker, str(store))

    def make(self, engine: EngineName, parts: Iterable[int], advance: Advance) -> None:
        """Have the parts with these numbers made, in any order, once `load` was called."""
        reports: SimpleQueue[tuple[_Worker, dict[str, Any] | None]] = SimpleQueue()
        waiting, at_work = iter(parts), dict[int, int]()
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
            elif "error" in report:
                raise InputError(report["error"], report["remedy"])
            else:
                raise RuntimeError(f"a worker process failed:\n{report.get('crash', report)}")

    def close(self) -> None:
        """Kill them: those that are done have nothing to lose, and the others no more than the parts they are at."""
        for worker in self._workers:
            worker.kill()
            worker.wait()
            with suppress(BrokenPipeError):
                _pipe(worker.stdin).close()
        for listener in self._listeners:
            listener.join()
        for worker in self._workers:
            _pipe(worker.stdout).close()


def _started() -> _Worker:
    """A fresh interpreter that finds its packages where this one does."""
    paths = os.pathsep.join(path for path in sys.path if path)
    with ctrl_c_held():
        return subprocess.Popen(
            [sys.executable, "-P", "-c", "from locant.text.prepare.workers import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": paths},
        )


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
        _tell(_pipe(worker.stdin), order)


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


def main() -> None:
    """In a worker: follow the orders on standard input, and report on standard output.

    What else is printed goes to standard error. Errors that the user can change are reported in their words.
    """
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        _work(sys.stdin.buffer, reports)
    except LocantError as error:
        _tell(reports, {"error": error.cause, "remedy": error.remedy})
    except MemoryError:
        _tell(reports, {"error": "a worker has no memory left", "remedy": "fewer workers; what is done is kept"})
    except BrokenPipeError:
        return
    except BaseException:
        _tell(reports, {"crash": traceback.format_exc()})
        raise


def _work(orders: IO[bytes], reports: IO[bytes]) -> None:
    """The first order says where the plan is, the second which engine to use; the others are numbers of parts."""
    lines = map(json.loads, orders)
    for store in lines:
        plan = read_plan(Path(store))
        if plan is None:
            raise InputError(f"{store} has lost its plan while it was made", "the same command again")
        tokenizer = plan.tokenizer()
        for name in lines:
            engine = Engine(tokenizer, name, parallel=False)
            for number in lines:
                make_part(plan, number, engine, lambda count: _tell(reports, {"read": count}))
                _tell(reports, {"done": number})


def _tell(pipe: IO[bytes], what: Any) -> None:
    pipe.write(json.dumps(what).encode() + b"\n")
    pipe.flush()
