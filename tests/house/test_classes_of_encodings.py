"""Attention, caches and ranks ask what an encoding answers, and never which class it is of."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import locant
from locant.positions.base import PositionEncoding
from locant.positions.registry import encodings

SOURCE = Path(locant.__file__).parent
ROOMS = ("attention", "kernels", "parallel")
BASES = {"DistanceBias", "HeadTable", "HiddenBias", "OffsetBias", "RotaryByClass", "RowBias"}
CLASSES = BASES | {kind.__name__ for kind in encodings().values()} - {PositionEncoding.__name__}


def classes_named(code: str) -> set[str]:
    """Those that the code imports, calls or compares with; its docstrings may name any."""
    nodes = list(ast.walk(ast.parse(code)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    return names & CLASSES


@pytest.mark.parametrize("room", ROOMS)
def test_no_file_names_a_class_of_encodings(room: str) -> None:
    files = sorted((SOURCE / room).rglob("*.py"))
    assert files
    named = {str(file.relative_to(SOURCE)): classes_named(file.read_text(encoding="utf-8")) for file in files}
    assert {file: names for file, names in named.items() if names} == {}


def test_a_class_that_is_asked_for_would_be_seen() -> None:
    assert classes_named("from locant.positions import ALiBi\nisinstance(encoding, ALiBi)") == {"ALiBi"}
    assert classes_named("type(encoding) is positions.Fire") == {"Fire"}
    assert classes_named('def f():\n    """`Cope` alone."""') == set()
