"""Measure locant beside its peers: print tables, ratios first, and record them in ``results/<device>.json``.

``python -m benchmarks`` runs all benchmarks, and ``python -m benchmarks NAME...`` runs some of them. ``python -m
benchmarks gpu`` runs the tests marked gpu and, if they pass, the benchmarks on a GPU.
"""

from __future__ import annotations

import argparse
import ast
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


def listing() -> str:
    """Return a line for each benchmark: its name, and the question that it answers."""
    files = ((name, Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")) for name in NAMES)
    questions = {name: (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0] for name, text in files}
    return "\n".join(f"{name:16}{question}" for name, question in questions.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, epilog=f"names:\n{listing()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names, and do not measure")
    options = parser.parse_args()
    if options.list:
        print(listing())
    else:
        main(options.names)
