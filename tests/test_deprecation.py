"""Old public names warn, by a message that begins with `locant`, and give what the new names give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import locant
from locant import Positions, Rotary
from locant.checkpoints.explanation import explain
from locant.lab.decoder import Decoder
from locant.positions import HiddenBias, Temperature
from locant.positions.heads import Heads
from locant.scaling import DynamicNTK, Scaling

SCALING = DynamicNTK(factor=2.0, original_max_seq_len=64)
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
HEADS, TWO = Heads.of(4, slice(2, 4)), Positions.arange(2)
PARTS = [2, (4, 2, 4), 3]  # more frames than rows and columns, so that both rules differ


def scaled_by(method: str) -> list[float]:
    return getattr(Temperature(step=1), method)(torch.ones(1, 1, 2, 1), TWO).flatten().tolist()


def encoding_in(method: str) -> bool:
    model, other = (
        Decoder(4, locant.PositionEncoding(), d_model=4, num_layers=1, num_heads=1),
        locant.PositionEncoding(),
    )
    with getattr(model, method)(other):
        return model.encoding is other


@pytest.mark.parametrize(
    ("old", "new", "call_old", "call_new"),
    [
        ("Rotary.doors", "methods", lambda: Rotary.doors(), lambda: Rotary.methods()),
        ("ALiBi.doors", "methods", lambda: locant.ALiBi(4).doors(), lambda: locant.ALiBi(4).methods()),
        ("Rotary.alike", "replace", lambda: repr(Rotary(8).alike(base=5.0)), lambda: repr(Rotary(8).replace(base=5.0))),
        ("DynamicNTK.length_that_matters", "length_threshold", lambda: SCALING.length_that_matters, lambda: 64),
        ("Layers.doors", "methods", lambda: explain(LLAMA).layers[0].doors, lambda: explain(LLAMA).layers[0].methods),
        ("Heads.here", "to_local", lambda: HEADS.here(3), lambda: 1),
        ("Temperature.scaled", "scale", lambda: scaled_by("scaled"), lambda: scaled_by("scale")),
        ("Positions.paired", "expand_together", lambda: TWO.paired(TWO), lambda: TWO.expand_together(TWO)),
        (
            "Decoder.reading_with",
            "use_encoding",
            lambda: encoding_in("reading_with"),
            lambda: encoding_in("use_encoding"),
        ),
        (
            "Positions.multimodal(goes_on=...)",
            "continue_from",
            lambda: Positions.multimodal(PARTS, goes_on="sides").index.tolist(),
            lambda: Positions.multimodal(PARTS, continue_from="sides").index.tolist(),
        ),
    ],
)
def test_an_old_name_warns_and_gives_the_same(
    old: str, new: str, call_old: Callable[[], Any], call_new: Callable[[], Any]
) -> None:
    with pytest.warns(DeprecationWarning, match="^locant: ") as caught:
        value = call_old()
    assert value == call_new()
    assert f"{old} is now {new}" in str(caught[0].message)


def test_what_overrides_an_old_name_is_used_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="^locant: Own.length_that_matters is now length_threshold"):

        @dataclass(frozen=True)
        class Own(Scaling):
            @property
            def length_that_matters(self) -> int:
                return 8

    assert Own().length_threshold == 8
    with pytest.warns(DeprecationWarning, match="^locant: Far.of_far is now far_terms"):
        far = type("Far", (HiddenBias,), {"of_far": lambda self, queries, keys: (keys, queries)})
    assert far(1, 1).far_terms(None, TWO.index) == (TWO.index, None)
    with pytest.warns(DeprecationWarning, match="^locant: Silent.doors is now methods"):
        silent = type("Silent", (locant.ALiBi,), {"doors": classmethod(lambda cls: ())})
    assert silent.methods() == ()
