"""Weights in the other layout: the same model, the same bytes after the way back, nothing passed over in silence."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locant import InputError, Positions, RangeError, Rotary, ShapeError
from locant.checkpoints import convert_layout
from tests.checkpoints.other_layout import MODELS, SIZES, build, hidden_states, turn_otherwise
from tests.models.configurations import ROTARY_KEYS
from tests.refusal import refuses
from tests.tolerances import DIFFERENT, assert_close

transformers = pytest.importorskip("transformers")

LLAMA = {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
Q = "model.layers.0.self_attn.q_proj"
K = "model.layers.0.self_attn.k_proj"


def llama_weights(**more: Tensor) -> dict[str, Tensor]:
    return {
        f"{Q}.weight": torch.randn(24, 24), f"{K}.weight": torch.randn(12, 24), "model.norm.weight": torch.randn(24),
        "model.layers.0.self_attn.v_proj.weight": torch.randn(12, 24), **more,
    }  # fmt: skip


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# ---------------------------------------------------------------------- the same model


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_computes_the_same_with_the_other_rotation(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    small = MODELS[name]
    model = build(small)
    before = hidden_states(model)
    weights = model.state_dict()
    converted = convert_layout(weights, model.config, to=small.other)

    turn_otherwise(monkeypatch, small, model)
    wrong = hidden_states(model)
    model.load_state_dict(converted)
    after = hidden_states(model)
    # Norms and rotations of transformers are float32 inside, whatever the model is.
    assert float((wrong - before).abs().max()) > DIFFERENT, "the layout makes no difference to this test"
    assert_close(after, before, torch.float32)


@given(
    heads=st.integers(1, 3), group=st.integers(1, 3), pairs=st.integers(1, 5), rest=st.integers(0, 3), data=st.data()
)
def test_scores_are_equal_in_both_layouts(heads: int, group: int, pairs: int, rest: int, data: st.DataObject) -> None:
    head_dim, hidden = 2 * pairs + rest, 7
    start = data.draw(st.sampled_from([0, 65_530, 2**31 - 12]))
    config = {
        "model_type": "phi", "hidden_size": hidden, "num_attention_heads": heads * group, "num_key_value_heads": heads,
        "head_dim": head_dim, "partial_rotary_factor": min(1.0, (2 * pairs + 0.5) / head_dim),
    }  # fmt: skip
    weights = {
        f"{Q}.weight": torch.randn(heads * group * head_dim, hidden, dtype=torch.float64),
        f"{K}.weight": torch.randn(heads * head_dim, hidden, dtype=torch.float64),
    }
    x = torch.randn(5, hidden, dtype=torch.float64)

    def scores(state: dict[str, Tensor], layout: Any) -> Tensor:
        q, k = ((x @ state[f"{name}.weight"].T).view(1, 5, -1, head_dim).transpose(1, 2) for name in (Q, K))
        rotary = Rotary(head_dim, rotary_dim=2 * pairs, layout=layout)
        q, k = rotary.rotate(q, k, Positions.after(start, 5))
        return q @ k.repeat_interleave(group, 1).transpose(-1, -2)

    converted = convert_layout(weights, config, to="interleaved")
    assert_close(scores(converted, "interleaved"), scores(weights, "half"))
    back = convert_layout(converted, config, to="half", source="interleaved")
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("model_type", ROTARY_KEYS)
def test_every_architecture_that_we_know_is_understood_to_the_last_tensor(model_type: str) -> None:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("transformers has no code for it")
    known = {small.model_type: small.options for small in MODELS.values()}
    options = {**SIZES, **known.get(model_type, {"num_key_value_heads": 2, "head_dim": 12})}
    config = transformers.CONFIG_MAPPING[model_type](**options)
    with torch.device("meta"):
        weights = transformers.AutoModel.from_config(config).state_dict()
    to = "half" if ROTARY_KEYS[model_type].layout == "interleaved" else "interleaved"
    converted = convert_layout(weights, config, to=to)
    changed = {name for name, tensor in weights.items() if converted[name] is not tensor}
    layers = {int(found[1]) for name in changed if (found := re.search(r"(?:layers|h)\.(\d+)\.", name))}
    assert layers == set(range(config.get_text_config().num_hidden_layers))
    assert not [name for name in changed if "visual" in name]


# ---------------------------------------------------------------------- the same bytes

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e8m0fnu, torch.complex64,
]  # fmt: skip
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "phi", "partial_rotary_factor": 0.5},
    {"model_type": "gptj", "rotary_dim": 4},
    {"model_type": "something else"},
]


@given(
    config=st.sampled_from(CONFIGS), dtype=st.sampled_from(DTYPES), heads=st.integers(1, 3), group=st.integers(1, 2),
    head_dim=st.integers(4, 9), columns=st.integers(0, 5), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_there_and_back_is_the_same_bytes(
    config: dict[str, Any], dtype: torch.dtype, heads: int, group: int, head_dim: int, columns: int, seed: int
) -> None:
    head_dim -= head_dim % 2 if config["model_type"] != "gptj" else 0
    if config["model_type"] == "phi":
        head_dim -= head_dim % 4
    facts = {
        "hidden_size": 8, "num_attention_heads": heads * group, "num_key_value_heads": heads, "head_dim": head_dim,
        **config,
    }  # fmt: skip
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> Tensor:
        raw = rng.integers(0, 256, size=(int(np.prod(shape)) * dtype.itemsize,), dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype).view(shape) if raw.size else torch.empty(shape, dtype=dtype)

    rows = heads * group * head_dim
    weights = {
        f"{Q}.weight": random(rows, columns), f"{Q}.bias": random(rows), f"{K}.bias": random(heads * head_dim),
        "model.layers.0.self_attn.q_norm.weight": random(head_dim),
        "model.layers.1.self_attn.q_norm.weight": random(rows),
        "model.layers.1.self_attn.k_norm.weight": random(heads, head_dim),
        f"{K}.lora_A.default.weight": random(2, columns), f"{K}.lora_B.default.weight": random(heads * head_dim, 2),
        f"{Q}.lora_magnitude_vector.default.weight": random(rows), "lm_head.weight": random(3, 2),
    }  # fmt: skip
    before = {name: (tensor, bytes_of(tensor)) for name, tensor in weights.items()}
    there = convert_layout(weights, facts, to="interleaved", source="half")
    back = convert_layout(there, facts, to="half", source="interleaved")
    assert list(there) == list(back) == list(weights)
    for name, (tensor, raw) in before.items():
        assert weights[name] is tensor
        assert bytes_of(tensor) == raw, "an input was written to"
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(back[name]) == raw
        assert sorted(bytes_of(there[name])) == sorted(raw)
    assert there["lm_head.weight"] is weights["lm_head.weight"]
    assert there[f"{K}.lora_A.default.weight"] is weights[f"{K}.lora_A.default.weight"]


def test_a_llama_head_is_permuted_as_its_conversion_script_does_it() -> None:
    """The script that made Llama's published weights: view as heads, pairs, 2; exchange the last two; flatten."""
    weights = llama_weights()
    there = convert_layout(weights, LLAMA, to="interleaved")
    for name, heads in ((f"{Q}.weight", 4), (f"{K}.weight", 2)):
        half = there[name].view(heads, 3, 2, 24).transpose(1, 2).reshape(heads * 6, 24)
        assert torch.equal(half, weights[name])
        assert not torch.equal(there[name], weights[name])


