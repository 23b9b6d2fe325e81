"""Configurations of encoders of images with biases: their encodings hold the weights of the models made from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locant import InputError, encoding_from_config
from locant.models import layer_types
from locant.positions.offset_bias import OffsetBias
from tests.refusal import refuses

SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [1, 1, 1], "num_heads": [2, 3, 4]}
VIT = {"image_size": 32, "patch_size": 4, "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}


def modules(config: Any, name: str) -> list[nn.Module]:
    """Those of a class, in the order of the layers of a model."""
    from transformers import AutoModel

    with torch.device("meta"):
        return [each for each in AutoModel.from_config(config).modules() if type(each).__name__ == name]


def fits(encoding: object, state: dict[str, Tensor], height: int, width: int) -> None:
    assert isinstance(encoding, OffsetBias)
    assert (encoding.height, encoding.width) == (height, width)
    assert {name: each.shape for name, each in encoding.named_parameters()} == {
        name: each.shape for name, each in state.items()
    }


def test_every_stage_of_swin_and_swin_v2() -> None:
    from transformers import SwinConfig, Swinv2Config

    config = SwinConfig(**SWIN, window_size=4)
    assert layer_types(config) == ("stage1", "stage2", "stage3")
    for stage, each in enumerate(modules(config, "SwinRelativePositionBias")):
        encoding = encoding_from_config(config, layer_type=f"stage{stage + 1}")
        fits(encoding, {"weight": each.relative_position_bias_table}, *each.window_size)  # type: ignore[dict-item]
    for trained in ([0, 0, 0], [4, 4, 2]):
        config = Swinv2Config(**SWIN, window_size=6, pretrained_window_sizes=trained)
        for stage, each in enumerate(modules(config, "Swinv2SelfAttention")):
            encoding = encoding_from_config(config, layer_type=f"stage{stage + 1}")
            first, _, last = each.continuous_position_bias_mlp  # type: ignore[misc]
            state = {"hidden.weight": first.weight, "hidden.bias": first.bias, "weight": last.weight}
            fits(encoding, state, *each.window_size)
            assert encoding.learned == (tuple(each.pretrained_window_size) if trained[0] else tuple(each.window_size))


def test_beit() -> None:
    from transformers import BeitConfig

    config = BeitConfig(**VIT, use_shared_relative_position_bias=True)
    (each,) = modules(config, "BeitRelativePositionBias")
    fits(encoding_from_config(config), {"weight": each.relative_position_bias_table}, 8, 8)  # type: ignore[dict-item]
    with refuses(InputError, "without a bias", "LearnedGrid"):
        encoding_from_config(BeitConfig(**VIT))


def test_global_and_windowed_layers_of_sam_and_vitdet() -> None:
    from transformers import SamVisionConfig, VitDetConfig

    sam = SamVisionConfig(**VIT, window_size=3, global_attn_indexes=[1])
    relative = {"use_relative_position_embeddings": True}
    vitdet = VitDetConfig(**VIT, **relative, window_size=3, window_block_indices=[0])
    for config, name in ((sam, "SamVisionSdpaAttention"), (vitdet, "VitDetAttention")):
        for kind, side, each in zip(("window", "global"), (3, 8), modules(config, name), strict=True):
            state = {"rows": each.rel_pos_h, "columns": each.rel_pos_w}
            fits(encoding_from_config(config, layer_type=kind), state, side, side)  # type: ignore[arg-type]
    plain = VitDetConfig(**VIT, **relative)
    assert layer_types(plain) == ()
    assert repr(encoding_from_config(plain)) == "DecomposedBias(head_dim=4, height=8, width=8)"
    with refuses(InputError, "use_relative_position_embeddings", "LearnedGrid"):
        encoding_from_config(VitDetConfig(**VIT))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"num_heads": 3}, "num_heads=3"), ({"num_heads": None}, "num_heads"), ({"window_size": "7"}, "window_size"),
        ({"pretrained_window_sizes": [6]}, "pretrained_window_sizes"), ({"patch_size": [4]}, "patch_size"),
    ],
)  # fmt: skip
def test_wrong_keys_are_named(change: dict[str, Any], what: str) -> None:
    config = {"model_type": "swinv2", **SWIN, "window_size": 4, **change}
    with refuses(InputError, what):
        encoding_from_config(config, layer_type="stage2")
