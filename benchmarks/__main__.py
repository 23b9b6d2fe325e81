"""``python -m benchmarks [NAME...]``: every table, ratios first, kept in ``results/<device>.json``.

``python -m benchmarks gpu`` is all that needs a GPU: the tests marked gpu, and, if they pass, the benchmarks of it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path

import torch

from docs.generator import readme
from locant.files import write_whole
from locant.lab import environment
from locant.report.benchmarks import table

NAMES = (
    "rotary", "norm_rotary", "attention", "decoding", "every_encoding", "small_calls", "whole_model", "windows",
    "store", "engine", "prepare", "explore", "input_tables",
)  # fmt: skip
ON_A_GPU = ("rotary", "norm_rotary", "attention", "decoding")
RESULTS = Path(__file__).parent / "results"


def main(names: list[str]) -> None:
    """Run these benchmarks, or all of them; a result replaces the one recorded before for this device."""
    if names == ["gpu"]:
        _require_gpu()
        names = list(ON_A_GPU)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        sys.exit(f"got {', '.join(unknown)}, expected one or more of {', '.join(NAMES)}, or gpu alone")
    for name in names or NAMES:
        torch.manual_seed(0)
        rows = [dataclasses.asdict(row) for row in importlib.import_module(f"benchmarks.{name}").rows()]
        print(table(rows), flush=True)
        record(name, {"environment": environment(), "rows": rows})
    readme.write()


def _require_gpu() -> None:
    """End where there is none, or where its tests fail: what is wrong is not measured."""
    if not torch.cuda.is_available():
        print("skipped the tests marked gpu and the benchmarks on a GPU: torch finds no CUDA device")
        sys.exit(0)
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(Path(__file__).parents[1] / "tests")]
    if failed := subprocess.run(tests, check=False).returncode:
        sys.exit(failed)


def record(name: str, part: dict[str, object]) -> None:
    """Replace what is recorded of a benchmark for this device."""
    device = torch.cuda.get_device_name().replace(" ", "-").lower() if torch.cuda.is_available() else "cpu"
    path = RESULTS / f"{device}.json"
    RESULTS.mkdir(exist_ok=True)
    recorded = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_whole(path, json.dumps({**recorded, name: part}, indent=1) + "\n")
    print(f"\n{path}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
