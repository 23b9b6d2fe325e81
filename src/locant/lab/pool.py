"""Where the trainings of a comparison run: in threads of this process, or on a Ray cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from locant.cluster import LOCAL, connected
from locant.lab.contestant import process_settings, torch_settings_kept
from locant.lab.results import AnyRecord, Failure
from locant.lab.settings import Settings
from locant.lab.training import Text, Training, contestants, run

A = TypeVar("A")
B = TypeVar("B")
Outcome = Sequence[AnyRecord | Failure]
RETRIES = 3
"""Of a training whose worker is lost."""

FAILURES = (Exception, SystemExit)
"""What the code of others, an encoding or a task, may raise: nothing else runs in a training."""


class Pool:
    """Room for some trainings at once, each with one thread; as a context, which ends those that are under way.

    Args:
        most: how many trainings there are.
        ray: the address of a cluster, or ``"local"`` for one on this machine; default: threads of this process.
    """

    def __init__(self, most: int, ray: str | None = None) -> None:
        self.threads, self.address = torch.get_num_threads(), ray
        self.size = max(1, min(self.threads, most))
        self._interrupted, self._open = threading.Event(), ExitStack()
        self._ray: Any = None

    def __enter__(self) -> Pool:
        if self.address is not None:
            self._ray = self._open.enter_context(connected(self.address, self.size))
            if self.address != LOCAL:
                self.size = max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        torch.set_num_threads(1)
        self._settings = process_settings()
        self._executor = ThreadPoolExecutor(min(self.threads, self.size))
        return self

    def __exit__(self, *error: Any) -> None:
        self._interrupted.set()
        self._executor.shutdown(cancel_futures=True)
        torch.set_num_threads(self.threads)
        self._open.__exit__(*error)

    def map(self, function: Callable[[A], B], each: Iterable[A]) -> list[B]:
        """What a function returns for each, in order; in threads of this process."""
        return list(self._executor.map(function, each))

    def outcomes(
        self, trainings: Sequence[Training], settings: Settings, text: Text | None,
        on_step: Callable[[Training, float], None],
    ) -> Iterator[Outcome]:  # fmt: skip
        """The records of each training as it ends, or how it failed."""

        def trained(training: Training) -> Outcome:
            def report(step: int, loss: float) -> None:
                if self._interrupted.is_set():
                    raise CancelledError
                on_step(training, loss)

            return outcome(training, settings, text, report, self._settings)

        if self._ray is not None:
            yield from _on_ray(self._ray, trainings, settings, text)
            return
        waiting = {self._executor.submit(trained, training) for training in trainings}
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda future: future.exception() is not None):  # what is measured is kept
                yield future.result()


def outcome(
    training: Training, settings: Settings, text: Text | None, on_step: Any = None,
    of_process: Mapping[str, Any] | None = None,
) -> Outcome:  # fmt: skip
    """What a training measured; one that fails does not end the others.

    One that changes torch's settings fails, and so does each that ran beside it with them: see `torch_settings_kept`.
    """
    try:
        with torch_settings_kept(training.encoding, of_process):
            return run(training, settings, text, on_step)
    except CancelledError:
        raise
    except FAILURES as error:
        reason = why(error)
        named = [training._replace(encoding=contestant.name) for contestant in contestants(training, settings)]
        return [Failure(**each._asdict(), failed=reason) for each in named]


def why(error: BaseException) -> str:
    """The kind of an error, and what it says, in one line."""
    return ": ".join(filter(None, [type(error).__name__, " ".join(str(error).split())]))


def _on_ray(ray: Any, trainings: Sequence[Training], settings: Settings, text: Text | None) -> Iterator[Outcome]:
    """On a cluster, which starts a training again where a worker is lost."""
    needs = {"num_cpus": 1, "num_gpus": settings.device != "cpu", "max_retries": RETRIES}
    shared, task = ray.put(text), ray.remote(**needs)(_in_a_worker)
    waiting = [task.remote(training, settings, shared) for training in trainings]
    try:
        while waiting:
            [done], waiting = ray.wait(waiting)
            yield ray.get(done)
    finally:
        for each in waiting:  # the cluster may be one that others use, too
            ray.cancel(each, force=True)


def _in_a_worker(training: Training, settings: Settings, text: Text | None) -> Outcome:
    torch.set_num_threads(1)
    return outcome(training, settings, text)
