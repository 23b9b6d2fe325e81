"""What is done on GitHub fits what the project says elsewhere; a linter of workflows sees none of this."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = {path.name: yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / ".github/workflows").glob("*.yml")}
JOBS = {f"{file}: {name}": job for file, each in WORKFLOWS.items() for name, job in each["jobs"].items()}
ON = True
"""What YAML 1.1 reads the key `on` as."""


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_there_are_tests_documentation_and_a_release() -> None:
    assert {*WORKFLOWS} == {"tests.yml", "docs.yml", "release.yml"}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_asks_for_what_the_project_has(name: str) -> None:
    """Targets of make, files, extras and names of jobs that are there."""
    job, makefile = JOBS[name], (ROOT / "Makefile").read_text("utf-8")
    said = commands(job)
    targets = {*re.findall(r"^[\w-]+(?=:)", makefile, flags=re.MULTILINE)}
    assert {*re.findall(r"\bmake ([\w-]+)", said)} <= targets
    assert [
        path for path in re.findall(r"\btests/[\w/.]+|\.github/[\w.]+cjs", said) if not (ROOT / path).exists()
    ] == []
    extras = {extra for listed in re.findall(r"\.\[([\w,]+)\]", said) for extra in listed.split(",")}
    assert extras <= {*PROJECT["optional-dependencies"]}
    file = name.partition(":")[0]
    assert {*job.get("needs", [])} <= {*WORKFLOWS[file]["jobs"]}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_ends_may_do_little_and_leaves_no_token(name: str) -> None:
    job = JOBS[name]
    assert job["timeout-minutes"] <= 120
    assert WORKFLOWS[name.partition(":")[0]]["permissions"] == {"contents": "read"}
    writes = {key for key, access in job.get("permissions", {}).items() if access == "write"}
    assert writes <= {"docs.yml: pages": {"contents"}, "release.yml: publish": {"id-token"}}.get(name, set())
    for step in job["steps"]:
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
    assert "${{" not in commands(job), "what others may write would be run: give it by `env`"


def test_linux_is_tested_with_every_python_that_is_promised() -> None:
    promised = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)}
    assert {*JOBS["tests.yml: linux"]["strategy"]["matrix"]["python"]} == promised
    assert f">={min(promised, key=lambda one: int(one[2:]))}" == PROJECT["requires-python"]


def test_only_a_tag_is_published_and_it_is_the_version() -> None:
    release = WORKFLOWS["release.yml"]
    (pattern,) = release[ON]["push"]["tags"]
    assert re.fullmatch(pattern, "0.1.0")
    publish = release["jobs"]["publish"]
    assert publish["if"] == "github.ref_type == 'tag'"
    assert {*publish["needs"]} == {*release["jobs"]} - {"publish"}
    assert "$GITHUB_REF_NAME-py3-none-any.whl" in commands(release["jobs"]["source"])


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github").rglob("*TEMPLATE*/*.yml"), key=str), ids=lambda path: path.stem
)
def test_an_issue_says_what_probe_says(path: Path) -> None:
    form = yaml.safe_load(path.read_text("utf-8"))
    if path.name != "config.yml":
        (probe,) = [each for each in form["body"] if each.get("id") == "probe"]
        assert "locant probe" in probe["attributes"]["label"]
        assert probe["validations"]["required"] is True


def test_a_pull_request_says_what_probe_says() -> None:
    assert "locant probe" in (ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md").read_text("utf-8")