def test_lora_follows_the_rows_of_its_projection() -> None:
    """The adapted projection, merged and then converted, is the converted one with the converted adapter."""
    a, b = torch.randn(2, 24, dtype=torch.float64), torch.randn(24, 2, dtype=torch.float64)
    base = torch.randn(24, 24, dtype=torch.float64)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    adapter = {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b, f"{prefix}.base_layer.weight": base}
    parts = convert_layout(adapter, LLAMA, to="interleaved")
    merged = convert_layout({f"{Q}.weight": base + b @ a}, LLAMA, to="interleaved")[f"{Q}.weight"]
    assert_close(parts[f"{prefix}.base_layer.weight"] + parts[f"{prefix}.lora_B.weight"] @ a, merged)


def test_parameters_views_and_tensors_elsewhere_are_taken() -> None:
    wide = torch.randn(24, 48)
    weights = {f"{Q}.weight": wide[:, ::2], f"{K}.weight": torch.nn.Parameter(torch.randn(12, 24))}
    there = convert_layout(weights, LLAMA, to="interleaved")
    assert torch.equal(there[f"{Q}.weight"][1], wide[3, ::2])
    assert not there[f"{K}.weight"].requires_grad
    on_meta = convert_layout({f"{Q}.weight": torch.empty(24, 24, device="meta")}, LLAMA, to="interleaved")
    assert on_meta[f"{Q}.weight"].is_meta


