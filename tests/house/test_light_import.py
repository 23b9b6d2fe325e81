"""`import locant` waits for no torch, and its names bring in no plotting, command line or other model library."""

from __future__ import annotations

import json
import subprocess
import sys

# rich and tqdm draw the command line's progress; the others belong to one extra or one kernel.
HEAVY = (
    "IPython", "PIL", "_pytest", "click", "gigatoken", "hypothesis", "jax", "matplotlib", "pandas", "pytest", "ray",
    "rich", "scipy", "sklearn", "tensorflow", "tiktoken", "tqdm", "transformers", "triton",
)  # fmt: skip
ROOMS = ("locant.cli", "locant.lab.decoder", "locant.report")
EVERYTHING = "import locant; [getattr(locant, name) for name in dir(locant)]"

# torch is imported first: what it brings (tqdm, on some builds triton) is its own affair. After that, two things
# are watched: modules that are new, and import statements in the package's own files, which also tell of a
# module that torch had brought already.
PROBE = """
import builtins, json, sys
import torch
heavy, rooms = {heavy!r}, {rooms!r}
known, statements, sockets = set(sys.modules), set(), []
real_import = builtins.__import__
def watched(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {{}}).get("__name__", "")
    if level == 0 and name.split(".")[0] in heavy and importer.split(".")[0] in ("locant", "__main__"):
        statements.add(name.split(".")[0])
    return real_import(name, globals, locals, fromlist, level)
builtins.__import__ = watched
sys.addaudithook(lambda event, args: sockets.append(event) if event.startswith("socket.") else None)
{code}
new = set(sys.modules) - known
brought = statements | {{name.split(".")[0] for name in new}} & set(heavy) | new & set(rooms)
print(json.dumps([sorted(brought), sockets]))
"""


def brought_by(code: str) -> tuple[list[str], list[str]]:
    """What running `code` in a fresh interpreter imports of the heavy list, and what it does with sockets."""
    probe = PROBE.format(heavy=HEAVY, rooms=ROOMS, code=code)
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    brought, sockets = json.loads(done.stdout.splitlines()[-1])
    return brought, sockets


def test_importing_locant_brings_in_nothing_heavy_and_opens_no_socket() -> None:
    assert brought_by(EVERYTHING) == ([], [])


def test_the_lab_brings_in_itself_and_nothing_heavy() -> None:
    code = "import locant; [getattr(locant.lab, name) for name in dir(locant.lab)]"
    assert brought_by(code) == (["locant.lab.decoder"], [])


def test_what_needs_no_torch_does_not_wait_for_it() -> None:
    """A second and 200 MB, in every call of the command line and every worker of `prepare`."""
    modules = ("locant", "locant.cli", "locant.lab.settings", "locant.text", "locant.text.prepare.workers")
    probe = "import sys\n" + "".join(f"import {one}\nassert 'torch' not in sys.modules, {one!r}\n" for one in modules)
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_probe_sees_imports_and_sockets() -> None:
    brought, sockets = brought_by(
        "import locant.cli, tqdm, matplotlib.pyplot, rich.table, socket; socket.socket().close()"
    )
    assert {"click", "tqdm", "PIL", "matplotlib", "rich", "locant.cli"} <= set(brought)
    assert sockets == ["socket.__new__"]
