"""Rotary encodings written to configurations, which locant and transformers read again."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig, Phi3Config
from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding

from locant import InputError, Positions, RangeError, Rotary
from locant.positions.scaling import NTK, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Scaling, Unscaled, YaRN
from tests.models.configurations import fields
from tests.positions.published import PUBLISHED, layer_type_of
from tests.refusal import refuses
from tests.tolerances import FORMULA

pytestmark = pytest.mark.filterwarnings("ignore:LongRoPE")  # the last test has it

SCALINGS: dict[str, Scaling] = {
    "default": Unscaled(),
    "linear": Linear(factor=2.5),
    "dynamic": DynamicNTK(factor=2.0, original_max_seq_len=2048),
    "yarn": YaRN(factor=4.0, original_max_seq_len=2048),
    "yarn, all": YaRN(
        factor=4.0, original_max_seq_len=2048, beta_fast=30.0, beta_slow=2.0, truncate=False, attention_factor=1.2
    ),
    "yarn, weights": YaRN(factor=40.0, original_max_seq_len=4096, mscale=1.0, mscale_all_dim=0.7),
    "longrope": LongRoPE(short_factor=(1.0,) * 16, long_factor=(4.0,) * 16, original_max_seq_len=4096, factor=32.0),
    "longrope, factor": LongRoPE(
        short_factor=(1.0,) * 16, long_factor=(4.0,) * 16, original_max_seq_len=4096, factor=1.37, attention_factor=1.2
    ),
    "llama3": Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192),
    "proportional": Proportional(rotated_share=0.25, factor=2.0),
}  # fmt: skip


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("name", SCALINGS)
def test_written_and_read_again_it_is_equal(name: str, layout: str, form: str) -> None:
    rotary = Rotary(32, base=123_456.0, scaling=SCALINGS[name], layout=layout)  # type: ignore[arg-type]
    again = Rotary.from_config(rotary.to_config(form=form))
    assert fields(again) == fields(rotary)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_survive_the_round_trip(name: str) -> None:
    rotary = Rotary.from_config(PUBLISHED[name], layer_type=layer_type_of(PUBLISHED[name]))
    assert fields(Rotary.from_config(rotary.to_config())) == fields(rotary)


@given(st.integers(1, 64), st.data())
def test_any_share_of_any_head_survives_the_round_trip(half_head: int, data: st.DataObject) -> None:
    rotary_dim = 2 * data.draw(st.integers(1, half_head))
    rotary = Rotary(2 * half_head + data.draw(st.integers(0, 1)), rotary_dim=rotary_dim)
    assert fields(Rotary.from_config(rotary.to_config())) == fields(rotary)


def test_ntk_is_written_as_a_larger_base() -> None:
    for form in ("aware", "base"):
        rotary = Rotary(64, scaling=NTK(factor=4.0, form=form))
        again = Rotary.from_config(rotary.to_config())
        assert isinstance(again.scaling, Unscaled)
        pairs = zip(again.angles.frequencies, rotary.angles.frequencies, strict=True)
        assert max(abs(float(a / b - 1)) for a, b in pairs) < FORMULA


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_a_factor_without_effect_is_not_written(form: str) -> None:
    scaling = LongRoPE(
        short_factor=(1.0,) * 32, long_factor=(4.0,) * 32, original_max_seq_len=4096, factor=32.0, attention_factor=1.2
    )
    for longest in (None, 32 * 4096, 100_000):
        written = Rotary(64, scaling=scaling).to_config(max_seq_len=longest, form=form)
        again = Rotary.from_config(written)
        assert written["max_position_embeddings"] == (longest or 32 * 4096)
        assert ("factor" in written[form]) == (longest != 100_000)
        for length in (4096, 4097):
            ours, theirs = again.for_length(length), Rotary(64, scaling=scaling).for_length(length)
            assert ours.angles.frequencies == theirs.angles.frequencies
            assert ours.angles.attention_factor == theirs.angles.attention_factor == 1.2


@pytest.mark.parametrize(
    "scaling",
    [
        YaRN(factor=4.0, original_max_seq_len=2048, mscale=1.0),
        YaRN(factor=4.0, original_max_seq_len=2048, mscale_all_dim=0.7),
        YaRN(factor=4.0, original_max_seq_len=2048, mscale=1.0, mscale_all_dim=0.7, attention_factor=1.2),
    ],
)
def test_fields_without_effect_may_be_lost_in_the_round_trip(scaling: YaRN) -> None:
    again = Rotary.from_config(Rotary(64, scaling=scaling).to_config())
    assert again.angles.frequencies == Rotary(64, scaling=scaling).angles.frequencies
    assert again.scaling.effective_attention_factor == scaling.effective_attention_factor


class Own(Unscaled):
    """A scaling that no configuration knows."""


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("rotary", "words"),
    [
        (Rotary(80, rotary_dim=34, scaling=Proportional(rotated_share=0.5)), "34 of 80"),
        (Rotary(64, sections=(16, 16), axial=True), "axial"),
        (Rotary(64, scaling=Own()), "Own"),
    ],
    ids=["pairs that stand still", "images", "a scaling"],
)
def test_what_no_configuration_can_express_raises(rotary: Rotary, words: str, form: str) -> None:
    with refuses(InputError, words):
        rotary.to_config(form=form)


def test_a_part_of_the_head_is_not_read_for_a_model_that_rotates_whole_heads() -> None:
    written = Rotary(80, rotary_dim=34).to_config()
    with refuses(InputError, "partial_rotary_factor", "llama"):
        Rotary.from_config({**written, "model_type": "llama"})
    assert Rotary.from_config({**written, "model_type": "stablelm"}).rotary_dim == 34


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(44, 30), (50, 46), (80, 34), (98, 58)])
def test_a_share_that_a_float_rounds_down_is_written_rounded_up(head_dim: int, rotary_dim: int) -> None:
    written = Rotary(head_dim, rotary_dim=rotary_dim).to_config()
    share = written["rope_parameters"]["partial_rotary_factor"]
    assert int(head_dim * share) == rotary_dim
    theirs = AutoConfig.for_model(
        "stablelm", hidden_size=head_dim, num_attention_heads=1, **{**written, "max_position_embeddings": 64}
    )
    assert StableLmRotaryEmbedding(theirs).inv_freq.shape == (rotary_dim // 2,)


@pytest.mark.parametrize("length", [0, -1, 2**31, 1.5, "8192", True])
def test_a_longest_sequence_is_a_number_of_tokens(length: Any) -> None:
    with refuses(RangeError, "max_seq_len"):
        Rotary(64).to_config(max_seq_len=length)


def test_the_length_of_a_sequence_is_not_part_of_the_configuration() -> None:
    rotary = Rotary(32, scaling=SCALINGS["dynamic"])
    assert rotary.for_length(9999).to_config() == rotary.to_config()


@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "proportional"])
def test_transformers_reads_written_keys_and_rotates_equally(name: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = Rotary(32, base=123_456.0, scaling=SCALINGS[name], angles="float32").for_length(4096)
    written = rotary.to_config(max_seq_len=None if name in NEED_NONE else 8192)
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, **written)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, 1, 1), torch.arange(4096)[None])
    ours_cos, ours_sin = rotary.cos_sin(Positions.arange(4096))
    assert torch.equal(cos[..., :16], ours_cos)
    assert torch.equal(sin[..., :16], ours_sin)


NEED_NONE = ("dynamic", "longrope", "longrope, factor")


def test_phi_3_reads_the_written_trained_length() -> None:
    written = Rotary(32, scaling=SCALINGS["longrope"]).to_config()
    config = Phi3Config(hidden_size=64, num_attention_heads=2, **written)
    assert fields(Rotary.from_config(config)) == fields(Rotary(32, scaling=SCALINGS["longrope"]))


def test_a_longest_sequence_can_be_written() -> None:
    assert Rotary(64).to_config(max_seq_len=777)["max_position_embeddings"] == 777
    assert Rotary(64, scaling=SCALINGS["yarn"]).to_config()["max_position_embeddings"] == 8192
    with refuses(InputError, "2048"):
        Rotary(64, scaling=SCALINGS["dynamic"]).to_config(max_seq_len=777)
    with refuses(RangeError, "toml"):
        Rotary(64).to_config(form="toml")


def test_an_interleaved_encoding_is_not_read_as_a_model_of_halves() -> None:
    written = Rotary(64, layout="interleaved").to_config()
    with refuses(InputError, "rope_interleave", "llama"):
        Rotary.from_config({**written, "model_type": "llama"})


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_interleaved_sections_are_written_as_in_qwen_3_vl(form: str) -> None:
    config = AutoConfig.for_model("qwen3_vl_text")
    rotary = Rotary.from_config(config)
    written = rotary.to_config(max_seq_len=config.max_position_embeddings, form=form)
    rope = written[form]
    assert (rope["mrope_section"], rope["mrope_interleaved"]) == ([24, 20, 20], True)
    again = Rotary.from_config({"model_type": "qwen3_vl_text", **written})
    assert repr(again) == repr(rotary)
    assert again.pairs == rotary.pairs
    with refuses(InputError, "the keys of a configuration cannot"):
        Rotary.from_config(AutoConfig.for_model("nanochat")).to_config()


@pytest.mark.unchecked  # checks of shapes are frames between the caller and us
def test_a_scaling_that_servers_read_differently_causes_a_warning() -> None:
    factors = {"short_factor": [1.0] * 4, "original_max_seq_len": 4096, "factor": 4.0}
    with pytest.warns(UserWarning, match=r"LongRoPE.* 4096 tokens. vLLM and llama.cpp") as caught:
        Rotary(8, scaling=LongRoPE(long_factor=[4.0] * 4, **factors)).to_config()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Rotary(8, scaling=LongRoPE(long_factor=[1.0] * 4, **factors)).to_config()
