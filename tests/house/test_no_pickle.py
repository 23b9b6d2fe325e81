"""No file is ever executed by being opened, and no error is swallowed whole: read off the syntax of every module."""

from __future__ import annotations

import ast
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"

RUN_WHAT_THEY_READ = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
RUN_TEXT = {"eval", "exec"}
LAST = {*RUN_TEXT, "load"}
CATCH_ALL = {"BaseException", "Exception"}


def faults(code: str) -> list[str]:
    """What is wrong with a module, one entry per place."""
    tree = ast.parse(code)
    return [fault for node in ast.walk(tree) for fault in (_imported(node), _called(node), _caught(node)) if fault]


def _imported(node: ast.AST) -> str | None:
    if isinstance(node, ast.Import):
        names = {alias.name.split(".")[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
        names = {(node.module or "").split(".")[0]}
        if node.module == "torch" and any(alias.name == "load" for alias in node.names):
            return f"line {node.lineno}: imports torch.load"
    else:
        return None
    found = names & RUN_WHAT_THEY_READ
    return f"line {node.lineno}: imports {found.pop()}" if found else None


def _called(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Name) and node.func.id in RUN_TEXT:
        return f"line {node.lineno}: calls {node.func.id}"
    last = getattr(node.func, "attr", "")
    if last in LAST and ast.unparse(node.func) in ("torch.load", "torch.hub.load", "builtins.eval", "builtins.exec"):
        return f"line {node.lineno}: calls {ast.unparse(node.func)}"
    for keyword in node.keywords:
        if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False":
            return f"line {node.lineno}: allows pickles"
        if keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False":
            return f"line {node.lineno}: trusts remote code"
    return None


def _caught(node: ast.AST) -> str | None:
    """A handler of everything; allowed: clean up and raise again, or name the cause and raise."""
    if not isinstance(node, ast.ExceptHandler):
        return None
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    names = {"everything" if kind is None else ast.unparse(kind).removeprefix("builtins.") for kind in kinds}
    last = node.body[-1]
    raises_again = isinstance(last, ast.Raise) and last.exc is None
    names_the_cause = isinstance(last, ast.Raise) and last.cause is not None and ast.unparse(last.cause) == node.name
    if (names == {"BaseException"} and raises_again) or (names <= {"Exception", "SystemExit"} and names_the_cause):
        return None
    found = names & (CATCH_ALL | {"everything"})
    return f"line {node.lineno}: catches {found.pop()}" if found else None


def test_no_module_runs_what_it_reads_or_catches_everything() -> None:
    modules = sorted(SRC.rglob("*.py"))
    assert modules, "the proof looks in the wrong place"
    found = {path.relative_to(SRC).as_posix(): faults(path.read_text(encoding="utf-8")) for path in modules}
    assert {path: list_ for path, list_ in found.items() if list_} == {}


STOPPED = (
    "torch.load(path, weights_only=True)", "from torch import load", "torch.hub.load('someone/something', 'model')",
    "import pickle as p", "def late():\n    from pickle import loads", "import joblib.memory",
    "np.load(path, allow_pickle=flag)", "AutoModel.from_pretrained(name, trust_remote_code=True)", "eval('1 + 1')",
    "builtins.exec(text)", "try:\n    f()\nexcept Exception:\n    pass", "try:\n    f()\nexcept:\n    pass",
    "try:\n    f()\nexcept (OSError, Exception) as error:\n    raise",
    "try:\n    f()\nexcept BaseException:\n    pass", "try:\n    f()\nexcept builtins.Exception:\n    pass",
)  # fmt: skip
LET_THROUGH = (
    "np.load(path, allow_pickle=False)", "model.eval()", "json.load(file)",
    "try:\n    f()\nexcept (OSError, ValueError):\n    pass",
    "try:\n    f()\nexcept BaseException:\n    path.unlink()\n    raise",
    "try:\n    f()\nexcept Exception as error:\n    raise InputError(name) from error",
)  # fmt: skip


def test_the_gate_stops_some_and_lets_others_through() -> None:
    assert {code: len(faults(code)) for code in STOPPED} == dict.fromkeys(STOPPED, 1)
    assert {code: faults(code) for code in LET_THROUGH} == {code: [] for code in LET_THROUGH}
