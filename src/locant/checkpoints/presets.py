"""What published models say about position in their ``config.json``: the keys that matter here, and no others.

Facts, copied from the configurations as published; nothing is computed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["PRESETS"]

_PHI_3_SHORT = [
    1.1, 1.1, 1.1, 1.3000000000000003, 1.3500000000000003, 1.3500000000000003, 1.4000000000000004, 1.5500000000000005,
    *[2.000000000000001] * 17, *[2.0500000000000007] * 6, 2.1000000000000005, 2.1000000000000005, 2.1500000000000004,
    *[2.25] * 5, 2.3999999999999995, 2.4499999999999993, 2.499999999999999, 2.6999999999999984, 2.6999999999999984,
    2.7499999999999982, 2.799999999999998, 2.8999999999999977, 3.049999999999997,
]  # fmt: skip

_PHI_3_LONG = [
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

_FACTS: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "max_position_embeddings": 131072, "tie_word_embeddings": False,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "mistral-7b": {
        "model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "max_position_embeddings": 32768, "tie_word_embeddings": False,
        "rope_theta": 1000000.0,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "num_attention_heads": 28,
        "num_hidden_layers": 28, "max_position_embeddings": 32768, "tie_word_embeddings": False,
        "rope_theta": 1000000.0,
    },
    "qwen2-vl-7b": {
        "model_type": "qwen2_vl", "vocab_size": 152064, "hidden_size": 3584, "num_attention_heads": 28,
        "num_hidden_layers": 28, "max_position_embeddings": 32768, "tie_word_embeddings": False,
        "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
    "phi-2": {
        "model_type": "phi", "vocab_size": 51200, "hidden_size": 2560, "num_attention_heads": 32,
        "num_hidden_layers": 32, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "rope_theta": 10000.0, "partial_rotary_factor": 0.4,
    },
    "phi-3-mini-128k": {
        "model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072, "num_attention_heads": 32,
        "num_hidden_layers": 32, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "tie_word_embeddings": False, "rope_theta": 10000.0,
        "rope_scaling": {"type": "longrope", "short_factor": _PHI_3_SHORT, "long_factor": _PHI_3_LONG},
    },
    "gemma-3-4b": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2560, "num_attention_heads": 8,
        "head_dim": 256, "num_hidden_layers": 34, "max_position_embeddings": 131072, "tie_word_embeddings": True,
        "sliding_window": 1024, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_attention_heads": 128,
        "num_hidden_layers": 61, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "max_position_embeddings": 163840,
        "tie_word_embeddings": False, "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "num_attention_heads": 64,
        "head_dim": 64, "num_hidden_layers": 24, "max_position_embeddings": 131072, "tie_word_embeddings": False,
        "sliding_window": 128, "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "gpt-neox-20b": {
        "model_type": "gpt_neox", "vocab_size": 50432, "hidden_size": 6144, "num_attention_heads": 64,
        "num_hidden_layers": 44, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "rotary_pct": 0.25, "rotary_emb_base": 10000,
    },
    "gpt-j-6b": {
        "model_type": "gptj", "vocab_size": 50400, "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048,
        "rotary_dim": 64, "tie_word_embeddings": False,
    },
    "falcon-7b": {
        "model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544, "num_attention_heads": 71,
        "num_hidden_layers": 32, "max_position_embeddings": 2048, "alibi": False, "rope_theta": 10000.0,
    },
    "bloom-7b1": {
        "model_type": "bloom", "vocab_size": 250880, "hidden_size": 4096, "n_head": 32, "n_layer": 30,
        "seq_length": 2048,
    },
    "mpt-7b": {
        "model_type": "mpt", "vocab_size": 50432, "d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048,
        "attn_config": {"alibi": True, "alibi_bias_max": 8},
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    },
    "opt-1.3b": {
        "model_type": "opt", "vocab_size": 50272, "hidden_size": 2048, "num_attention_heads": 32,
        "num_hidden_layers": 24, "max_position_embeddings": 2048,
    },
    "bert-base": {
        "model_type": "bert", "vocab_size": 30522, "hidden_size": 768, "num_attention_heads": 12,
        "num_hidden_layers": 12, "max_position_embeddings": 512, "type_vocab_size": 2,
    },
    "roberta-base": {
        "model_type": "roberta", "vocab_size": 50265, "hidden_size": 768, "num_attention_heads": 12,
        "num_hidden_layers": 12, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1,
    },
    "deberta-v3-base": {
        "model_type": "deberta-v2", "vocab_size": 128100, "hidden_size": 768, "num_attention_heads": 12,
        "num_hidden_layers": 12, "max_position_embeddings": 512, "type_vocab_size": 0, "relative_attention": True,
        "position_biased_input": False, "pos_att_type": "p2c|c2p", "position_buckets": 256, "share_att_key": True,
        "max_relative_positions": -1, "norm_rel_ebd": "layer_norm",
    },
    "t5-base": {
        "model_type": "t5", "vocab_size": 32128, "d_model": 768, "d_kv": 64, "num_heads": 12, "num_layers": 12,
        "n_positions": 512, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
    },
}  # fmt: skip


class _Presets(Mapping[str, dict[str, Any]]):
    """Hands out copies: configuration classes write into the dictionaries that they are made of."""

    def __getitem__(self, name: str) -> dict[str, Any]:
        return copy.deepcopy(dict(_FACTS[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(_FACTS)

    def __len__(self) -> int:
        return len(_FACTS)


PRESETS: Mapping[str, dict[str, Any]] = _Presets()
"""By name. Qwen 2.5 is the instruction-tuned one; its base model says 131 072 positions."""
