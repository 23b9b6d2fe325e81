"""The worker processes of one machine: started, given parts, watched, and killed as soon as anything goes wrong.

They are fresh interpreters, because a fork copies locks that no thread is left to open. Orders go in and reports come
out through pipes, as lines of JSON: nothing is pickled, and a script that prepares a store needs no
``if __name__ == "__main__"``. A worker whose orders end, as the process that gave them is done or dead, ends too.

Or those of a Ray cluster: the same work, where Ray says it shall be done. Every node has to see the inputs and the
folder of the store under the same names, as on a shared file system.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any, cast

from locant.cluster import LOCAL, connected
from locant.errors import InputError, LocantError
from locant.text.prepare.parts import Advance, make_part
from locant.text.prepare.plan import Plan, read_plan
from locant.text.tokenizer.engine import Engine, EngineName

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
        self._listeners: list[Thread] = []
        self._reports: SimpleQueue[tuple[_Worker, bytes]] = SimpleQueue()
        try:
            for _ in range(size):
                self._workers.append(_started())
                self._listeners.append(Thread(target=self._listen, args=[self._workers[-1]], daemon=True))
                self._listeners[-1].start()
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

        def give(worker: _Worker) -> None:
            """Another part for a worker, while there are any."""
            at_work.pop(worker, None)
            for number in waiting:
                at_work[worker] = number
                _order(worker, number)
                return

        for worker in self._workers:
            _order(worker, engine)
            give(worker)
        while at_work:
            worker, line = self._reports.get()
            report = _report(line, worker, at_work)
            if "read" in report:
                advance(report["read"])
            else:
                give(worker)

    def _listen(self, worker: _Worker) -> None:
        """In a thread: pass on what a worker reports, and in the end an empty line."""
        line = b"start"
        while line:
            line = _pipe(worker.stdout).readline()
            self._reports.put((worker, line))

    def close(self) -> None:
        """Kill them: those that are done have nothing to lose, and the others no more than the parts they are at."""
        for worker in self._workers:
            worker.kill()
            worker.wait()
            with suppress(OSError):
                _pipe(worker.stdin).close()
        for listener in self._listeners:
            listener.join()
        for worker in self._workers:
            _pipe(worker.stdout).close()


def _started() -> _Worker:
    """A fresh interpreter that finds its packages where this one does."""
    paths = os.pathsep.join(path for path in sys.path if path)
    with _blocked_interrupts():
        return subprocess.Popen(
            [sys.executable, "-P", "-c", "from locant.text.prepare.workers import main; main()"],
            bufsize=0,  # what is read ahead of a report would not be waited for
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": paths},
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # which gets no Ctrl-C on Windows
        )


@contextmanager
def _blocked_interrupts() -> Generator[None]:
    """A process that is started here never gets Ctrl-C, which a terminal sends to all; this one gets it afterwards.

    What a process blocks, those that it starts block too.
    """
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    """One end of a worker, which was started with pipes for both."""
    return cast("IO[bytes]", pipe)


def _order(worker: _Worker, order: str | int) -> None:
    with suppress(OSError):  # it is dead, which its next report tells; Windows does not call that a broken pipe
        _tell(_pipe(worker.stdin), order)


def _report(line: bytes, worker: _Worker, at_work: dict[_Worker, int]) -> dict[str, Any]:
    """What a worker has read or done, by a line of its; raises what went wrong in it."""
    if not line.endswith(b"\n"):  # it was killed, or in the middle of one
        code, number = worker.wait(), at_work.get(worker)
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
        when = "" if number is None else f" while it made part {number}"
        cause = f"a worker process {how}{when}; the system kills one when its memory is full"
        raise InputError(cause, "run the same again with fewer workers: finished work is kept")
    report = json.loads(line)
    if "error" in report:
        raise InputError(report["error"], report["remedy"])
    if "crash" in report:
        raise RuntimeError(f"a worker process failed:\n{report['crash']}")
    return report


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
            raise InputError(f"{store} has lost its plan while it was made", "run the same command again")
        tokenizer = plan.tokenizer()
        for name in lines:
            engine = Engine(tokenizer, name, parallel=False)
            for number in lines:
                make_part(plan, number, engine, lambda count: _tell(reports, {"read": count}))
                _tell(reports, {"done": number})


def _tell(pipe: IO[bytes], what: Any) -> None:
    pipe.write(json.dumps(what).encode() + b"\n")
    pipe.flush()


class _Maker:
    """Lives in a process of the cluster."""

    def __init__(self, store: str, engine: EngineName) -> None:
        plan = read_plan(Path(store))
        if plan is None:
            raise InputError(f"a node of the cluster sees no {store}", "use a folder that all nodes share")
        self._plan, self._engine = plan, Engine(plan.tokenizer(), engine, parallel=False)

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
    with connected(address, num_local) as ray:
        from ray.util import ActorPool

        cores = num_local if address == LOCAL else int(ray.cluster_resources().get("CPU", 1))
        actor = ray.remote(num_cpus=1)(_Maker)
        actors = [actor.remote(str(plan.store.resolve()), engine) for _ in range(max(1, min(cores, len(parts))))]
        pool = ActorPool(actors)
        for read, cause, remedy in pool.map_unordered(lambda actor, number: actor.make.remote(number), parts):
            if cause is not None:
                raise InputError(cause, remedy)
            advance(read)
