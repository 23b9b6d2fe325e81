"""``python -m benchmarks [NAME...]``: every table, ratios first; a full run writes ``results/<device>.json``."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import torch

from benchmarks.timing import table
from locant.files import write_whole
from locant.lab import environment

NAMES = ("rotary", "windows")


def main(names: list[str]) -> None:
    """Run these benchmarks, or all of them."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        sys.exit(f"got {', '.join(unknown)}, expected one or more of {', '.join(NAMES)}")
    torch.manual_seed(0)
    rows = []
    for name in names or NAMES:
        found = importlib.import_module(f"benchmarks.{name}").rows()
        print(table(found), flush=True)
        rows.extend(found)
    if names:
        return  # a part is not the whole picture: only full runs are kept
    device = torch.cuda.get_device_name().replace(" ", "-").lower() if torch.cuda.is_available() else "cpu"
    path = Path(__file__).parent / "results" / f"{device}.json"
    path.parent.mkdir(exist_ok=True)
    content = {"environment": environment(), "rows": [dataclasses.asdict(row) for row in rows]}
    write_whole(path, json.dumps(content, indent=1) + "\n")
    print(f"\n{path}")


if __name__ == "__main__":
    main(sys.argv[1:])
