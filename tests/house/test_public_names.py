"""The names on the doors, and what it takes to import them.

A change of the names is a change that users feel: it belongs in the changelog. `import locant` waits for no torch, and
its names bring in no plotting, command line or other model library.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

import locant
from locant.cli import main

NAMES = {
    "Tokenizer", "TokenStore", "prepare", "Windows",
    "TokenEmbedding", "SegmentEmbedding", "InputEmbedding", "NGramEmbedding",
    "PerLayerEmbedding",
    "Positions", "PositionEncoding", "DistanceBias", "Sinusoidal", "Learned", "Rotary", "ALiBi", "T5Bias", "encoding",
    "LearnedGrid", "Convolutional", "register_encoding", "scaling", "encoding_from_config", "register_architecture",
    "XPos", "Kerple", "Fire", "Fox", "Inkling", "Sandwich", "Cope", "Shaw", "TransformerXL", "Deberta",
    "SelfExtend", "ReRoPE", "DualChunk", "GridBias", "ContinuousGridBias", "DecomposedBias",
    "attend", "HeadNorm", "KVCache", "StaticKVCache", "PagedKVCache", "plot", "probe", "swap",
    "encoding_from_gguf", "move_cache",
    "LocantError", "ShapeError", "RangeError", "InputError",
}  # fmt: skip
VERBS = {
    "embed", "compare", "train", "generate", "explain", "extend", "convert", "evaluate", "tune", "neighbours",
    "prepare", "export", "plot", "probe", "explore", "bench", "list", "check-batch", "golden",
    "audit", "serve-args",
}  # fmt: skip


def test_the_public_names_are_these_and_say_what_they_are() -> None:
    assert sorted(locant.__all__) == sorted(NAMES)
    for name in locant.__all__:
        assert (getattr(locant, name).__doc__ or "").strip(), f"locant.{name} has no docstring"


def test_the_door_is_under_seventy_lines() -> None:
    assert len(Path(locant.__file__).read_text(encoding="utf-8").splitlines()) < 70


def test_the_verbs_of_the_command_line_are_these() -> None:
    assert set(main.list_commands(click.Context(main))) == VERBS


# rich and tqdm draw the command line's progress; the others belong to one extra or one kernel.
HEAVY = (
    "IPython", "PIL", "_pytest", "click", "gigatoken", "hypothesis", "jax", "matplotlib", "pandas", "pytest", "ray",
    "rich", "scipy", "sklearn", "tensorflow", "tiktoken", "tqdm", "transformers", "triton",
)  # fmt: skip
ROOMS = ("locant.cli", "locant.lab.decoder", "locant.report")
Brought = list[tuple[set[str], list[str], list[str]]]

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
    print(json.dumps([sorted(brought), sockets, sorted(new)]))
    statements.clear()
    sockets.clear()
"""
STEPS = (
    "import locant; locant.Windows(range(100), 4).__getitems__([0, 1])",
    "import locant; [getattr(locant, name) for name in dir(locant)]",
    "import locant; [getattr(locant.lab, name) for name in dir(locant.lab)]",
)


@pytest.fixture(scope="module")
def brought() -> Brought:
    """Of each step, in a fresh interpreter: what it imports of the heavy list, its sockets, and all that is new."""
    probe = PROBE.format(heavy=HEAVY, rooms=ROOMS, steps=STEPS)
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [(set(names), *others) for names, *others in map(json.loads, done.stdout.splitlines())]


def test_importing_locant_brings_in_nothing_heavy_and_opens_no_socket(brought: Brought) -> None:
    assert [step[:2] for step in brought[:2]] == [(set(), [])] * 2


def test_the_lab_brings_in_itself_and_nothing_heavy(brought: Brought) -> None:
    assert brought[2][:2] == ({"locant.lab.decoder"}, [])


def test_what_needs_no_torch_does_not_wait_for_it() -> None:
    """A second and 200 MB, in every call of the command line and every worker of `prepare`."""
    modules = ("locant", "locant.cli", "locant.lab.settings", "locant.text", "locant.text.prepare.workers")
    probe = "import sys\n" + "".join(f"import {one}\nassert 'torch' not in sys.modules, {one!r}\n" for one in modules)
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_first_windows_bring_in_no_encoding_and_few_modules(brought: Brought) -> None:
    """A tenth of a second once torch is there; with all encodings and their kernels it was a third, in 110 modules."""
    new = brought[0][2]
    rooms = {".".join(name.split(".")[:3]) for name in new if name.startswith("locant.")}
    unused = {"locant.positions.encodings", "locant.kernels.rotary", "locant.attention", "locant.text.prepare"}
    assert not rooms & unused
    assert "numpy.ma" not in new
    assert "locant.text.windows.windows" in new
    assert len(new) <= 80, new
