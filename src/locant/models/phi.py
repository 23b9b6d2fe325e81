"""Phi and Persimmon: a part of each head is rotated; from Phi-3 on, LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping

from locant.models.architecture import SHARE, Architecture, RotaryKeys, rotary_row
from locant.models.config_values import Config
from locant.models.weights import group_by_group, one_after_another
from locant.positions.base import PositionEncoding
from locant.positions.scaling import LongRoPE

__all__ = ["ARCHITECTURES"]


def _short_factors_of_phimoe(config: Config, encoding: PositionEncoding) -> str | None:
    if not isinstance(getattr(encoding, "scaling", None), LongRoPE):
        return None
    return "transformers rotates phimoe with the short factors at every length, and never takes the long ones"


PHI_3 = RotaryKeys(share_keys=SHARE, rope_types={"su": "longrope", "yarn": "longrope"})

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
    "phi": rotary_row(1e4, 2048, None, 0.5, presets={"phi-2": PHI_2}, vllm=True),
    "phi3": rotary_row(
        1e4, 4096, keys=PHI_3, projections={"qkv_proj": one_after_another},
        presets={"phi-3-mini-128k": PHI_3_MINI_128K}, extend_methods=("ntk", "longrope"), vllm=True,
    ),
    "phi4_multimodal": rotary_row(1e4, 131072, keys=PHI_3),
    "phimoe": rotary_row(
        1e6, 131072, keys=RotaryKeys(weighted_longrope=True), warnings=(_short_factors_of_phimoe,),
        extend_methods=("ntk", "longrope"), vllm=True,
    ),
    "persimmon": rotary_row(1e4, 16384, None, 0.5, projections={"query_key_value": group_by_group}, vllm=True),
}  # fmt: skip
