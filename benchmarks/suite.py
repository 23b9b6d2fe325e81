"""Which encoding goes on beyond its trained length? The comparisons that are recorded in `docs/results`.

Hours on two cores; killed at any moment, the same command goes on. Numbers are rounded where they are written down.

    PYTHONPATH=src python -m benchmarks.suite v1-tiny WORKING-FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["COMPARISONS", "record", "rounded"]

CONTESTANTS = (
    "nope,sinusoidal,learned,rotary,rotary+yarn,rotary+ntk,rotary+linear,alibi,t5,kerple,fire,sandwich,cope,fox,pope,"
    "xpos,rotary@randomized,learned@randomized"
)
COMPARISONS = {
    "v1-tiny": f"--suite v1 --size tiny --encodings {CONTESTANTS}",
    "addition": "--tasks addition --task-length 4 --seeds 0,1,2 --encodings rotary,rotary@abacus,rotary@coupled,fire",
    "addition_hints": "--tasks addition_hints --task-length 4 --seeds 0,1,2 --encodings rotary,fire,fire@randomized",
    "indexing": "--tasks indexing --seeds 0,1,2 --encodings rotary,pope",
    "data_dependent": "--tasks mqar,copy,flip_flop --seeds 0,1,2 --encodings nope,rotary,fox,selective_rope,path",
}
"""By the name of the file: what `locant compare` is asked for."""

DIGITS = 4
RESULTS = Path(__file__).parents[1] / "docs" / "results"


def rounded(value: Any) -> Any:
    """With at most so many digits after the point, which is less than any interval of what is measured.

    >>> rounded({"loss": [3.14159265, None], "seconds": 12.34})
    {'loss': [3.1416, None], 'seconds': 12.34}
    """
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, DIGITS) if isinstance(value, float) else value


def record(name: str, folder: Path) -> None:
    """Run what is missing of a comparison, and write down all of it, a line for each record.

    What is recorded already is not run again.
    """
    results, recorded = folder / "results.json", RESULTS / f"{name}.json"
    if recorded.exists() and not results.exists():
        folder.mkdir(parents=True, exist_ok=True)
        results.write_bytes(recorded.read_bytes())
    subprocess.run(
        [sys.executable, "-m", "locant", "compare", *COMPARISONS[name].split(), "-o", str(folder)], check=True
    )
    written = rounded(json.loads(results.read_text(encoding="utf-8")))
    records = ",\n".join(json.dumps(each, ensure_ascii=False) for each in written.pop("records"))
    head = json.dumps(written, ensure_ascii=False, indent=1).removesuffix("\n}")
    recorded.write_text(f'{head},\n "records": [\n{records}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]))
