"""Imports go downwards only, below the models nobody asks which class an encoding is of, and no file is ever executed.

Handlers of everything, `eval` and `exec` are ruff's to find.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from locant.positions.base import PositionEncoding
from locant.positions.registry import encodings

SRC = Path(__file__).resolve().parents[2] / "src"

# From the lowest up. "locant" is ``__init__.py``: what is above it may import from it, and it exports what is
# below it.
ROOMS = (
    "_version", "errors", "extras", "arguments", "spelling", "files", "cluster", "registry", "kernels", "tensors",
    "positions", "scaling", "text", "formats", "embedding", "attention", "parallel", "models", "swapping",
    "checkpoints", "engines", "probing", "figures", "locant", "lab", "report", "explore", "cli", "__main__",
)  # fmt: skip

UPWARD = {
    ("positions/encodings/rotary.py", "models"),
    ("positions/registry.py", "models"),
    ("models/__init__.py", "probing"),
    ("models/encodings.py", "probing"),
    ("embedding/token.py", "checkpoints"),
    ("embedding/input.py", "checkpoints"),
    ("__init__.pyi", "lab"),
}
"""`Rotary.from_config` and `to_config` read and write what is known of published models, and the `from_pretrained` of
embeddings their folders, when they are called; the name of a model in the place of an encoding's is answered with what
the model has; an architecture without a row is measured, when it is asked for, and
`locant.models` offers the reports; the stub offers all of `locant.lab`, which is imported when it is first used."""


def upward_imports(src: Path) -> list[str]:
    """Every import under `src` that goes up, or names a room that has no place in the order."""
    return [
        line
        for path in sorted((src / "locant").rglob("*.py*"))
        if path.suffix in (".py", ".pyi")
        for line in _faults(path, src)
    ]


def _faults(path: Path, src: Path) -> list[str]:
    module = path.relative_to(src).with_suffix("").parts
    room = _room(module[:-1] if module[-1] == "__init__" else module)
    where = path.relative_to(src).as_posix()
    if room not in ROOMS:
        return [f"{where}: room {room!r} has no place in the order"]
    faults = []
    for line, target in _imports(path, module[:-1]):
        other = _room(target)
        if other not in ROOMS:
            faults.append(f"{where}:{line}: imports {'.'.join(target)}, which has no place in the order")
        elif ROOMS.index(other) > ROOMS.index(room) and (where.removeprefix("locant/"), other) not in UPWARD:
            faults.append(f"{where}:{line}: {room} imports {other}")
    return faults


def _room(module: tuple[str, ...]) -> str:
    return module[1] if len(module) > 1 else "locant"


def _imports(path: Path, package: tuple[str, ...]) -> list[tuple[int, tuple[str, ...]]]:
    """Line and module of every import of locant: at the top, in a function, for types only, relative or by string."""
    text = path.read_text(encoding="utf-8")
    found = [(text[: match.start()].count("\n") + 1, tuple(match[1].split("."))) for match in BY_NAME.finditer(text)]
    for node in _statements(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            found += [(node.lineno, _named(base, alias.name)) for alias in node.names]
    return [(line, module) for line, module in found if module[0] == "locant"]


BY_NAME = re.compile(r"""\b(?:import_module|__import__)\(\s*["']([\w.]+)["']""")


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All of them, and no expression: most of a tree is those."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
            yield from _statements(child)


def _named(base: tuple[str, ...], name: str) -> tuple[str, ...]:
    """`from locant import lab` opens a room; `from locant import Rotary` takes a name from the door."""
    return (*base, name) if base == ("locant",) and name in ROOMS else base


def test_no_room_imports_one_above_it() -> None:
    assert (SRC / "locant" / "errors.py").is_file(), "the proof looks in the wrong place"
    assert upward_imports(SRC) == []


BY_ANSWERS = ("attention", "cli", "embedding", "figures", "kernels", "parallel", "report", "text")
"""The other rooms build rotary encodings, or compare modules of other programs with them."""
BASES = {"DistanceBias", "HeadTable", "HiddenBias", "OffsetBias", "RotaryByClass", "RowBias"}
CLASSES = BASES | {kind.__name__ for kind in encodings().values()} - {PositionEncoding.__name__}


def classes_named(path: Path) -> set[str]:
    """Those that the code imports, calls or compares with; its docstrings may name any."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    return names & CLASSES


@pytest.mark.parametrize("room", BY_ANSWERS)
def test_no_file_names_a_class_of_encodings(room: str) -> None:
    files = sorted((SRC / "locant" / room).rglob("*.py"))
    assert files
    assert {file.name: named for file in files if (named := classes_named(file))} == {}


RUNS_WHAT_IT_READS = re.compile(
    r"^\s*(?:import|from)\s+(?:cloudpickle|dill|joblib|marshal|pickle|shelve)\b|\btorch(?:\.hub)?\.load\(|"
    r"from torch import .*\bload\b|\b(?:allow_pickle|trust_remote_code)=(?!False)",
    re.MULTILINE,
)


def test_no_module_runs_what_it_reads() -> None:
    found = {path: RUNS_WHAT_IT_READS.findall(path.read_text(encoding="utf-8")) for path in sorted(SRC.rglob("*.py"))}
    assert len(found) > 100
    assert {path.name: places for path, places in found.items() if places} == {}
