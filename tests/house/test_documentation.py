"""The code in the README and docs/ is run, and prints the output shown below it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from click.testing import CliRunner

import locant
from locant.cli import main
from locant.models.registry import ARCHITECTURES
from locant.positions.registry import ENCODINGS
from locant.text.store.formats import FORMATS
from tests.refusal import refuses, shapes_unchecked
from tests.registries import restore

ROOT = Path(__file__).parents[2]
GENERATED = {"_build", "reference"}
DOCS = ROOT / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if not GENERATED & {*page.relative_to(DOCS).parts}]
PAGES.insert(0, ROOT / "README.md")
EXTENDING = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def blocks(page: str) -> list[tuple[str, str | None]]:
    """Each block of Python, and the output shown below it."""
    found = re.findall(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", page, flags=re.DOTALL)
    return [(code, output or None) for code, output in found]


def run(code: str) -> None:
    module = ModuleType("locant_example")
    sys.modules[module.__name__] = module  # compilers look classes up where they were defined
    exec(compile(code, "an example", "exec"), vars(module))  # noqa: S102  # running our pages is the test


def shown() -> list[tuple[str, str]]:
    return [
        pytest.param(code, output, id=f"{page.name}-{number}")
        for page in PAGES
        for number, (code, output) in enumerate(blocks(page.read_text(encoding="utf-8")))
        if output is not None
    ]


@pytest.fixture(autouse=True)
def _registries_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (ENCODINGS, ARCHITECTURES, FORMATS):
        restore(registry, monkeypatch)


@pytest.mark.parametrize(("code", "output"), shown())
def test_an_example_prints_what_stands_below_it(code: str, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    with shapes_unchecked() if "torch.export" in code else nullcontext():  # sizes are symbols, and no int
        run(code)
    assert capsys.readouterr().out == output


def test_every_picture_and_page_that_is_pointed_to_is_there() -> None:
    targets = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())]
    assert targets
    assert [(page, target) for page, target in targets if not (page.parent / target).exists()] == []


def test_the_first_example_has_twelve_lines_at_most_and_a_recipe_under_thirty() -> None:
    first, *recipes = [blocks(PAGES[0].read_text(encoding="utf-8"))[0][0], *(code for code, _ in blocks(EXTENDING))]
    lines = [len([line for line in code.splitlines() if line.strip()]) for code in (first, *recipes)]
    assert lines[0] <= 12
    assert len(recipes) == 4
    assert max(lines[1:]) < 30


def test_the_format_reads_and_writes(tmp_path: Path) -> None:
    run(blocks(EXTENDING)[3][0])
    (tmp_path / "a.txt").write_text("some text")
    locant.prepare(tmp_path / "a.txt", tmp_path / "store", tokenizer="bytes", workers=1)
    made = CliRunner().invoke(main, ["export", f"{tmp_path}/store", "--to", "npy", "-o", f"{tmp_path}/other"])
    assert made.exit_code == 0, made.output
    ours, theirs = locant.TokenStore(tmp_path / "store"), locant.TokenStore(tmp_path / "other", format="npy")
    assert np.array_equal(ours[:], theirs[:])
    assert np.array_equal(ours.documents, theirs.documents)


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with the recipe's encoding in one file, as pip leaves it; and one that is broken."""
    code = blocks(EXTENDING)[0][0].split("locant.register_encoding")[0]
    (tmp_path / "gentle_bias.py").write_text(code)
    (tmp_path / "broken_bias.py").write_text("import a_module_that_is_not_there")
    for name, reference in (("gentle", "gentle_bias:Gentle"), ("broken", "broken_bias:Broken")):
        info = tmp_path / f"{name}_bias-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-bias\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[locant.encodings]\n{name} = {reference}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ENCODINGS, "_offers", None)
    assert {"gentle", "broken"} <= {entry.name for entry in metadata.entry_points(group="locant.encodings")}
    with shapes_unchecked():  # once somebody has imported its backport, `importlib.metadata` hands out another class
        yield


@pytest.mark.usefixtures("_installed")
def test_an_installed_encoding_is_found_by_name_listed_and_drawn(tmp_path: Path) -> None:
    assert type(locant.encoding("gentle", num_heads=2)).__name__ == "Gentle"
    listed = CliRunner().invoke(main, ["list", "--json"])
    assert listed.exit_code == 0
    assert '"gentle"' in listed.stdout
    assert '"rotary"' in listed.stdout
    assert "broken-bias" in listed.stderr
    with refuses(locant.InputError, "broken-bias", "a_module_that_is_not_there"):
        locant.encoding("broken", num_heads=2)
    drawn = CliRunner().invoke(main, ["plot", "gentle", "-o", f"{tmp_path}/gentle.png"])
    assert drawn.exit_code == 0, drawn.output
    assert (tmp_path / "gentle.png").stat().st_size > 1_000
