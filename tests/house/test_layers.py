"""Below the models no code asks for the class of an encoding, and no file is ever executed.

import-linter checks that imports go downwards only, and ruff finds handlers of everything, `eval` and `exec`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from locant.positions.base import PositionEncoding
from locant.positions.registry import encodings

SRC = Path(__file__).resolve().parents[2] / "src"

BY_NAME = re.compile(r"""\b(?:import_module|__import__)\(\s*f?["']locant\.(\w+)""")


def test_stubs_and_imports_by_name_stay_in_their_package() -> None:
    """These are what `lint-imports` does not see; its contracts are in ``pyproject.toml``."""
    stubs = sorted((SRC / "locant").rglob("*.pyi"))
    assert stubs
    for stub in stubs:
        statements = ast.parse(stub.read_text(encoding="utf-8")).body
        sources = [node for node in statements if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
        assert {node.level for node in sources} == {1}, stub
        if stub.parent.name == "locant":
            assert not {(node.module or "").split(".")[0] for node in sources} & {"cli", "explore", "report"}
    for path in sorted((SRC / "locant").rglob("*.py")):
        for package in BY_NAME.findall(path.read_text(encoding="utf-8")):
            assert package == path.relative_to(SRC / "locant").parts[0], path


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
