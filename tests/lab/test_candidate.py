"""Who takes part: names with a scaling and positions, and encodings that are nothing but a class in a file."""

from __future__ import annotations

import inspect
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from locant import InputError, Positions, RangeError
from locant.lab import Settings, candidate, compare
from locant.lab.candidate import Candidate
from locant.lab.results import Failure, TaskRecord
from locant.lab.training import Training
from locant.positions.base import ModelShape
from locant.report.comparison import Screen
from tests.lab.test_comparison_of_tasks import TASKS, compared
from tests.refusal import refuses
from tests.threads import threads

MINE = """
from locant import DistanceBias, Rotary

class Near(DistanceBias):
    def of_distance(self, distance, head):
        return (0 * head - 0.5) * distance.float()

class Turned(Rotary):
    pass

NUMBER = 1
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """A file of encodings in a folder with an odd name."""
    folder = tmp_path / "a+b @ c"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE, encoding="utf-8")
    return str(folder / "mine.py")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("RoPE", ("rotary", "", "")),
        ("rotary+YaRN", ("rotary", "yarn", "")),
        ("rope++", ("rope_plus_plus", "", "")),
        ("rotary+ntk@randomized", ("rotary", "ntk", "randomized")),
        ("alibi@Abacus", ("alibi", "", "abacus")),
    ],
)
def test_a_name_has_up_to_three_parts(name: str, parts: tuple[str, str, str]) -> None:
    one = Candidate.of(name)
    assert (one.encoding, one.scaling, one.position_scheme, one.source) == (*parts, "")
    assert Candidate.of(one.name) == one


@pytest.mark.parametrize(
    "name", ["", "+yarn", "@randomized", "rotary+", "rotary@", "rotary++yarn", "alibi+yarn", "a.py"]
)
def test_a_wrong_name_is_refused(name: str) -> None:
    with refuses(RangeError, "got"):
        Candidate.of(name)


def test_a_class_in_a_file_takes_part_as_any_other(mine: str) -> None:
    near, turned = Candidate.of(f"{mine}:Near@randomized"), Candidate.of(f"{mine}:Turned+yarn")
    assert (near.name, near.position_scheme, turned.scaling) == (f"{mine}:Near@randomized", "randomized", "yarn")
    shape = ModelShape(d_model=16, num_heads=2, max_seq_len=8)
    expected = -0.5 * (torch.arange(4)[:, None] - torch.arange(4)).float()
    where = Positions.arange(4)
    bias = near.build(shape).bias(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8), where)
    assert bias is not None
    assert torch.equal(bias[0, 0].tril(), expected.tril())
    plain = turned.build(shape)
    assert type(plain) is type(turned.trained.build(shape)), "one class, however often it is asked for"
    assert turned.at_length(plain, 8, 4, shape).to_config() != plain.to_config()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("none.py:Near", ("none.py", "cannot be read")),
        ("none.py:", ("none.py", "cannot be read")),
        ("{}:Far", ("no Far in this file",)),
        ("{}:NUMBER", ("got 1", "subclass")),
        ("{}:Near+yarn", ("no frequencies",)),
        ("{}:Near@somewhere", ("somewhere", "randomized")),
    ],
)
def test_a_class_missing_from_its_file_is_refused(mine: str, named: str, words: tuple[str, ...]) -> None:
    kind = InputError if "cannot be read" in words else RangeError
    with refuses(kind, *words):
        Candidate.of(named.format(mine))


@pytest.mark.parametrize("line", ["1 / 0", "import nowhere_at_all", "raise SystemExit(3)", "(", "null\0byte"])
def test_a_file_that_cannot_be_run_is_named_with_the_reason(tmp_path: Path, line: str) -> None:
    (tmp_path / "bad.py").write_text(line)
    with refuses(InputError, "bad.py", "cannot be run"):
        Candidate.of(f"{tmp_path / 'bad.py'}:Near")


def test_only_a_file_that_has_changed_is_trained_again(mine: str, tmp_path: Path, trained: list[Training]) -> None:
    options: dict[str, Any] = {**TASKS, "tasks": ("copy",), "encodings": ("alibi", f"{mine}:Near"), "seeds": (0,)}
    first = compared(tmp_path / "out", options)
    assert [*first["files"]] == [f"{mine}:Near"]
    compared(tmp_path / "out", options)
    assert [each.encoding for each in trained] == ["alibi", f"{mine}:Near"]
    Path(mine).write_text(MINE.replace("0.5", "2.5"), encoding="utf-8")
    compared(tmp_path / "out", options)
    assert len(trained) == 2, "in one process a file is run once"
    candidate._run.cache_clear()
    compared(tmp_path / "out", options)
    assert [each.encoding for each in trained[2:]] == [f"{mine}:Near"]


def test_a_file_is_a_module_whose_classes_can_be_pickled_and_shown(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And which writes nothing beside the file, whose bytecode would hide a change within a second."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    kind = candidate.kind_of(f"{mine}:Near")
    one = kind(num_heads=2)
    assert pickle.loads(pickle.dumps(kind)) is kind  # noqa: S301
    assert type(pickle.loads(pickle.dumps(one))) is kind  # noqa: S301
    assert inspect.getsource(kind).startswith("class Near(DistanceBias):")
    assert sys.modules[kind.__module__].__spec__.origin == str(Path(mine).resolve())  # type: ignore[union-attr]
    assert [each.name for each in Path(mine).parent.iterdir()] == ["mine.py"]


def test_a_file_may_import_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("SLOPE = 3")
    (tmp_path / "uses.py").write_text("import beside_it\n" + MINE.replace("0.5", "beside_it.SLOPE"))
    near = Candidate.of(f"{tmp_path / 'uses.py'}:Near").build(ModelShape(d_model=16, num_heads=2, max_seq_len=8))
    bias = near.bias(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), Positions.arange(3))
    assert bias is not None
    assert bias[0, 0, 2].tolist() == [-6.0, -3.0, 0.0]


@pytest.mark.parametrize(
    ("where", "line", "reason"),
    [
        ("__init__(self, num_heads)", "raise KeyError('boo')", "KeyError: 'boo'"),
        ("__init__(self, num_heads)", "raise SystemExit(0)", "SystemExit: 0"),
        ("of_distance(self, distance, head)", "import nothere_x", "ModuleNotFoundError: No module named 'nothere_x'"),
        ("of_distance(self, distance, head)", "raise SystemExit(0)", "SystemExit: 0"),
        ("of_distance(self, distance, head)", "assert False", "AssertionError"),
        ("of_distance(self, distance, head)", "raise ValueError('one\\ntwo')", "ValueError: one two"),
    ],
)
def test_an_error_in_a_foreign_class_is_reported_with_its_reason(
    tmp_path: Path, where: str, line: str, reason: str
) -> None:
    """Where it cannot be built, before anything is trained; else beside the trainings of the others."""
    lines = ["from locant import DistanceBias", "class Bad(DistanceBias):", f"    def {where}:", f"        {line}"]
    (tmp_path / "bad.py").write_text("\n".join(lines))
    options: dict[str, Any] = {"tasks": ("copy",), "encodings": ("nope", f"{tmp_path / 'bad.py'}:Bad"), "seeds": (0,)}
    if "__init__" in where:
        with refuses(InputError, "bad.py:Bad", "cannot be built", reason):
            compare(settings=Settings(**{**TASKS, **options}))
        return
    good, bad = compare(settings=Settings(**{**TASKS, **options})).records
    assert isinstance(good, TaskRecord)
    assert isinstance(bad, Failure)
    assert bad.failed == reason


CHANGES = {
    "default dtype": "torch.set_default_dtype(torch.float64)",
    "default device": "torch.set_default_device('meta')",
    "number of threads": "torch.set_num_threads(torch.get_num_threads() + 1)",
    "use of deterministic algorithms": "torch.use_deterministic_algorithms(True)",
    "precision of float32 products": "torch.set_float32_matmul_precision('medium')",
    "recording of gradients": "torch.set_grad_enabled(False)",
    "autocast on the CPU": "torch.set_autocast_enabled('cpu', True)",
}


def settings_of_torch() -> list[Any]:
    return [get() for get, _ in (*candidate.PROCESS_SETTINGS.values(), *candidate.THREAD_SETTINGS.values())]


@pytest.mark.parametrize("place", ["file", "class", "training"])
@pytest.mark.parametrize("setting", CHANGES)
def test_a_class_that_changes_settings_of_torch_is_refused_before_the_others_train_with_them(
    tmp_path: Path, setting: str, place: str
) -> None:
    change = {each: CHANGES[setting] if each == place else "pass" for each in ("file", "class", "training")}
    (tmp_path / "bad.py").write_text(
        "import torch\nfrom locant import DistanceBias\n"
        f"class Bad(DistanceBias):\n    def __init__(self, num_heads):\n        super().__init__(num_heads)\n"
        f"        {change['class']}\n"
        f"    def of_distance(self, distance, head):\n        {change['training']}\n        return -distance.float()\n"
        f"{change['file']}\n"
    )
    before = settings_of_torch()
    options: dict[str, Any] = {"tasks": ("copy",), "encodings": ("nope", f"{tmp_path / 'bad.py'}:Bad"), "seeds": (0,)}
    with refuses(InputError, "bad.py", "changes", setting):
        compare(settings=Settings(**{**TASKS, **options}))
    assert settings_of_torch() == before


def test_a_later_change_of_torch_settings_fails_its_training_alone(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import torch\nfrom locant import DistanceBias\ncalls = []\n"
        "class Late(DistanceBias):\n    def of_distance(self, distance, head):\n        calls.append(0)\n"
        "        torch.set_default_dtype(torch.float64 if len(calls) > 20 else torch.float32)\n"
        "        return -distance.float()\n"
    )
    options: dict[str, Any] = {"tasks": ("copy",), "encodings": (f"{tmp_path / 'late.py'}:Late", "nope"), "seeds": (0,)}
    with threads(1):  # or the other trains beside it, and fails, too
        late, after = compare(settings=Settings(**{**TASKS, **options})).records
    assert isinstance(late, Failure)
    assert "default dtype from float32 to float64" in late.failed
    assert isinstance(after, TaskRecord)
    [alone] = compare(settings=Settings(**{**TASKS, **options, "encodings": ("nope",)})).records
    assert isinstance(alone, TaskRecord)
    assert (after.train_loss, after.accuracy_by_length) == (alone.train_loss, alone.accuracy_by_length)
    assert torch.get_default_dtype() == torch.float32


def test_a_file_that_only_earlier_results_name_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Results may come from anybody: their names are shown, and no more."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{MINE}")
    options: dict[str, Any] = {**TASKS, "tasks": ("copy",), "encodings": ("alibi",), "seeds": (0,)}
    results = json.loads(json.dumps(compared(tmp_path / "out", options)))
    results["records"].append({**results["records"][0], "encoding": f"{tmp_path / 'evil.py'}:Near"})
    (tmp_path / "out" / "results.json").write_text(json.dumps(results))
    again = compared(tmp_path / "out", {**options, "encodings": ("alibi", "nope")}, watcher=Screen())
    assert len(again["records"]) == 3
    assert f"{tmp_path / 'evil.py'}:Near" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
