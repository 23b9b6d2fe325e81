"""Encodings by name."""

from __future__ import annotations

import pytest

from locant import ALiBi, Learned, LocantError, PositionEncoding, Rotary, Sinusoidal, T5Bias, encoding
from locant.positions.catalog import CATALOG, ModelShape, find
from tests.refusal import refuses

DOORS = ("embed", "rotate", "bias")
KINDS = {
    "nope": PositionEncoding,
    "learned": Learned,
    "sinusoidal": Sinusoidal,
    "rotary": Rotary,
    "alibi": ALiBi,
    "t5": T5Bias,
}
OPTIONS = {
    "nope": {},
    "learned": {"max_seq_len": 8, "d_model": 6},
    "sinusoidal": {"d_model": 6},
    "rotary": {"head_dim": 6},
    "alibi": {"num_heads": 3},
    "t5": {"num_heads": 3},
}


@pytest.mark.parametrize("name", KINDS)
def test_every_name_builds_its_encoding(name: str) -> None:
    assert type(encoding(name, **OPTIONS[name])) is KINDS[name]
    assert type(find(name).for_model(ModelShape(d_model=12, num_heads=3, max_seq_len=8))) is KINDS[name]


def test_every_entry_has_a_name_of_its_own_and_says_everything() -> None:
    names = [entry.name for entry in CATALOG]
    assert len(set(names)) == len(names)
    assert set(KINDS) <= set(names)
    for entry in CATALOG:
        assert all((entry.parameters, entry.extrapolation, entry.used_by, entry.paper)), entry.name


@pytest.mark.parametrize("name", KINDS)
def test_the_catalog_names_exactly_the_doors_that_are_overridden(name: str) -> None:
    doors = {door for door in DOORS if getattr(KINDS[name], door) is not getattr(PositionEncoding, door)}
    assert set(find(name).doors) == doors


def test_sizes_of_a_model_reach_the_encoding() -> None:
    shape = ModelShape(d_model=24, num_heads=3, max_seq_len=17)
    assert find("rotary").for_model(shape, base=5e5).head_dim == 8
    assert find("learned").for_model(shape).weight.shape == (17, 24)
    assert find("t5").for_model(shape, bidirectional=True).num_heads == 3


def test_options_reach_the_encoding() -> None:
    rotary = encoding("rotary", head_dim=8, base=5e5, layout="interleaved", rotary_dim=4, angles="float32")
    assert isinstance(rotary, Rotary)
    assert (rotary.base, rotary.layout, rotary.rotary_dim, rotary.angles.mode) == (5e5, "interleaved", 4, "float32")


@pytest.mark.parametrize(
    ("wrong", "meant"), [("rotery", "rotary"), ("ALiBi", "alibi"), ("learn", "learned"), ("t-5", "t5")]
)
def test_a_misspelt_name_gets_a_did_you_mean(wrong: str, meant: str) -> None:
    with refuses(LocantError, f"{wrong!r}", f"{meant!r}, did you mean"):
        encoding(wrong)


@pytest.mark.parametrize("name", [None, 3, b"rotary"])
def test_what_is_no_name_is_refused_as_an_unknown_one(name: object) -> None:
    with refuses(LocantError, f"got encoding {name!r}", "nope, learned"):
        encoding(name)


def test_an_unknown_name_gets_the_list() -> None:
    with refuses(LocantError, "'zzzz'", *KINDS):
        encoding("zzzz")


@pytest.mark.parametrize("name", KINDS)
def test_an_unknown_option_is_refused(name: str) -> None:
    with refuses(LocantError, "['thetta']", f"{name!r}"):
        encoding(name, **OPTIONS[name], thetta=1)


@pytest.mark.parametrize("name", [name for name in KINDS if OPTIONS[name]])
def test_a_missing_size_is_named(name: str) -> None:
    with refuses(LocantError, f"no {next(iter(OPTIONS[name]))}", f"encoding({name!r}"):
        encoding(name)
