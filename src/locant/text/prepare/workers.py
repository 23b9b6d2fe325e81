"""The worker processes of one machine: started, given parts, watched, and killed as soon as anything goes wrong.

They are fresh interpreters, because a fork copies locks that no thread is left to open. Orders go in and reports come
out through pipes, as lines of JSON: nothing is pickled, and a script that prepares a store needs no
``if __name__ == "__main__"``. A worker whose orders end, as the process that gave them is done or dead, ends too.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import traceback
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from locant.errors import InputError, LocantError
from locant.text.prepare.parts import Advance, make_part
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
    """`size` workers, which start while the work is planned, and wait for orders; `close` them in the end."""

    def __init__(self, size: int) -> None:
        self._workers: list[_Worker] = []
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
        waiting, at_work = iter(parts), dict[_Worker, int]()
        with selectors.DefaultSelector() as reporting:
            for worker in self._workers:
                reporting.register(_pipe(worker.stdout), selectors.EVENT_READ, worker)
                _order(worker, engine)
                _next(worker, waiting, at_work)
            while at_work:
                for key, _ in reporting.select():
                    report = _report(key.data, at_work)
                    if "read" in report:
                        advance(report["read"])
                    else:
                        _next(key.data, waiting, at_work)

    def close(self) -> None:
        """Kill them: those that are done have nothing to lose, and the others no more than the parts they are at."""
        for worker in self._workers:
            worker.kill()
            worker.wait()
            with suppress(BrokenPipeError):
                _pipe(worker.stdin).close()
            _pipe(worker.stdout).close()


def _started() -> _Worker:
    """A fresh interpreter that finds its packages where this one does."""
    paths = os.pathsep.join(path for path in sys.path if path)
    with _ctrl_c_held():
        return subprocess.Popen(
            [sys.executable, "-P", "-c", "from locant.text.prepare.workers import main; main()"],
            bufsize=0,  # what is read ahead of a report would not be waited for
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": paths},
        )


@contextmanager
def _ctrl_c_held() -> Generator[None]:
    """Ctrl-C waits until the block ends, and processes that are started in it never receive it.

    A terminal sends it to all of its processes. What a process blocks, those that it starts block too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    """One end of a worker, which was started with pipes for both."""
    return cast("IO[bytes]", pipe)


def _next(worker: _Worker, waiting: Iterator[int], at_work: dict[_Worker, int]) -> None:
    """Another part for a worker, while there are any."""
    at_work.pop(worker, None)
    for number in waiting:
        at_work[worker] = number
        _order(worker, number)
        return


def _order(worker: _Worker, order: str | int) -> None:
    with suppress(BrokenPipeError):  # it is dead, which its next report tells
        _tell(_pipe(worker.stdin), order)


def _report(worker: _Worker, at_work: dict[_Worker, int]) -> dict[str, Any]:
    """What a worker has read or done; raises what went wrong in it."""
    line = _pipe(worker.stdout).readline()
    if not line.endswith(b"\n"):  # it was killed, or in the middle of one
        _lost(worker, at_work.get(worker))
    report = json.loads(line)
    if "error" in report:
        raise InputError(report["error"], report["remedy"])
    if "crash" in report:
        raise RuntimeError(f"a worker process failed:\n{report['crash']}")
    return report


def _lost(worker: _Worker, number: int | None) -> NoReturn:
    code = worker.wait()
    how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
    when = "" if number is None else f" while it made part {number}"
    cause = f"a worker process {how}{when}; the system kills one when its memory is full"
    raise InputError(cause, "the same again with fewer workers: what is done is kept")


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
