"""``python tests/versions.py oldest`` (or ``newest``): constraints for pip, which ``make test-versions`` installs with.

``oldest`` is the oldest version that `pyproject.toml` allows of every package that locant runs with: of the required
ones, and of those of the extras that the extra ``test`` asks for. ``newest`` leaves every package free. Torch is the
one of `constraints.txt` in both, because few of its versions come in a build without CUDA. It needs only Python.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def constraints(which: str) -> list[str]:
    """The lines of a file of constraints."""
    pinned = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    return pinned + (_floors() if which == "oldest" else [])


def _floors() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (named,) = (re.fullmatch(r"locant\[(.*)\]", one) for one in extras["test"] if one.startswith("locant["))
    wanted = [*project["dependencies"], *(one for extra in named[1].split(",") for one in extras[extra])]
    return [one.replace(">=", "==") for one in wanted if not one.startswith("torch>=")]


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in constraints(sys.argv[1])))
