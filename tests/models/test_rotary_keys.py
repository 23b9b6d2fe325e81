"""What the table says of an architecture is what its code in `transformers` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

from locant import Rotary
from locant.models.config_values import config_dict
from locant.models.rope_parameters import ropes_by_layer
from tests.models.configurations import ROTARY_KEYS

NOT_IN_TRANSFORMERS = {"kimi_k2"}
"""Runs DeepSeek-V3's modeling code, shipped with its weights."""

IN_TRANSFORMERS = sorted(ROTARY_KEYS.keys() - NOT_IN_TRANSFORMERS)
CODED = [name for name in IN_TRANSFORMERS if ROTARY_KEYS[name].fixed_base is None]
"""Those whose rotary positions are configured at all."""


TINY: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "head_dim": 16,
    "vocab_size": 32, "intermediate_size": 8, "intermediate_size_mlp": 8, "moe_intermediate_size": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 4,
    "global_head_dim": 16, "layer_types": ["full_attention"], "no_rope_layers": [1],
}  # fmt: skip
"""One layer of any architecture; most have no use for some of these."""


def output(model_type: str, **options: Any) -> Tensor:
    """What one layer with random weights makes of nine tokens."""
    sizes = {key: value for key, value in TINY.items() if model_type != "falcon" or key != "head_dim"}
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **{**sizes, **options}), attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        return model.eval()(torch.arange(3, 12)[None]).last_hidden_state


def reads(model_type: str, key: str) -> bool:
    """Whether the code turns another part of the head where this key says another share."""
    try:
        return not torch.equal(output(model_type, **{key: 0.25}), output(model_type, **{key: 0.75}))
    except RuntimeError as error:
        if "must match the size" in str(error):  # its tables are narrower, and the heads that they turn are not
            return False
        raise


@pytest.mark.parametrize("model_type", [name for name in CODED if "vl" not in name])
def test_a_share_is_read_where_the_code_turns_a_part_of_the_head(model_type: str) -> None:
    for key in ("partial_rotary_factor", "rotary_pct"):
        assert reads(model_type, key) == (key in ROTARY_KEYS[model_type].share_keys)


FLAT: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "qk_rope_head_dim": 32, "num_hidden_layers": 4,
    "max_position_embeddings": 4096, "sliding_window": 512,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0}


def flat(model_type: str, rope: dict[str, Any]) -> dict[str, Any]:
    """A configuration in the form before transformers 5, with everything that this architecture has to be told."""
    keys = ROTARY_KEYS[model_type]
    bases = {key: 500_000.0 for key in keys.base_keys if key != "rope_theta" or keys.base_key == "rope_theta"}
    shares = dict.fromkeys(keys.share_keys[:1], 0.5)
    own = {key: value for key, value in FLAT.items() if model_type != "falcon" or key != "head_dim"}
    sections = {"mrope_section": [4, 6, 6]} if keys.default_sections else {}
    return {"model_type": model_type, **own, **bases, **shares, "rope_scaling": {**rope, **sections}}


NO_OLDER_FORM = {"gemma4_text"}
PHI = {"phi3", "phimoe"}
"""They take no linear scaling."""


@pytest.mark.parametrize("model_type", [name for name in CODED if name not in NO_OLDER_FORM])
def test_a_scaling_of_the_older_form_acts_on_the_layers_that_transformers_scales(model_type: str) -> None:
    facts = flat(model_type, {"rope_type": "default"} if model_type in PHI else LINEAR)
    theirs = AutoConfig.for_model(**flat(model_type, facts["rope_scaling"]))
    kinds, other_kinds = (ropes_by_layer(config_dict(one), ROTARY_KEYS[model_type]) or {} for one in (facts, theirs))
    assert set(kinds) == set(other_kinds)
    for kind in kinds or (None,):
        ours, other = (Rotary.from_config(one, layer_type=kind) for one in (facts, theirs))
        for field in ("head_dim", "base", "scaling", "layout", "rotary_dim", "sections"):
            assert getattr(ours, field) == getattr(other, field), (kind, field)
