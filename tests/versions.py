"""``python tests/versions.py oldest`` (or ``newest``): constraints for pip, which ``make test-versions`` installs with.

``oldest`` is the oldest version that `pyproject.toml` allows of every package that locant runs with: of the required
ones, and of those of the extras that the extra ``test`` asks for. ``newest`` leaves every package free. Torch is the
one of `constraints.txt` in both, because few of its versions come in a build without CUDA. It needs only Python.

``python tests/versions.py newer REPORT`` reads the report of ``pip install --dry-run --report`` and lists the packages
whose version is not that of `constraints.txt`. If there are none, all tests run with the newest.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

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


UNPINNED = {"locant", "setuptools"}
"""This package, and what `pip freeze` leaves out."""


def newer(report: dict[str, Any]) -> list[str]:
    """The packages of a report of pip, but for this one, that are not pinned to the version that they have there."""
    pinned = re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    pins = {_normalized(name): version for name, version in pinned}
    found = []
    for name, version in ((each["metadata"]["name"], each["metadata"]["version"]) for each in report["install"]):
        pin = pins.get(_normalized(name), "no version")
        if name not in UNPINNED and version.partition("+")[0] != pin:
            found.append(f"{name} {version}, where constraints.txt has {pin}")
    return found


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    what, *files = sys.argv[1:]
    lines = newer(json.loads(Path(files[0]).read_text(encoding="utf-8"))) if what == "newer" else constraints(what)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
