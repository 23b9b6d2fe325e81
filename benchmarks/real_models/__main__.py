"""``python -m benchmarks.real_models [--anew] [PART...]``: measure the parts, or all, on trained weights.

Each part that measures writes ``results/real_models/PART.json``. What is recorded with the same versions, checksums and
settings is not measured again, unless ``--anew`` is given. The weights come from `make real-weights`.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

from benchmarks.real_models.record import RESULTS
from locant.errors import LocantError

__all__ = ["PARTS", "main"]

PARTS = {
    "bugs": "benchmarks.real_models.cost_of_bugs",
    "bugs-again": "benchmarks.real_models.bugs_again",
    "bugs-picture": "benchmarks.real_models.picture",
    "reach": "benchmarks.real_models.reach",
    "kv_reuse": "benchmarks.real_models.kv_reuse",
    "audit": "benchmarks.real_models.audits",
    "engines": "benchmarks.real_models.engine_file",
    "minilm": "benchmarks.real_models.learned_rows",
}
"""The module of each part, in the order in which they run. Its function ``run(anew, folder)`` makes the part."""


def main(words: list[str], parts: dict[str, str] = PARTS, folder: Path = RESULTS) -> None:
    """Run these parts, or all, and print the time that each took."""
    anew, names = "--anew" in words, [word for word in words if word != "--anew"]
    if unknown := [name for name in names if name not in parts]:
        sys.exit(f"got {', '.join(unknown)}, expected some of {', '.join(parts)}, and --anew or nothing")
    failed = False
    for name in names or parts:
        began = time.perf_counter()
        try:
            importlib.import_module(parts[name]).run(anew=anew, folder=folder)
        except LocantError as error:
            failed = True
            print(f"{name} was not measured: {error}", file=sys.stderr)
            continue
        print(f"{name}: {(time.perf_counter() - began) / 60:.1f} minutes", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
