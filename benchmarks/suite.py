"""Which encoding goes on beyond its trained length? The suites of `locant compare`, recorded for `docs/results`.

Hours on two cores; killed at any moment, the same command goes on. Numbers are rounded where they are written down.

    PYTHONPATH=src python -m benchmarks.suite v1 tiny WORKING-FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["CONTESTANTS", "record", "rounded"]

CONTESTANTS = (
    "nope", "sinusoidal", "learned", "rotary", "rotary+yarn", "rotary+ntk", "rotary+linear", "alibi", "t5", "kerple",
    "fire", "sandwich", "cope", "fox", "pope", "xpos", "rotary@randomized", "learned@randomized",
)  # fmt: skip
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


def record(suite: str, size: str, folder: Path) -> None:
    """Run what is missing of a suite, and write down all of it."""
    words = ["compare", "--suite", suite, "--size", size, "--encodings", ",".join(CONTESTANTS), "-o", str(folder)]
    subprocess.run([sys.executable, "-m", "locant", *words], check=True)
    write(suite, size, folder)


def write(suite: str, size: str, folder: Path) -> None:
    """Write down what a folder has, a line for each record."""
    results = rounded(json.loads((folder / "results.json").read_text(encoding="utf-8")))
    records = ",\n".join(json.dumps(each, ensure_ascii=False) for each in results.pop("records"))
    head = json.dumps(results, ensure_ascii=False, indent=1).removesuffix("\n}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{suite}-{size}.json").write_text(f'{head},\n "records": [\n{records}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    record(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
