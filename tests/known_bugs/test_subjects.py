"""Every encoding of the package is looked at, and the subjects can tell when a number moves."""

from __future__ import annotations

import torch

from locant import PositionEncoding, Positions
from locant.positions.registry import encodings
from tests.known_bugs.exhibit import exhibit
from tests.known_bugs.subjects import EVERY, differences, queries, use


def test_every_encoding_of_the_catalog_is_shown() -> None:
    in_the_catalog = set(encodings().values())

    def check(shown: set[type[PositionEncoding]]) -> None:
        missing = {kind.__name__ for kind in in_the_catalog - shown}
        assert not missing, f"never shown: {missing}"

    kinds = {type(build()) for build in EVERY.values()}
    exhibit(check, kinds, twin={kind for kind in kinds if kind.__name__ != "Rotary"}, because="never shown: {'Rotary'}")


def test_every_subject_does_something_with_positions() -> None:
    for name, build in EVERY.items():
        encoding = build()
        x = queries(encoding, 6)
        moved = differences(use(encoding, x, Positions.after(100, 6)), use(encoding, x, Positions.after(103, 6)))
        relative = differences(
            use(encoding, x, Positions.arange(6)), use(encoding, x, Positions.of([0, 2, 5, 9, 20, 50]))
        )
        # CoPE counts tokens that matter and does not look at how far apart their indices are: only at their order.
        order = differences(use(encoding, x, Positions.arange(6)), use(encoding, x, Positions.of([5, 3, 4, 0, 2, 1])))
        assert name == "nope" or moved or relative or order, f"{name} is the same everywhere"
        assert name in ("nope", "cope") or moved or relative, f"{name} looks at nothing but the order"


def test_differences_sees_one_bit_and_one_dtype() -> None:
    ours = {"q": torch.tensor([1.0, 2.0]), "k": torch.tensor([3.0])}
    one_bit = {**ours, "q": torch.tensor([1.0, 2.0]).nextafter(torch.tensor(9.0))}
    assert differences(ours, dict(ours)) == {}
    assert differences(ours, one_bit).keys() == {"q"}
    assert differences(ours, {**ours, "k": ours["k"].double()}) == {"k": float("inf")}
    assert differences({"q": torch.tensor(float("nan"))}, {"q": torch.tensor(float("nan"))}), "NaN is no agreement"
