"""What `make test-versions` installs, skips and passes over."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable

import pytest
from packaging.requirements import Requirement

from tests import older_releases, versions
from tests.conftest import OTHER_VERSIONS, is_missing_in_transformers

transformers = pytest.importorskip("transformers")
NAMED = {"transformers", "tokenizers", "numpy", "safetensors", "click", "rich", "jaxtyping"}


def test_the_oldest_are_the_floors_of_the_project_and_torch_is_the_one_that_is_pinned() -> None:
    oldest = {one.name: str(one.specifier) for one in map(Requirement, versions.constraints("oldest"))}
    assert oldest.keys() >= NAMED
    assert all(re.fullmatch(r"==[\d.]+", pin) for pin in oldest.values())
    pins = (versions.ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"torch{oldest['torch']}" in pins
    assert versions.constraints("newest") == [f"torch{oldest['torch']}"]


def test_the_newest_are_tested_unless_all_of_them_are_pinned_to_these_versions() -> None:
    torch, *_ = versions.constraints("newest")
    newest = str(older_releases.newest_tested())

    def report(**packages: str) -> dict[str, object]:
        return {"install": [{"metadata": {"name": name, "version": each}} for name, each in packages.items()]}

    pinned = report(locant="0", torch=f"{torch.partition('==')[2]}+cpu", Transformers=newest)
    assert versions.newer(pinned) == []
    assert versions.newer(report(transformers="99.1")) == [f"transformers 99.1, where constraints.txt has {newest}"]
    assert versions.newer(report(no_such_package="1")) == ["no_such_package 1, where constraints.txt has no version"]


def look_up_in_locant() -> object:
    import locant

    return locant.encoding("no_encoding_has_this_name")


def fail_inside_a_model() -> object:
    config = transformers.LlamaConfig(hidden_act="no_activation_has_this_name")
    return transformers.LlamaModel(config)


@pytest.mark.parametrize(
    ("look_up", "is_missing"),
    [
        (lambda: transformers.CONFIG_MAPPING["no_model_has_this_name"], True),
        (lambda: transformers.AutoConfig.for_model("no_model_has_this_name"), True),
        (lambda: importlib.import_module("transformers.models.no_model_has_this_name"), True),
        (lambda: transformers.NoClassHasThisName, True),
        (lambda: transformers.models.llama.modeling_llama.NoClassHasThisName, True),
        (lambda: importlib.import_module("no_package_has_this_name"), False),
        (lambda: {}["no_model_has_this_name"], False),
        (look_up_in_locant, False),
        (fail_inside_a_model, False),
    ],
)
def test_only_what_a_test_looks_up_in_transformers_is_missing_there(
    look_up: Callable[[], object], is_missing: bool
) -> None:
    with pytest.raises((ImportError, LookupError, AttributeError, ValueError)) as caught:
        look_up()
    assert is_missing_in_transformers(caught.value) == is_missing


class Looked:
    """Of a class whose objects say that they are of transformers."""


@pytest.mark.parametrize(("home", "is_missing"), [("transformers.models.llama", True), ("locant.swapping", False)])
def test_an_attribute_that_a_test_asks_an_object_of_transformers_for_may_be_missing(
    home: str, is_missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Looked, "__module__", home)
    for owner in (Looked, Looked()):
        with pytest.raises(AttributeError) as caught:
            _ = owner.no_attribute_has_this_name  # type: ignore[attr-defined]
        assert is_missing_in_transformers(caught.value) == is_missing


def test_what_differs_in_older_releases_names_tests_that_there_are_and_is_run_with_the_newest() -> None:
    names = {path.stem for path in (versions.ROOT / "tests").rglob("test_*.py")}
    names |= set(re.findall(r"^def (test_\w+)", "\n".join(
        path.read_text("utf-8") for path in (versions.ROOT / "tests").rglob("test_*.py")), re.MULTILINE))  # fmt: skip
    for pattern in older_releases.DIFFERENT:
        for name in re.findall(r"test_\w+", pattern):
            assert any(each.startswith(name) for each in names), name
    example = "tests/swapping/test_t5.py::test_anything"
    newest = str(older_releases.newest_tested())
    assert older_releases.how_it_differs(example, newest) is None
    assert older_releases.how_it_differs(example, "5.0.0") == older_releases.BY_NAME
    assert older_releases.how_it_differs("tests/swapping/test_life.py::test_anything", "5.0.0") is None


def test_our_own_deprecations_begin_with_our_name() -> None:
    """By which they are told from those of other packages, and stay errors where these pass."""
    sources = [path.read_text("utf-8") for path in (versions.ROOT / "src").rglob("*.py")]
    calls = [call for text in sources for call in re.findall(r"warnings\.warn\((.*?)stacklevel", text, re.DOTALL)]
    assert calls
    ours = [call for call in calls if "DeprecationWarning" in call or "FutureWarning" in call]
    assert [call for call in ours if not re.match(r"\s*f?[\"']locant", call)] == []


@pytest.mark.filterwarnings(*OTHER_VERSIONS)
def test_among_other_versions_ours_are_still_errors() -> None:
    with warnings.catch_warnings(record=True) as passed:
        warnings.warn("numpy.old is deprecated", DeprecationWarning, stacklevel=1)
        with pytest.raises(DeprecationWarning, match=r"locant\.old"):
            warnings.warn("locant.old is deprecated", DeprecationWarning, stacklevel=1)
    assert [str(one.message) for one in passed] == ["numpy.old is deprecated"]
