"""The project's frame says one thing in one place, and says it of every machine."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import locant._version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# Written so that this file is not what it finds.
MACHINE = re.compile(
    r"(?<![\w.~-])/(?:root|home|work|opt|Users|mnt|srv)/\w|"  # a folder of somebody's machine
    r"\b[A-Za-z]:\\\w+\\|\b(?:pypi[.]org|pythonhosted[.]org|download[.]pytorch[.]org|registry[.]npmjs[.]org)\b|"
    r"\bindex[-_]url\b"
)


def unpinned(requirements: list[str], constraints: str) -> list[str]:
    """The requirements (extras of this project followed) that `constraints` holds at no exact version that fits."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", constraints, flags=re.MULTILINE))
    exact = {canonicalize_name(name): pinned for name, pinned in pins.items()}
    missing = []
    for requirement in map(Requirement, requirements):
        if requirement.name == PROJECT["name"]:
            followed = [one for extra in requirement.extras for one in PROJECT["optional-dependencies"][extra]]
            missing += unpinned(followed, constraints)
        elif not requirement.specifier.contains(exact.get(canonicalize_name(requirement.name), "0.dev0")):
            missing.append(str(requirement))
    return missing


def tracked_texts() -> dict[str, str]:
    """The text of every file that git knows or would add."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not in a git checkout, so there is no list of tracked files")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    texts = {}
    for path in paths:
        data = path.read_bytes() if path.is_file() else b""
        if b"\0" not in data:
            texts[path.relative_to(ROOT).as_posix()] = data.decode("utf-8")
    return texts


def test_the_version_is_written_in_one_place() -> None:
    number = locant._version.__version__
    assert "version" in PROJECT["dynamic"]
    assert "version" not in PROJECT
    assert version("locant") == number, "install again: pip install -c constraints.txt -e '.[dev]'"
    written = [path for path in (ROOT / "src").rglob("*.py") if re.search(r"__version__\s*=", path.read_text("utf-8"))]
    assert written == [ROOT / "src" / "locant" / "_version.py"]


def test_the_changelog_tells_of_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings[:2] == ["Unreleased", locant._version.__version__]


def test_the_changelog_has_a_line_for_each_thing_under_the_headings_of_its_kind() -> None:
    """In the form of Keep a Changelog; a line is a few on the screen at most."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert {*re.findall(r"^### (.+)$", text, flags=re.MULTILINE)} <= kinds
    entries = re.findall(r"^- (.+(?:\n  .+)*)", text, flags=re.MULTILINE)
    assert [entry for entry in entries if len(entry) > 480] == []


def test_everything_that_dev_asks_for_is_pinned() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    assert unpinned(wanted, constraints) == []


def test_pins_are_exact_sorted_and_without_build_tags() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    assert pins == sorted(pins, key=str.lower)


def test_the_makefile_installs_with_the_constraints() -> None:
    installs = [line for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines() if "pip install" in line]
    assert installs
    assert [line for line in installs if not re.search(r"-c (\.venv-\$\*/)?constraints\.txt", line)] == []


def test_ci_runs_the_command_that_the_readme_gives_for_testing_and_installs_nothing_by_hand() -> None:
    readme, ci = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", ".ci/run"))
    blocks = "".join(re.findall(r"^```[^\n]*\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL))
    for text in (blocks, ci):
        assert re.search(r"^\s*(?:\$ )?make test\s*(?:#.*)?$", text, flags=re.MULTILINE)
    by_hand = {"apt", "apt-get", "conda", "curl", "npm", "pip", "pip3", "pipx", "uv", "wget"}
    assert by_hand & {*re.findall(r"[\w.-]+", ci)} == set()


def test_the_recipe_of_conda_asks_for_what_the_project_does() -> None:
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text("utf-8"))
    assert recipe["context"]["version"] == locant._version.__version__
    others = {"torch": "pytorch"}  # as conda-forge calls it
    wanted = [("python", PROJECT["requires-python"])]
    wanted += [
        (others.get(one.name, one.name), str(one.specifier)) for one in map(Requirement, PROJECT["dependencies"])
    ]
    assert [tuple(one.split()) for one in recipe["requirements"]["run"]] == wanted
    (backend,) = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["build-system"]["requires"]
    assert backend.replace(">", " >", 1) in recipe["requirements"]["host"]


def test_no_file_speaks_of_one_machine() -> None:
    texts = tracked_texts()
    assert "pyproject.toml" in texts
    assert {path: traces for path, text in texts.items() if (traces := MACHINE.findall(text))} == {}
