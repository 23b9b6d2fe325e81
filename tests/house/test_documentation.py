"""The code in the README and docs/ is run, and prints the output shown below it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import locant
from locant import PositionEncoding
from locant.cli import main
from locant.models.registry import ARCHITECTURES
from locant.positions.registry import ENCODINGS
from locant.text.store.formats import FORMATS
from tests.refusal import refuses, shapes_unchecked
from tests.registries import restore
from tests.tolerances import SEVEN_DIGITS

ROOT = Path(__file__).parents[2]
GENERATED = {"_build", "reference"}
DOCS = ROOT / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if not GENERATED & {*page.relative_to(DOCS).parts}]
PAGES.insert(0, ROOT / "README.md")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
EXTENDING = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def blocks(page: str) -> list[tuple[str, str | None]]:
    """Each block of Python, and the output shown below it."""
    found = re.findall(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", page, flags=re.DOTALL)
    return [(code, output or None) for code, output in found]


def run(code: str) -> ModuleType:
    module = ModuleType("locant_example")
    sys.modules[module.__name__] = module  # compilers look classes up where they were defined
    exec(compile(code, "an example", "exec"), vars(module))  # noqa: S102  # running our pages is the test
    return module


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


def test_numbers_have_a_comma_for_thousands() -> None:
    texts = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    prose = [
        (page, re.sub(r"```.*?```|~~~.*?~~~", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)) for page in texts
    ]
    spaced = r"(?<![\w.,^])\d{1,3}[ \N{THIN SPACE}\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}]\d{3}(?![\w.])"
    assert re.search(spaced, "at 8 192 tokens")
    for file in sorted((ROOT / "src").rglob("*.py")):  # which the pages of the API show
        nodes = (node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, DOCUMENTED))
        prose += [
            (file, words) for node in nodes if (words := ast.get_docstring(node)) and "10 000 shards" not in words
        ]
    assert [(page, found) for page, text in prose for found in re.findall(spaced, text)] == []


def test_the_first_example_has_twelve_lines_at_most_and_a_recipe_under_thirty() -> None:
    first, *recipes = [blocks(PAGES[0].read_text(encoding="utf-8"))[0][0], *(code for code, _ in blocks(EXTENDING))]
    lines = [len([line for line in code.splitlines() if line.strip()]) for code in (first, *recipes)]
    assert lines[0] <= 12
    assert len(recipes) == 10
    assert max(lines[1:]) <= 25


def test_every_method_that_authors_may_override_is_on_their_page() -> None:
    # by us, for every encoding
    called = {"methods", "doors", "sizes", "forward", "norm_and_rotate", "rotation_into_memory"}
    names = {name for name in vars(PositionEncoding) if not name.startswith("_")} - called
    assert {"rotate", "read", "pair_classes", "needs_all_keys"} <= names
    assert {name for name in names if not re.search(rf"`{name}\b", EXTENDING)} == set()


def test_the_rotation_by_hidden_states_follows_its_formula() -> None:
    """In NumPy, one token at a time; a row in two steps has the bits of the whole row; and its weights learn."""
    example = next(code for code, _ in blocks(EXTENDING) if "class Shifted" in code)
    encoding = run(example).Shifted(head_dim=6, num_heads=2, d_model=5)
    x, q, k = torch.randn(3, 7, 5), torch.randn(3, 4, 7, 6), torch.randn(3, 2, 7, 6)
    positions = encoding.read(x, locant.Positions.arange(7))
    rotated = encoding.rotate(q, k, positions)
    weight = encoding.shift.weight.detach().double().numpy()
    for given, found in zip((q, k), rotated, strict=True):
        for row, head, token in np.ndindex(3, given.shape[1], 7):
            group = head * 2 // given.shape[1]  # the query heads 0 and 1 have the key head 0
            place = token + np.tanh(weight[group] @ x[row, token].double().numpy())
            angle = place * 10_000.0 ** (-np.arange(3) / 3)
            turned = (given[row, head, token, :3] + 1j * given[row, head, token, 3:]).numpy() * np.exp(1j * angle)
            expected = np.concatenate([turned.real, turned.imag])
            np.testing.assert_allclose(found[row, head, token].detach().numpy(), expected, rtol=0, atol=SEVEN_DIGITS)
    steps = [encoding.read(x[:, part], positions.slice(part.start, part.stop)) for part in (slice(0, 4), slice(4, 7))]
    parts = [encoding.rotate_one(q[:, :, :4], steps[0]), encoding.rotate_one(q[:, :, 4:], steps[1])]
    assert torch.equal(torch.cat(parts, 2), rotated[0])
    (rotated[0] * torch.randn_like(q)).sum().backward()
    assert encoding.shift.weight.grad.abs().min() > 0


THIRTY = (DOCS / "rotary-in-thirty-lines.md").read_text(encoding="utf-8")


def test_rotary_attention_has_thirty_lines_and_each_step_names_what_does_it() -> None:
    function = blocks(THIRTY)[0][0].partition("def rotary")[2].partition("\n\n\n")[0]
    assert len([line for line in function.splitlines() if line.strip()]) <= 30
    rows = re.findall(r"^\| ([\d, ]+|all) \| (.*?) \|", THIRTY, flags=re.MULTILINE)
    named = re.findall(r"`(\w+)` in \[([\w/.]+)\]\((.+?)\)", THIRTY)
    assert {step for steps, _ in rows for step in steps.split(", ")} == {*"1234567", "all"}
    assert len(named) >= len(rows)
    assert all(target == f"../src/locant/{path}" for _, path, target in named)
    sources = {path: (ROOT / "src" / "locant" / path).read_text(encoding="utf-8") for _, path, _ in named}
    defined = {path: {*re.findall(r"^(?:def|class) (\w+)", source, re.MULTILINE)} for path, source in sources.items()}
    assert [(name, path) for name, path, _ in named if name not in defined[path]] == []


def test_the_format_reads_and_writes(tmp_path: Path) -> None:
    run(next(code for code, _ in blocks(EXTENDING) if "register_format" in code))
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
