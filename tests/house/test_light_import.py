"""`import locant` waits for no torch, and its names bring in no plotting, command line or other model library."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# rich and tqdm draw the command line's progress; the others belong to one extra or one kernel.
HEAVY = (
    "IPython", "PIL", "_pytest", "click", "gigatoken", "hypothesis", "jax", "matplotlib", "pandas", "pytest", "ray",
    "rich", "scipy", "sklearn", "tensorflow", "tiktoken", "tqdm", "transformers", "triton",
)  # fmt: skip
ROOMS = ("locant.cli", "locant.lab.decoder", "locant.report")
Brought = list[tuple[set[str], list[str]]]

# torch is imported first: what it brings (tqdm, on some builds triton) is its own affair. After that, two things
# are watched: modules that are new, and import statements in the package's own files, which also tell of a
# module that torch had brought already. The steps follow each other in one interpreter.
PROBE = """
import builtins, json, sys
import torch
heavy, rooms = {heavy!r}, {rooms!r}
statements, sockets = set(), []
real_import = builtins.__import__
def watched(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {{}}).get("__name__", "")
    if level == 0 and name.split(".")[0] in heavy and importer.split(".")[0] in ("locant", "__main__"):
        statements.add(name.split(".")[0])
    return real_import(name, globals, locals, fromlist, level)
builtins.__import__ = watched
sys.addaudithook(lambda event, args: sockets.append(event) if event.startswith("socket.") else None)
for code in {steps!r}:
    known = set(sys.modules)
    exec(code)
    new = set(sys.modules) - known
    brought = statements | {{name.split(".")[0] for name in new}} & set(heavy) | new & set(rooms)
    print(json.dumps([sorted(brought), sockets]))
    statements.clear()
    sockets.clear()
"""
STEPS = (
    "import locant; [getattr(locant, name) for name in dir(locant)]",
    "import locant; [getattr(locant.lab, name) for name in dir(locant.lab)]",
    "import locant.cli, tqdm, matplotlib.pyplot, rich.table, socket; socket.socket().close()",
)


@pytest.fixture(scope="module")
def brought() -> Brought:
    """What each step, in a fresh interpreter, imports of the heavy list, and what it does with sockets."""
    probe = PROBE.format(heavy=HEAVY, rooms=ROOMS, steps=STEPS)
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [(set(names), sockets) for names, sockets in map(json.loads, done.stdout.splitlines())]


def test_importing_locant_brings_in_nothing_heavy_and_opens_no_socket(brought: Brought) -> None:
    assert brought[0] == (set(), [])


def test_the_lab_brings_in_itself_and_nothing_heavy(brought: Brought) -> None:
    assert brought[1] == ({"locant.lab.decoder"}, [])


def test_the_probe_sees_imports_and_sockets(brought: Brought) -> None:
    names, sockets = brought[2]
    assert {"click", "tqdm", "PIL", "matplotlib", "rich", "locant.cli"} <= names
    assert sockets == ["socket.__new__"]


def test_what_needs_no_torch_does_not_wait_for_it() -> None:
    """A second and 200 MB, in every call of the command line and every worker of `prepare`."""
    modules = ("locant", "locant.cli", "locant.lab.settings", "locant.text", "locant.text.prepare.workers")
    probe = "import sys\n" + "".join(f"import {one}\nassert 'torch' not in sys.modules, {one!r}\n" for one in modules)
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


FIRST_USE = """
import sys, torch
known = set(sys.modules)
import locant
locant.Windows(range(100), 4).__getitems__([0, 1])
print(*sorted(set(sys.modules) - known))
"""


def test_the_first_windows_bring_in_no_encoding_and_few_modules() -> None:
    """A tenth of a second once torch is there; with all encodings and their kernels it was a third, in 110 modules."""
    done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    brought = done.stdout.split()
    rooms = {".".join(name.split(".")[:3]) for name in brought if name.startswith("locant.")}
    assert not rooms & {
        "locant.positions.encodings",
        "locant.kernels.rotary",
        "locant.attention",
        "locant.text.prepare",
    }
    assert "numpy.ma" not in brought
    assert "locant.text.windows.windows" in brought
    assert len(brought) <= 80, brought
