"""Models without positions: recurrent layers and convolutions see the order of their input and do not need positions.

Mamba and similar models read one token after the other. Jamba, Zamba and Nemotron-H also have attention, which sees
the order in the output of the recurrent layers. Every encoding here is `PositionEncoding` itself: NoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locant.models.architecture import Architecture
from locant.models.learned_tables import encoding_row
from locant.positions.base import PositionEncoding


def _without(warning: str, **row: Any) -> Architecture:
    return encoding_row(lambda config, _: PositionEncoding(), {}, warnings=(warning,), **row)


RECURRENT = "its layers are recurrent: they read one token after the other, and need no positions"
HYBRID = "its attention has no positions: it sees the order in the output of the recurrent layers before it"
CONVOLUTIONS = "its convolutions see the order of their input, and nothing is added to it"

MAMBA_130M = {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24}
JAMBA = {"vocab_size": 65536, "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}

ARCHITECTURES: Mapping[str, Architecture] = {
    "mamba": _without(RECURRENT, presets={"mamba-130m": MAMBA_130M}),
    **dict.fromkeys(("falcon_mamba", "mamba2", "rwkv", "xlstm"), _without(RECURRENT)),
    "jamba": _without(HYBRID, presets={"jamba-v0.1": JAMBA}),
    **dict.fromkeys(("nemotron_h", "zamba"), _without(HYBRID)),
    **dict.fromkeys(
        (
            "align_vision_model", "bit", "convnext", "convnextv2", "cvt", "dac", "dinov3_convnext", "efficientnet",
            "encodec", "fastspeech2_conformer_hifigan", "focalnet", "glpn", "hgnet_v2", "mobilenet_v1",
            "mobilenet_v2", "mobilevit", "mobilevitv2", "poolformer", "pp_lcnet", "pp_lcnet_v3", "pp_lcnet_v4",
            "pvt_v2", "regnet", "resnet", "rt_detr_resnet", "segformer", "speecht5_hifigan", "superpoint",
            "swiftformer", "textnet", "univnet",
        ),
        _without(CONVOLUTIONS),
    ),
}  # fmt: skip
