"""Compiles every case of `tests/gpu_without_gpu/compiled_cases.py` and writes down what came out, a line for each.

``python -m benchmarks.compile_all`` takes an hour of a core's time; lines that this version of torch
has already in `RESULTS` are left.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.gpu_without_gpu import inductor, outcomes

__all__: list[str] = []

RESULTS = Path(__file__).parent / "results" / "compiled.csv"
HEADER = ["torch", "encoding", "arrangement", "dtype", "backward", "kernels", "shared memory", "atomics", "error"]


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        inductor.start(Path(cache))  # before torch is imported
        import torch

        from tests.gpu_without_gpu.compiled_cases import every_case

        cases = {(torch.__version__, *map(str, case)): case for case in every_case()}
        lines = {tuple(line[:5]): line for line in _read()}
        for key, case in sorted(cases.items(), key=lambda each: _turn(each[1])):
            if key not in lines:
                lines[key] = [*key, *_outcome(case)]
                _write([lines[each] for each in cases if each in lines])
                print(*lines[key], file=sys.stderr)  # it takes long


def _turn(case: Any) -> tuple[bool, int]:
    """What covers most comes first: a backward pass compiles its forward pass too; every dtype before every row."""
    return not case.learning, ("prefill", "decode", "packed", "window", "grid").index(case.arrangement)


def _outcome(case: Any) -> list[str]:
    """How many kernels, the most shared memory of one in bytes, additions in no fixed order; or what went wrong.

    Of one that a device has too little memory for Inductor goes on to smaller blocks: those that fit are counted.
    """
    from tests.gpu_without_gpu.compiled_cases import machine_code

    try:
        made = machine_code(case)
    except Exception as error:  # noqa: BLE001  # whatever it is, it belongs into the table
        return ["", "", "", next(iter(str(error).splitlines()), type(error).__name__)]
    kernels = [kernel for kernel in made if kernel.shared <= inductor.SHARED_MEMORY]
    if missing := {kernel.name for kernel in made} - {kernel.name for kernel in kernels}:
        return ["", "", "", f"does not fit the device: {', '.join(sorted(missing))}"]
    shared, atomics = max(kernel.shared for kernel in kernels), sum(outcomes.atomics(kernel.ptx) for kernel in kernels)
    return [str(len(kernels)), str(shared), str(atomics), ""]


def _read() -> list[list[str]]:
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.reader(file))[1:]


def _write(lines: list[list[str]]) -> None:
    with RESULTS.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADER, *lines])


if __name__ == "__main__":
    main()