def test_vision_towers_stay_as_they_are() -> None:
    weights = llama_weights(**{
        "visual.blocks.0.attn.qkv.weight": torch.randn(9, 3), "vision_tower.layers.0.q_proj.weight": torch.randn(5, 3),
    })  # fmt: skip
    there = convert_layout(weights, {"model_type": "llava", "text_config": LLAMA}, to="interleaved")
    kept = {name for name, tensor in weights.items() if there[name] is tensor}
    assert {"visual.blocks.0.attn.qkv.weight", "vision_tower.layers.0.q_proj.weight"} <= kept
    assert f"{Q}.weight" not in kept


# ---------------------------------------------------------------------- from which layout


@pytest.mark.parametrize(
    ("config", "source", "layout"),
    [
        ({"model_type": "llama"}, None, "half"),
        ({"model_type": "llama", "rope_interleave": True}, None, "interleaved"),
        ({"model_type": "llama", "rope_interleave": False}, None, "half"),
        ({"model_type": "llama"}, "interleaved", "interleaved"),
        ({"model_type": "gptj", "rotary_dim": 4}, None, "interleaved"),
        ({"model_type": "unheard of"}, "half", "half"),
        ({"model_type": "unheard of", "rope_interleave": True}, None, "interleaved"),
    ],
)
def test_weights_that_are_in_the_layout_already_are_refused(config: dict[str, Any], source: Any, layout: Any) -> None:
    facts = {**LLAMA, **config}
    with refuses(InputError, f"already have the layout '{layout}'", "source="):
        convert_layout(llama_weights(), facts, to=layout, source=source)
    other = "half" if layout == "interleaved" else "interleaved"
    assert convert_layout(llama_weights(), facts, to=other, source=source)


# ---------------------------------------------------------------------- what is refused

UNKNOWN = [
    "model.layers.0.self_attn.query_key_value.weight",
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.0.attention.wq.weight",
    "layers.0.wk.weight",
    "transformer.h.0.attn.c_attn.weight",
    "encoder.layer.0.attention.self.query.weight",
    "encoder.layer.0.attention.self.key.bias",
    "blocks.0.attn.in_proj_weight",
    "model.layers.0.self_attn.indexer.wq_b.weight",
    "model.layers.0.self_attn.indexer.weights_proj.weight",
    "model.layers.0.self_attn.q_b_proj.weight",
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
    "model.layers.0.self_attn.something.weight",
    f"{Q}.lora_C.weight",
    f"{Q}.vera_lambda_b",
    "model.layers.0.self_attn.q_norm.running_mean",
    "model.layers.0.self_attn.qk_norm.weight",
    "model.layers.0.self_attn.query_layernorm.weight",
]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_may_be_a_query_or_key_is_refused_and_listed(name: str) -> None:
    with refuses(InputError, name, "llama", "q_proj"):
        convert_layout(llama_weights(**{name: torch.randn(24, 24)}), LLAMA, to="interleaved")


def test_all_unknown_names_are_listed() -> None:
    with refuses(InputError, *sorted(UNKNOWN)[:8], f"and {len(UNKNOWN) - 8} more"):
        convert_layout(llama_weights(**{name: torch.randn(2) for name in UNKNOWN}), LLAMA, to="interleaved")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.post_attention_layernorm.weight", "layers.0.attn_norm.weight", "h.0.ln_attn.bias",
        "model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.v_proj.qweight", "h.0.attn.masked_bias",
        "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.sinks", "h.0.attn.bias",
        "model.layers.0.mlp.gate_proj.weight", "model.embed_tokens.weight", "model.layers.0.mlp.experts.0.up.weight",
    ],
)  # fmt: skip
def test_names_that_are_neither_are_passed_through(name: str) -> None:
    weights = llama_weights(**{name: torch.randn(5)})
    assert convert_layout(weights, LLAMA, to="interleaved")[name] is weights[name]


@pytest.mark.parametrize(
    "tail",
    [
        "qweight", "qzeros", "scales", "g_idx", "SCB", "weight_scale", "weight_scale_inv", "weight_scale_2",
        "input_scale", "weight_packed", "weight_shape", "weight_zero_point", "weight_global_scale", "k_scale",
        "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.quant_state.bitsandbytes__nf4",
        "base_layer.weight.absmax",
    ],
)  # fmt: skip
def test_quantised_rows_are_refused_by_name(tail: str) -> None:
    with refuses(InputError, f"{K}.{tail}", "quantised"):
        convert_layout(llama_weights(**{f"{K}.{tail}": torch.randn(3)}), LLAMA, to="interleaved")


