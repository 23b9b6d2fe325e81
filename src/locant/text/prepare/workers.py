"""Make parts in worker processes on one machine, or on a Ray cluster.

Workers on one machine are fresh interpreters, because a fork copies locks that no thread is left to release. They
receive orders and send reports through pipes, as lines of JSON. So nothing is pickled, and a script that prepares a
store needs no ``if __name__ == "__main__"``. A worker ends when its orders end, because the process that sends orders
is then done or dead. All workers are killed as soon as anything fails.

On a Ray cluster, Ray distributes the same work. Every node must see the inputs and the folder of the store under the
same names, as on a shared file system.
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

from locant.cluster import LOCAL, connect_ray
from locant.errors import InputError, LocantError
from locant.text.prepare.parts import Advance, make_part
from locant.text.prepare.plan import Plan, read_plan
from locant.text.tokenizer.engine import Engine, EngineName

ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""The environment of a worker. It uses one thread, because every core already has a worker."""

_Worker = subprocess.Popen[bytes]


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """A group of `size` workers. They start while the work is planned, and wait for orders. Call `close` at the end."""

    def __init__(self, size: int) -> None:
        self._workers: list[_Worker] = []
        self._listeners: list[Thread] = []
        self._reports: SimpleQueue[tuple[_Worker, bytes]] = SimpleQueue()
        try:
            for _ in range(size):
                self._workers.append(_start())
                self._listeners.append(Thread(target=self._listen, args=[self._workers[-1]], daemon=True))
                self._listeners[-1].start()
        except BaseException:
            self.close()
            raise

    def load(self, store: Path) -> None:
        """Let the workers load the plan of a store, and its tokenizer, while an engine is chosen."""
        for worker in self._workers:
            _order(worker, str(store))

    def make(self, engine: EngineName, parts: Iterable[int], advance: Advance) -> None:
        """Let the workers make the parts with these numbers, in any order. Call `load` first."""
        waiting, at_work = iter(parts), dict[_Worker, int]()

        def assign(worker: _Worker) -> None:
            """Assign the next part to a worker, if there is one."""
            at_work.pop(worker, None)
            for number in waiting:
                at_work[worker] = number
                _order(worker, number)
                return

        for worker in self._workers:
            _order(worker, engine)
            assign(worker)
        while at_work:
            worker, line = self._reports.get()
            report = _report(line, worker, at_work)
            if "read" in report:
                advance(report["read"])
            else:
                assign(worker)

    def _listen(self, worker: _Worker) -> None:
        """Pass on the reports of a worker, and an empty line at the end. Runs in a thread."""
        line = b"start"
        while line:
            line = _pipe(worker.stdout).readline()
            self._reports.put((worker, line))

    def close(self) -> None:
        """Kill the workers. Idle workers lose no work, and busy workers lose only their current part."""
        for worker in self._workers:
            worker.kill()
            worker.wait()
            with suppress(OSError):
                _pipe(worker.stdin).close()
        for listener in self._listeners:
            listener.join()
        for worker in self._workers:
            _pipe(worker.stdout).close()


def _start() -> _Worker:
    """Start a fresh interpreter that finds its packages at the same places as this one."""
    paths = os.pathsep.join(path for path in sys.path if path)
    with _blocked_interrupts():
        return subprocess.Popen(
            [sys.executable, "-P", "-c", "from locant.text.prepare.workers import main; main()"],
            bufsize=0,  # a buffer would hold back reports
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": paths},
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # does not receive Ctrl-C on Windows
        )


@contextmanager
def _blocked_interrupts() -> Generator[None]:
    """Keep Ctrl-C, which a terminal sends to all processes, from processes that are started in this context.

    A process inherits the blocked signals of its parent. This process receives the signal at the end of the context.
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
    """Return standard input or output of a worker, which are always pipes."""
    return cast("IO[bytes]", pipe)


def _order(worker: _Worker, order: str | int) -> None:
    with suppress(OSError):  # a dead worker is found by its next report; on Windows the error is not a broken pipe
        _send(_pipe(worker.stdin), order)


def _report(line: bytes, worker: _Worker, at_work: dict[_Worker, int]) -> dict[str, Any]:
    """Return the report in a line of a worker, or raise the error that it reports."""
    if not line.endswith(b"\n"):  # the worker was killed, maybe while it wrote a line
        code, number = worker.wait(), at_work.get(worker)
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
        when = "" if number is None else f" while it made part {number}"
        cause = f"a worker process {how}{when}; the system kills processes when its memory is full"
        raise InputError(cause, "run again with fewer workers: finished work is kept")
    report = json.loads(line)
    if "error" in report:
        raise InputError(report["error"], report["remedy"])
    if "crash" in report:
        raise RuntimeError(f"a worker process failed:\n{report['crash']}")
    return report


def main() -> None:
    """Run a worker: follow the orders on standard input, and report on standard output.

    All other output goes to standard error. A `LocantError` is reported with its cause and remedy.
    """
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        _work(sys.stdin.buffer, reports)
    except LocantError as error:
        _send(reports, {"error": error.cause, "remedy": error.remedy})
    except MemoryError:
        remedy = "run again with fewer workers: finished work is kept"
        _send(reports, {"error": "a worker has no memory left", "remedy": remedy})
    except BrokenPipeError:
        return
    except BaseException:
        _send(reports, {"crash": traceback.format_exc()})
        raise


def _work(orders: IO[bytes], reports: IO[bytes]) -> None:
    """Follow the orders: the folder of the store, the name of the engine, then numbers of parts."""
    lines = map(json.loads, orders)
    for store in lines:
        plan = read_plan(Path(store))
        if plan is None:
            raise InputError(f"the plan of {store} vanished while it was made", "run the same command again")
        tokenizer = plan.tokenizer()
        for name in lines:
            engine = Engine(tokenizer, name, parallel=False)
            for number in lines:
                make_part(plan, number, engine, lambda count: _send(reports, {"read": count}))
                _send(reports, {"done": number})


def _send(pipe: IO[bytes], message: Any) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


class _Maker:
    """An actor that makes parts in a process of the cluster."""

    def __init__(self, store: str, engine: EngineName) -> None:
        plan = read_plan(Path(store))
        if plan is None:
            raise InputError(f"a node of the cluster sees no {store}", "use a folder that all nodes share")
        self._plan, self._engine = plan, Engine(plan.tokenizer(), engine, parallel=False)

    def make(self, number: int) -> tuple[int, str | None, str]:
        """Make a part, and return the number of bytes read, and the cause and remedy of an error, if any."""
        read: list[int] = []
        try:
            make_part(self._plan, number, self._engine, read.append)
        except LocantError as error:
            return 0, error.cause, error.remedy
        return sum(read), None, ""


def make_on_ray(
    address: str, plan: Plan, engine: EngineName, parts: list[int], advance: Advance, num_local: int
) -> None:
    """Make the parts with these numbers by actors of a cluster, one on each of its cores.

    `address` is the address of a running cluster, or ``"local"`` for `num_local` processes on this machine.
    """
    with connect_ray(address, num_local) as ray:
        from ray.util import ActorPool

        cores = num_local if address == LOCAL else int(ray.cluster_resources().get("CPU", 1))
        actor = ray.remote(num_cpus=1)(_Maker)
        actors = [actor.remote(str(plan.store.resolve()), engine) for _ in range(max(1, min(cores, len(parts))))]
        pool = ActorPool(actors)
        for read, cause, remedy in pool.map_unordered(lambda actor, number: actor.make.remote(number), parts):
            if cause is not None:
                raise InputError(cause, remedy)
            advance(read)
