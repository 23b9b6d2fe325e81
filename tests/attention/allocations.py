"""What a piece of code allocates, as torch's own allocator reports it: not what the process happens to hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Allocations:
    """In bytes."""

    largest: int
    """The largest single tensor or scratch buffer."""
    peak: int
    """The most that was held at a time, of what was allocated meanwhile."""


def allocations_of(run: Callable[[], object]) -> Allocations:
    """Run it once, and look at every allocation on the CPU, those inside of operators included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    del kept
    results = profiler.profiler.kineto_results
    changes = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = largest = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        peak, largest = max(peak, held), max(largest, change.nbytes())
    return Allocations(largest, peak)
