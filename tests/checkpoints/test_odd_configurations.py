"""Whatever a key of a configuration holds, it is read or refused by its name: no error of Python or torch comes out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from locant import LocantError
from locant.checkpoints import convert_layout, rotary_settings
from locant.checkpoints.explanation import explain
from locant.checkpoints.extension import METHODS, extend
from locant.checkpoints.rotary_settings import Precision
from locant.report.explain import explanation_facts
from tests.odd import ODD
from tests.positions.published import PRESETS
from tests.refusal import shapes_unchecked

LLAMA = {
    "hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "num_hidden_layers": 2, "rope_theta": 10_000.0,
    "max_position_embeddings": 4096, "vocab_size": 100,
}  # fmt: skip
MORE: Mapping[str, dict[str, Any]] = {
    "llama4": {
        **LLAMA, "model_type": "llama4_text", "no_rope_layers": [1, 0], "no_rope_layer_interval": 2,
        "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
    },
    "cohere2": {**LLAMA, "model_type": "cohere2", "sliding_window": 512, "layer_types": ["full_attention"] * 2},
    "gemma4": {
        **LLAMA, "model_type": "gemma4_text", "rope_theta": None,
        "layer_types": ["sliding_attention", "full_attention"], "per_layer_config": {"1": {"head_dim": 64}},
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "olmo3": {
        **LLAMA, "model_type": "olmo3", "rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "phimoe": {
        **LLAMA, "model_type": "phimoe", "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "short_mscale": 1.2,
            "long_mscale": 1.2, "original_max_position_embeddings": 2048,
        },
    },
    "converted": {**LLAMA, "model_type": "llama", "rope_interleave": True},
}  # fmt: skip
CONFIGS = {**{name: PRESETS[name] for name in PRESETS}, **MORE}
NOT_IN_FILES = ("bytes", "type", "function", "object", "1j", "array", "tensor")
ODDER: Mapping[str, Any] = {
    **{label: odd for label, odd in ODD.items() if label not in NOT_IN_FILES},
    "names": ["a"], "nested": {"a": {"b": 1}}, "list of dicts": [{}], "name": "alibi",
}  # fmt: skip


def odd_ones(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The configuration with one value changed at a time, however deep it stands."""
    for key, value in config.items():
        for label, odd in ODDER.items():
            yield f"{key}={label}", {**config, key: odd}
        if isinstance(value, Mapping):
            for label, inner in odd_ones(value):
                yield f"{key}.{label}", {**config, key: inner}
        if isinstance(value, list):
            for label, odd in ODDER.items():
                yield f"{key}[0]={label}", {**config, key: [odd, *value[1:]]}


CALLED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("rope_scaling", "rope_parameters"), ("rope parameters", "rope_theta")),
    **dict.fromkeys(("full_attention", "sliding_attention"), ("rope_theta",)),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "rotary_emb_base"), ("base", "rope_theta")),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), ("rotary_dim", "rotated_share")),
    **dict.fromkeys(("short_factor", "long_factor"), ("LongRoPE factors",)),
    **dict.fromkeys(("hidden_size", "num_attention_heads", "n_embd", "n_head", "num_heads"), ("without",)),
    "1": ("per_layer_config",), "mrope_section": ("sections",), "pos_att_type": ("terms",),
    "rope_type": ("partial_rotary_factor",),
}  # fmt: skip
"""What an error names in the place of a key: what follows from it."""


def refused_or_done(do: Any, label: str, *, named: bool = False) -> None:
    """Done, or refused with a remedy; `named`: and with the key."""
    try:
        with shapes_unchecked(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a default that is taken for a null is told
            do()
    except LocantError as error:
        key = label.rpartition("=")[0].rpartition(".")[2].removesuffix("[0]")
        if not error.remedy or (named and not any(word in str(error) for word in (key, *CALLED.get(key, ())))):
            error.add_note(f"no remedy or not the key, for {label}")
            raise
    except BaseException as error:
        error.add_note(label)
        raise


WIDE = {name for name, config in PRESETS.items() if "rope_theta" in config}
"""Those with the most keys."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in WIDE else name for name in CONFIGS]
)
def test_an_odd_value_is_read_or_refused_by_the_name_of_its_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Precision(first_visible=None, at_longest=0.0)
    monkeypatch.setattr(rotary_settings, "_precision", lambda *_: measured)  # the slow part
    for label, config in odd_ones(CONFIGS[name]):
        refused_or_done(lambda: explanation_facts(explain(config)), label, named=True)  # noqa: B023  # called at once
        refused_or_done(lambda: extend(config, to=200_000, method="ntk"), label)  # noqa: B023
        refused_or_done(lambda: convert_layout({}, config, to="interleaved"), label)  # noqa: B023


@pytest.mark.parametrize("method", METHODS)
def test_a_new_length_is_a_number_of_tokens(method: str) -> None:
    for label, odd in ODD.items():
        with shapes_unchecked(), pytest.raises(LocantError):
            extend({**LLAMA, "model_type": "llama"}, to=odd, method=method)
        assert label
