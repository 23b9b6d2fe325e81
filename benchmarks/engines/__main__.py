"""``python -m benchmarks.engines [NAME...]``: tests against other programs, and what they measured, as a file.

``NAME.txt`` beside this file is one environment, ``.venv-engines/NAME``: locant and the packages that are listed, the
versions of all others from ``constraints.txt``. Lines of three kinds are read besides packages:

    # no-deps                       the packages below are installed without what they ask for
    # tests: tests/engines/test_a.py -k jax     what pytest runs there, unless it is tests/engines/test_NAME.py
    # cannot ENGINE: what it cannot do (where that is tested, or an address)

`development.txt` is the environment that this runs in. The file is ``results/engines.json``: where an
environment cannot be made, or a test fails, it keeps what was measured before, and says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from locant.files import write_whole

__all__ = ["RESULTS", "Environment", "NotMeasuredError", "environments", "main", "measured"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE.parent / "results" / "engines.json"
DEVELOPMENT = "development"
TOOLS = ("pytest", "pytest-timeout", "hypothesis")
"""What every test needs."""
SLOWEST = 3600
"""Seconds after which tests of an engine are given up."""


class NotMeasuredError(Exception):
    """An environment that could not be made, or a test that failed."""


@dataclass(frozen=True)
class Environment:
    """What a file of packages says."""

    name: str
    packages: list[str] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    """Packages that are installed without what they ask for."""
    tests: list[str] = field(default_factory=list)
    cannot: dict[str, list[str]] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        """The interpreter of it."""
        own = ROOT / ".venv-engines" / self.name / "bin" / "python"
        return Path(sys.executable) if self.name == DEVELOPMENT else own

    def constraints(self) -> str:
        """Those of the repository, but for packages that are listed here with a version, which counts more."""
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        listed = [line.split(";")[0] for line in (*self.packages, *self.alone) if re.match(r"[\w.-]+==", line)]
        versions = {_distribution(line): line for line in (*lines, *listed) if not line.startswith("#")}
        return "\n".join(versions.values()) + "\n"


def _distribution(requirement: str) -> str:
    return re.split(r"[=<>!~\[;@ ]", requirement)[0].lower().replace("_", "-")


def environments() -> dict[str, Environment]:
    """Each by its name; that of the development packages first."""
    found = {path.stem: _read(path) for path in sorted(HERE.glob("*.txt"))}
    return {DEVELOPMENT: found.pop(DEVELOPMENT), **found}


def _read(path: Path) -> Environment:
    parts = Environment(path.stem)
    packages = parts.packages
    for line in filter(None, map(str.strip, path.read_text(encoding="utf-8").splitlines())):
        if line == "# no-deps":
            packages = parts.alone
        elif line.startswith("# tests: "):
            parts.tests.extend(shlex.split(line.removeprefix("# tests: ")))
        elif match := re.match(r"# cannot ([^:]+): (.+)", line):
            parts.cannot.setdefault(match[1], []).append(match[2])
        elif not line.startswith("#"):
            packages.append(line)
    parts.tests.extend([] if parts.tests else [f"tests/engines/test_{path.stem}.py"])
    return parts


def _run(what: str, *command: str | Path, **variables: str) -> None:
    asked = [str(word) for word in command]
    try:
        code = subprocess.run(asked, cwd=ROOT, env={**os.environ, **variables}, timeout=SLOWEST, check=False).returncode
    except subprocess.TimeoutExpired:
        raise NotMeasuredError(f"{what} took more than {SLOWEST} s") from None
    if code:
        raise NotMeasuredError(f"{what} failed")


def _make(environment: Environment) -> None:
    """Bring an environment to what its file, and those of the package, say."""
    home = environment.python.parents[1]
    stamp, constraints = home / "engines.stamp", environment.constraints()
    state = repr((environment, TOOLS, constraints, (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    digest = hashlib.sha256(state.encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest:
        return
    print(f"making {home.relative_to(ROOT)}", flush=True)
    if not environment.python.exists():
        _run("venv", sys.executable, "-m", "venv", home)
    (home / "constraints.txt").write_text(constraints)
    pip = (environment.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c")
    _run("pip", *pip, home / "constraints.txt", "-e", ROOT, *TOOLS, *environment.packages)
    if environment.alone:
        _run("pip", *pip, home / "constraints.txt", "--no-deps", *environment.alone)
    stamp.write_text(digest)


def measured(environment: Environment) -> dict[str, Any]:
    """What the tests of an environment keep, the largest difference for each subject; and what engines cannot do."""
    if environment.name != DEVELOPMENT:
        _make(environment)
    with tempfile.TemporaryDirectory() as folder:
        command = (
            environment.python,
            "-m",
            "pytest",
            "-q",
            "--timeout=0",
            *environment.tests,
        )  # `SLOWEST` is the limit
        _run("pytest", *command, LOCANT_ENGINE_RESULTS=folder, OMP_WAIT_POLICY="passive")
        rows = list(_rows(environment, Path(folder)))
    if not rows:
        raise NotMeasuredError("all of its tests were skipped")
    return {"measured": datetime.now(UTC).date().isoformat(), "rows": rows, "cannot": environment.cannot}


def _rows(environment: Environment, folder: Path) -> Iterator[dict[str, Any]]:
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text(encoding="utf-8").splitlines()]
    largest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in sorted(map(json.loads, lines), key=lambda row: row["difference"]):
        largest[row["engine"], row["subject"]] = row
    for key in sorted(largest):
        row = largest[key]
        file = row.pop("test").partition("::")[0]
        command = f"pytest {file}" if environment.name == DEVELOPMENT else f"make engines ENGINES={environment.name}"
        yield {**row, "difference": float(f"{row['difference']:.3g}"), "command": command}


def main(names: list[str]) -> None:
    """Measure these environments, or all; each is kept as soon as it is there."""
    known = environments()
    if unknown := sorted({*names} - {*known}):
        sys.exit(f"got {', '.join(unknown)}, expected some of {', '.join(known)}")
    failed = False
    for name in names or known:
        try:
            part = measured(known[name])
        except NotMeasuredError as problem:
            failed = True
            old = _kept().get(name, {"measured": None, "rows": []})
            part = {**old, "cannot": known[name].cannot, "not_repeated": str(problem)}
            print(f"{name} was not measured: {problem}", file=sys.stderr)
        results = {**_kept(), name: part}
        write_whole(RESULTS, json.dumps({name: results[name] for name in known if name in results}, indent=1) + "\n")
    print(RESULTS)
    sys.exit(failed)


def _kept() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}


if __name__ == "__main__":
    main(sys.argv[1:])
