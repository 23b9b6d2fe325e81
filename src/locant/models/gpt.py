"""GPT-J, GPT-NeoX, gpt-oss, and Phi: most rotate a part of each head. Since Phi-3, Phi has LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping

from locant.models.architecture import SHARE, Architecture, RotaryKeys, rotary_row, warn_if
from locant.models.weights import (
    HeadRows,
    HeadShape,
    InputTables,
    group_by_group,
    key_rows,
    one_after_another,
    query_rows,
    value_rows,
)
from locant.positions.scaling import LongRoPE, YaRN


def _in_four_parts(shape: HeadShape) -> tuple[HeadRows, ...]:
    """Return CodeGen's order: four parts, one per accelerator, with queries, values and keys in each."""
    share = shape.queries // 4
    return (query_rows(shape, share), value_rows(shape, share), key_rows(shape, share)) * 4


ROUNDED_RAMP = warn_if(
    lambda config, encoding: isinstance(scaling := getattr(encoding, "scaling", None), YaRN) and scaling.truncate,
    "truncate is not false: released gpt-oss models have false, so their ramp is not rounded to whole pairs",
)
SHORT_FACTORS = warn_if(
    lambda config, encoding: isinstance(getattr(encoding, "scaling", None), LongRoPE),
    "transformers rotates phimoe with the short factors at every length, and never uses the long ones",
)

GPT_J = RotaryKeys(layout="interleaved", fixed_base=10_000.0, share_keys=("rotary_dim",))
GPT_NEOX = RotaryKeys(base_key="rotary_emb_base", share_keys=("rotary_pct",))
PHI_3 = RotaryKeys(share_keys=SHARE, rope_types={"su": "longrope", "yarn": "longrope"}, trained_beside=4096)

GPT_J_TABLES = InputTables(tokens="wte", padding=False, dropout_key="embd_pdrop")
GPT_NEOX_TABLES = InputTables(tokens="embed_in", padding=False, dropout_key="hidden_dropout")

GPT_J_6B = {
    "vocab_size": 50400, "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048, "rotary_dim": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
GPT_NEOX_20B = {
    "vocab_size": 50432, "hidden_size": 6144, "num_attention_heads": 64, "num_hidden_layers": 44,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "rotary_pct": 0.25, "rotary_emb_base": 10000,
}  # fmt: skip
GPT_OSS_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
GPT_OSS_DEFAULTS = {
    "head_dim": 64, "max_position_embeddings": 131072, "rope_parameters": {**GPT_OSS_YARN, "rope_theta": 150000.0},
}  # fmt: skip
GPT_OSS_20B = {
    "vocab_size": 201088, "hidden_size": 2880, "num_attention_heads": 64, "head_dim": 64, "num_hidden_layers": 24,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "sliding_window": 128, "rope_theta": 150000,
    "rope_scaling": GPT_OSS_YARN,
}  # fmt: skip

PHI_3_SHORT = [
    1.1, 1.1, 1.1, 1.3000000000000003, 1.3500000000000003, 1.3500000000000003, 1.4000000000000004, 1.5500000000000005,
    *[2.000000000000001] * 17, *[2.0500000000000007] * 6, 2.1000000000000005, 2.1000000000000005, 2.1500000000000004,
    *[2.25] * 5, 2.3999999999999995, 2.4499999999999993, 2.499999999999999, 2.6999999999999984, 2.6999999999999984,
    2.7499999999999982, 2.799999999999998, 2.8999999999999977, 3.049999999999997,
]  # fmt: skip

PHI_3_LONG = [
    1.0700000524520874, 1.1200000047683716, 1.149999976158142, 1.4199999570846558, 1.5699999332427979,
    1.7999999523162842, 2.129999876022339, 2.129999876022339, 3.009999990463257, 5.910000324249268, 6.950000286102295,
    9.070000648498535, 9.930000305175781, 10.710000038146973, 11.130000114440918, 14.609999656677246,
    15.409998893737793, 19.809999465942383, 37.279998779296875, 38.279998779296875, 38.599998474121094,
    40.12000274658203, 46.20000457763672, 50.940006256103516, 53.66000747680664, 54.9373893737793, 56.89738845825195,
    57.28738784790039, 59.98738479614258, 60.86738586425781, 60.887386322021484, 61.71739196777344, 62.91739273071289,
    62.957393646240234, 63.41739273071289, 63.8173942565918, 63.83739471435547, 63.897396087646484, 63.93739700317383,
    64.06739807128906, 64.11434936523438, 64.12435150146484, 64.15435028076172, 64.19435119628906, 64.24435424804688,
    64.57435607910156, 64.69000244140625, 64.76000213623047,
]  # fmt: skip

PHI_2 = {
    "vocab_size": 51200, "hidden_size": 2560, "num_attention_heads": 32, "num_hidden_layers": 32,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "rope_theta": 10000.0, "partial_rotary_factor": 0.4,
}  # fmt: skip

PHI_3_MINI_128K = {
    "vocab_size": 32064, "hidden_size": 3072, "num_attention_heads": 32, "num_hidden_layers": 32,
    "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "tie_word_embeddings": False,
    "rope_theta": 10000.0, "rope_scaling": {"type": "longrope", "short_factor": PHI_3_SHORT, "long_factor": PHI_3_LONG},
}  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "gptj": Architecture(
        rotary=GPT_J, defaults={"n_positions": 2048, "rotary_dim": 64}, inputs=GPT_J_TABLES,
        presets={"gpt-j-6b": GPT_J_6B}, vllm=True,
    ),
    "codegen": Architecture(
        rotary=GPT_J, defaults={"n_positions": 2048, "rotary_dim": 64}, inputs=GPT_J_TABLES,
        projections={"qkv_proj": _in_four_parts},
    ),
    "gpt_neox": Architecture(
        rotary=GPT_NEOX, inputs=GPT_NEOX_TABLES,
        defaults={"rotary_emb_base": 10000.0, "rotary_pct": 0.25, "max_position_embeddings": 2048},
        projections={"query_key_value": group_by_group}, presets={"gpt-neox-20b": GPT_NEOX_20B}, vllm=True,
    ),
    "openai_privacy_filter": Architecture(rotary=RotaryKeys(layout="interleaved"), defaults=GPT_OSS_DEFAULTS),
    "gpt_oss": Architecture(
        rotary=RotaryKeys(), full_attention_every=2, defaults=GPT_OSS_DEFAULTS, warnings=(ROUNDED_RAMP,),
        presets={"gpt-oss-20b": GPT_OSS_20B}, vllm=True,
    ),
    "phi": rotary_row(1e4, 2048, None, 0.5, presets={"phi-2": PHI_2}, vllm=True),
    "phi3": rotary_row(
        1e4, 4096, keys=PHI_3, projections={"qkv_proj": one_after_another},
        presets={"phi-3-mini-128k": PHI_3_MINI_128K}, extend_methods=("ntk", "longrope"), vllm=True,
    ),
    "phi4_multimodal": rotary_row(1e4, 131072, keys=PHI_3),
    "phimoe": rotary_row(
        1e6, 131072, keys=RotaryKeys(weighted_longrope=True), warnings=(SHORT_FACTORS,),
        extend_methods=("ntk", "longrope"), vllm=True,
    ),
    "persimmon": rotary_row(1e4, 16384, None, 0.5, projections={"query_key_value": group_by_group}, vllm=True),
}  # fmt: skip
