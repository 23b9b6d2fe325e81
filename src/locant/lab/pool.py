"""Execute the training runs of a comparison in threads of this process or on a Ray cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from locant.cluster import LOCAL, connect_ray
from locant.lab.candidate import preserve_torch_settings, process_settings
from locant.lab.results import AnyRecord, Failure
from locant.lab.settings import Settings
from locant.lab.training import Text, Training, candidates, run

A = TypeVar("A")
B = TypeVar("B")
Outcome = Sequence[AnyRecord | Failure]
RETRIES = 3
"""The number of times that a training run is repeated if its worker is lost."""

FAILURES = (Exception, SystemExit)
"""The errors that a user's encoding or task may raise in a training run."""


class Pool:
    """A pool for several training runs at once, with one thread each. When its context ends, it stops them.

    Args:
        most: the number of training runs. It limits the number of threads.
        ray: the address of a cluster, or ``"local"`` for one on this machine. Default: threads of this process.
    """

    def __init__(self, most: int, ray: str | None = None) -> None:
        self.threads, self.address = torch.get_num_threads(), ray
        self.size = max(1, min(self.threads, most))
        self._interrupted, self._open = threading.Event(), ExitStack()
        self._ray: Any = None

    def __enter__(self) -> Pool:
        if self.address is not None:
            self._ray = self._open.enter_context(connect_ray(self.address, self.size))
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
        """Run a function for each value in threads of this process. Return the results in the order of the values."""
        return list(self._executor.map(function, each))

    def outcomes(
        self, trainings: Sequence[Training], settings: Settings, text: Text | None,
        on_step: Callable[[Training, float], None],
    ) -> Iterator[Outcome]:  # fmt: skip
        """Yield the records or the failure of each training run when it ends."""

        def run_one(training: Training) -> Outcome:
            def report(step: int, loss: float) -> None:
                if self._interrupted.is_set():
                    raise CancelledError
                on_step(training, loss)

            return outcome(training, settings, text, report, self._settings)

        if self._ray is not None:
            yield from _run_on_ray(self._ray, trainings, settings, text)
            return
        waiting = {self._executor.submit(run_one, training) for training in trainings}
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in sorted(
                done, key=lambda future: future.exception() is not None
            ):  # finished training runs first, so that their records are kept
                yield future.result()


def outcome(
    training: Training, settings: Settings, text: Text | None, on_step: Any = None,
    of_process: Mapping[str, Any] | None = None,
) -> Outcome:  # fmt: skip
    """Return the records or the failure of a training run. A failure does not end the other runs.

    A training run that changes torch's settings fails. Other runs that used the changed settings at the same time fail,
    too. See `preserve_torch_settings`.
    """
    try:
        with preserve_torch_settings(training.encoding, of_process):
            return run(training, settings, text, on_step)
    except CancelledError:
        raise
    except FAILURES as error:
        reason = describe_error(error)
        named = [training._replace(encoding=candidate.name) for candidate in candidates(training, settings)]
        return [Failure(**each._asdict(), failed=reason) for each in named]


def describe_error(error: BaseException) -> str:
    """Return the type and the message of an error in one line."""
    return ": ".join(filter(None, [type(error).__name__, " ".join(str(error).split())]))


def _run_on_ray(ray: Any, trainings: Sequence[Training], settings: Settings, text: Text | None) -> Iterator[Outcome]:
    """Execute training runs on a cluster. If a worker is lost, the cluster starts its run again."""
    needs = {"num_cpus": 1, "num_gpus": settings.device != "cpu", "max_retries": RETRIES}
    shared, task = ray.put(text), ray.remote(**needs)(_run_in_worker)
    waiting = [task.remote(training, settings, shared) for training in trainings]
    try:
        while waiting:
            [done], waiting = ray.wait(waiting)
            yield ray.get(done)
    finally:
        for each in waiting:  # other programs may use the cluster, too
            ray.cancel(each, force=True)


def _run_in_worker(training: Training, settings: Settings, text: Text | None) -> Outcome:
    torch.set_num_threads(1)
    return outcome(training, settings, text)
