"""Architectures with remote code: widely used models whose code is stored with their weights, not in `transformers`.

Each row follows that code. If the code does something beyond the trained length that no row can express, a warning
states it.
"""

from __future__ import annotations

from collections.abc import Mapping

from locant.models.architecture import SHARE, Architecture, RotaryKeys, rotary_row, warn_if
from locant.models.config_values import HEADS, WIDTHS, Config, flag_at, number, required
from locant.models.gpt import PHI_3
from locant.positions.base import PositionEncoding
from locant.positions.encodings.alibi import ALiBi


def _chatglm(config: Config) -> Config:
    """Rewrite configurations of ChatGLM2 to GLM-4.

    They have a multiple of the base 10,000, half of each head, and a key for the layout.
    """
    rest = {key: value for key, value in config.items() if key not in ("rope_ratio", "original_rope")}
    base = 10_000.0 * number("rope_ratio", config.get("rope_ratio", 1.0), above=0)
    interleaved = flag_at(config, "original_rope", default=True)
    ropes = {"rope_theta": base, SHARE[0]: 0.5}
    return {"rope_parameters": ropes, "rope_interleave": interleaved, **rest}


def _baichuan(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Return ALiBi, or ``None`` for rotary positions in models of 7 billion parameters (by their width or class)."""
    names = config.get("architectures") or ()
    rotated = required(config, *WIDTHS) == 4096 or "BaiChuanForCausalLM" in names
    return None if rotated else ALiBi(required(config, *HEADS))


PAST_TRAINING = warn_if(
    lambda config, encoding: bool(
        config.get("seq_length") and (config.get("use_dynamic_ntk") or config.get("use_logn_attn"))
    ),
    "beyond its trained length (seq_length) its code raises the base in steps, and multiplies queries by a "
    "logarithm, but this encoding does not",
)
RATIO = warn_if(
    lambda config, encoding: getattr(encoding, "base", 1e4) != 1e4,
    "rope_ratio multiplies the base, as in ChatGLM3 and GLM-4; ChatGLM2-6B-32K divides positions by it: "
    "Linear(factor=rope_ratio)",
)
LIKE_LLAMA = rotary_row()
"""Rotary positions over whole heads, with the ``rope_theta`` of published configurations."""

QWEN_7B = {
    "vocab_size": 151936, "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "max_position_embeddings": 32768, "seq_length": 8192, "kv_channels": 128, "rotary_emb_base": 10000,
    "rotary_pct": 1.0, "use_dynamic_ntk": True, "use_logn_attn": True,
}  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    **dict.fromkeys(
        ("Emu3", "GOT", "internlm2", "mimo", "minicpmv", "nemotron-nas", "videollama3_qwen2"), LIKE_LLAMA
    ),
    **dict.fromkeys(("deepseek", "minicpm"), rotary_row(1e4)),
    "baichuan": Architecture(rotary=RotaryKeys(fixed_base=10_000.0), encoding=_baichuan),
    "chatglm": Architecture(
        rotary=RotaryKeys(
            layout="interleaved", interleave_key=True, head_dim_key="kv_channels", share_keys=SHARE, flat_keys=False,
            respell=_chatglm,
        ),
        warnings=(RATIO,),
    ),
    "minimax_m1": rotary_row(1e7, keys=RotaryKeys(share_keys=("rotary_dim",))),
    "phi4mm": rotary_row(1e4, 131072, keys=PHI_3),
    "qwen": rotary_row(
        keys=RotaryKeys(base_key="rotary_emb_base", head_dim_key="kv_channels", share_keys=("rotary_pct",)),
        warnings=(PAST_TRAINING,), presets={"qwen-7b": QWEN_7B},
    ),
    "stablelm_epoch": rotary_row(1e4, 4096, keys=RotaryKeys(share_keys=("rope_pct",))),
}  # fmt: skip