@pytest.mark.parametrize(
    ("config", "name", "shape"),
    [
        (LLAMA, f"{Q}.weight", (12, 24)),
        (LLAMA, f"{Q}.weight", (48, 24)),  # a gate beside each query, as in Qwen3-Next
        (LLAMA, f"{K}.weight", (24, 24)),
        (LLAMA, f"{K}.bias", ()),
        (LLAMA, "model.layers.0.self_attn.q_norm.weight", (12,)),
        (LLAMA, "model.layers.0.self_attn.k_norm.weight", (24,)),
        ({**LLAMA, "model_type": "phi3"}, "model.layers.0.self_attn.qkv_proj.weight", (72, 24)),
        ({**LLAMA, "model_type": "codegen", "rotary_dim": 4}, "h.0.attn.qkv_proj.weight", (48, 24)),
    ],
)
def test_rows_that_do_not_fit_the_configuration_are_refused(
    config: dict[str, Any], name: str, shape: tuple[int, ...]
) -> None:
    to: Any = "half" if config["model_type"] == "codegen" else "interleaved"
    with refuses(ShapeError, name, str(shape), "of 6 dimensions"):
        convert_layout({name: torch.zeros(shape)}, config, to=to)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "unheard of"}, ("unheard of", "not known", "source='half'")),
        ({"alibi": True, "model_type": "falcon"}, ("alibi",)),
        ({"model_type": "falcon"}, ("multi_query",)),
        ({"model_type": "phi"}, ("partial_rotary_factor",)),
        ({"model_type": "phi", "partial_rotary_factor": 0.5}, ("3 rotary dimensions",)),
        ({"model_type": "phi", "partial_rotary_factor": 1.5}, ("1.5", "at most 1")),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, ("0.5", "the whole head")),
        ({"model_type": "qwen3", "head_dim": None}, ("qwen3", "head_dim")),
        ({"per_layer_config": []}, ("per_layer_config=[]",)),
        ({"per_layer_config": {"0": 5}}, ("per_layer_config",)),
        ({"per_layer_config": {"first": {}}}, ("per_layer_config", "first")),
        ({"num_key_value_heads": 3}, ("4 query heads for 3",)),
        ({"num_attention_heads": None}, ("num_attention_heads",)),
        ({"attention_k_eq_v": True}, ("attention_k_eq_v",)),
        ({"rope_scaling": 3}, ("rope parameters 3",)),
        ({"model_type": "deepseek_v3", "qk_rope_head_dim": 4}, ("qk_nope_head_dim",)),
    ],
)
def test_a_configuration_that_does_not_say_enough_is_refused(config: dict[str, Any], words: tuple[str, ...]) -> None:
    facts = {**LLAMA, **config}
    weights = llama_weights()
    if config.get("model_type") == "falcon" and "alibi" not in config:
        weights = {"h.0.self_attention.query_key_value.weight": torch.zeros(36, 24)}
    to: Any = "half" if config.get("model_type") == "deepseek_v3" else "interleaved"
    with refuses(InputError, *words):
        convert_layout(weights, facts, to=to)


def test_layers_that_differ_need_their_number() -> None:
    small = MODELS["gemma4"]
    config = transformers.CONFIG_MAPPING[small.model_type](**{**SIZES, **small.options})
    with refuses(InputError, "without the number of its layer"):
        convert_layout({"self_attn.q_proj.weight": torch.zeros(48, 48)}, config, to="interleaved")


@pytest.mark.parametrize(("to", "source"), [("neox", None), ("half", "gptj"), (None, None)])
def test_layouts_have_two_names(to: Any, source: Any) -> None:
    with refuses(RangeError, "half", "interleaved"):
        convert_layout(llama_weights(), LLAMA, to=to, source=source)


def test_a_checkpoint_without_queries_and_keys_is_refused() -> None:
    with refuses(InputError, "no tensor of queries or keys"):
        convert_layout({"lm_head.weight": torch.zeros(3)}, LLAMA, to="interleaved")
    with refuses(InputError, "no tensor of queries or keys"):
        convert_layout({}, LLAMA, to="interleaved")
