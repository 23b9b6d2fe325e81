"""Imports go downwards only, and below the models nobody asks which class an encoding is of."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from locant.positions.base import PositionEncoding
from locant.positions.registry import encodings

SRC = Path(__file__).resolve().parents[2] / "src"

# From the lowest up. "locant" is ``__init__.py``: what is above it may import from it, and it exports what is
# below it.
ROOMS = (
    "_version", "errors", "arguments", "files", "cluster", "registry", "kernels", "tensors", "positions", "scaling",
    "text", "formats", "embedding", "attention", "parallel", "models", "swapping",
    "checkpoints", "engines", "probing", "figures", "locant", "lab", "report", "explore", "cli", "__main__",
)  # fmt: skip

UPWARD = {
    ("positions/encodings/rotary.py", "models"),
    ("models/__init__.py", "probing"),
    ("models/encodings.py", "probing"),
    ("embedding/token.py", "checkpoints"),
    ("embedding/input.py", "checkpoints"),
    ("__init__.pyi", "lab"),
}
"""`Rotary.from_config` and `to_config` read and write what is known of published models, and the `from_pretrained` of
embeddings their folders, when they are called; an architecture without a row is measured, when it is asked for, and
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
    found: list[tuple[int, tuple[str, ...]]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            found += [(node.lineno, _named(base, alias.name)) for alias in node.names]
        elif isinstance(node, ast.Call) and _imports_by_name(node.func) and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found.append((node.lineno, tuple(name.value.split("."))))
    return [(line, module) for line, module in found if module[0] == "locant"]


def _named(base: tuple[str, ...], name: str) -> tuple[str, ...]:
    """`from locant import lab` opens a room; `from locant import Rotary` takes a name from the door."""
    return (*base, name) if base == ("locant",) and name in ROOMS else base


def _imports_by_name(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def test_no_room_imports_one_above_it() -> None:
    assert (SRC / "locant" / "errors.py").is_file(), "the proof looks in the wrong place"
    assert upward_imports(SRC) == []


SEEN = [
    ("positions/rotary.py", "import locant.attention.attend"),
    ("positions/rotary.py", "from .. import attention"),
    ("positions/deep/rotary.py", "from ...attention.attend import attend"),
    ("positions/__init__.py", "from ..attention import attend"),
    ("positions/rotary.py", "from locant import attention"),
    ("positions/rotary.py", "from locant import Tokenizer"),
    ("positions/rotary.py", "def late():\n    from locant.attention import attend"),
    ("positions/rotary.py", "importlib.import_module('locant.attention')"),
    ("positions/rotary.py", "from locant.cellar import wine"),
    ("cellar/wine.py", "import math"),
    ("__init__.py", "from . import lab"),
    ("__init__.pyi", "from . import report"),
]
ALLOWED = [
    ("attention/attend.py", "from ..positions.positions import Positions"),
    ("attention/attend.py", "from .backends import eager"),
    ("positions/rotary.py", "import torch.nn.attention"),
    ("__init__.py", "from locant.attention import attend"),
    ("__init__.pyi", "from . import lab as lab"),
    ("lab/decoder.py", "import locant"),
]


def test_an_upward_import_is_seen_and_a_downward_one_allowed(tmp_path: Path) -> None:
    for number, (path, code) in enumerate([*SEEN, *ALLOWED]):
        src = tmp_path / str(number)
        _write(src, path, code)
        assert len(upward_imports(src)) == ((path, code) in SEEN), code


def _write(src: Path, path: str, code: str) -> None:
    file = src / "locant" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code, encoding="utf-8")


# ---------------------------------------------------------------------- classes of encodings

BY_ANSWERS = ("attention", "cli", "embedding", "figures", "kernels", "parallel", "report", "text")
"""The other rooms build rotary encodings, or compare modules of other programs with them."""
BASES = {"DistanceBias", "HeadTable", "HiddenBias", "OffsetBias", "RotaryByClass", "RowBias"}
CLASSES = BASES | {kind.__name__ for kind in encodings().values()} - {PositionEncoding.__name__}


def classes_named(code: str) -> set[str]:
    """Those that the code imports, calls or compares with; its docstrings may name any."""
    nodes = list(ast.walk(ast.parse(code)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    return names & CLASSES


@pytest.mark.parametrize("room", BY_ANSWERS)
def test_no_file_names_a_class_of_encodings(room: str) -> None:
    files = sorted((SRC / "locant" / room).rglob("*.py"))
    assert files
    named = {str(file.relative_to(SRC)): classes_named(file.read_text(encoding="utf-8")) for file in files}
    assert {file: names for file, names in named.items() if names} == {}


def test_a_class_that_is_asked_for_would_be_seen() -> None:
    assert classes_named("from locant.positions import ALiBi\nisinstance(encoding, ALiBi)") == {"ALiBi"}
    assert classes_named("type(encoding) is positions.Fire") == {"Fire"}
    assert classes_named('def f():\n    """`Cope` alone."""') == set()
