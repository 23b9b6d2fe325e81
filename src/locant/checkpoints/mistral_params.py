"""Convert Mistral's own ``params.json`` to the configuration of `transformers` for the same model.

The file belongs to weights of Mistral's own code, in which the dimensions 2i and 2i + 1 form a pair. The weights for
`transformers` are the same, reordered into halves. vLLM reads this file in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

from locant.arguments import short_repr
from locant.errors import InputError
from locant.models.config_values import flag, integer, number

PARAMS = "params.json"
ORIGIN = "read_from"
"""An additional key, which names the file that a configuration was read from."""

KEYS = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "hidden_dim": "intermediate_size", "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings", "max_seq_len": "max_position_embeddings",
}  # fmt: skip
"""The keys of `transformers` by Mistral's names."""

SAME = ("head_dim", "vocab_size", "rope_theta", "max_position_embeddings")
YARN = {"factor": "factor", "beta": "beta_fast", "alpha": "beta_slow"}
TRAINED = "original_max_position_embeddings"
META = ("multiple_of", "ffn_dim_multiplier", "use_scaled_rope")
"""Keys of Meta's file of the same name, for Llama models."""

OTHER_FILE = "use the config.json of the same model"


def is_params(config: Mapping[str, Any]) -> bool:
    """Return whether this is the content of a ``params.json``, and not a configuration of `transformers`."""
    return "model_type" not in config and all(key in config for key in ("dim", "n_layers", "n_heads"))


def config_of_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of `transformers` for a ``params.json``. Its ``rope_interleave`` is true.

    Raises:
        InputError: the model does not have Mistral's dense or mixture architecture, or a value is wrong.

    >>> params = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "rope_theta": 1e6}
    >>> config = config_of_params(params)
    >>> config["model_type"], config["num_key_value_heads"], config["rope_interleave"]
    ('mistral', 8, True)
    """
    of_meta = [key for key in META if key in params]
    if of_meta:
        raise InputError(f"got a {PARAMS} of Meta's Llama, with {', '.join(of_meta)}", OTHER_FILE)
    if params.get("qk_nope_head_dim") or params.get("kv_lora_rank"):
        raise InputError(f"got a {PARAMS} of a model with multi-head latent attention", OTHER_FILE)
    config: dict[str, Any] = {
        "model_type": "mixtral" if params.get("moe") else "mistral",
        **{
            config_key: params[mistral_key]
            for mistral_key, config_key in KEYS.items()
            if params.get(mistral_key) is not None
        },
        **{key: params[key] for key in SAME if params.get(key) is not None},
        "rope_interleave": True,
        ORIGIN: PARAMS,
    }
    config |= _windows(params.get("sliding_window"), integer("n_layers", params["n_layers"]))
    if params.get("yarn"):
        rope = _yarn(params["yarn"])
        if "rope_theta" in config:
            rope["rope_theta"] = config.pop("rope_theta")
        config["rope_parameters"] = rope
    if params.get("llama_4_scaling"):
        config |= _with_temperature(config, params["llama_4_scaling"])
    return config


def _windows(window: object, num_layers: int) -> dict[str, Any]:
    """Return the keys for one window in all layers, or for a repeating list with null for full attention."""
    if not isinstance(window, list):
        return {"sliding_window": window}
    widths = {integer("sliding_window", width) for width in window if width is not None}
    if len(widths) > 1:
        raise InputError(f"got sliding_window={short_repr(window)}, expected one width", OTHER_FILE)
    types = ["full_attention" if width is None else "sliding_attention" for width in window]
    return {"sliding_window": next(iter(widths), None), "layer_types": [*islice(cycle(types), num_layers)]}


def _yarn(yarn: object) -> dict[str, Any]:
    if not isinstance(yarn, Mapping) or not {"factor", TRAINED} <= {*yarn}:
        raise InputError(f"got yarn={short_repr(yarn)}, expected a factor and {TRAINED}", f"copy {PARAMS} again")
    rope: dict[str, Any] = {"rope_type": "yarn", TRAINED: integer(TRAINED, yarn[TRAINED])}
    rope |= {
        config_key: number(mistral_key, yarn[mistral_key])
        for mistral_key, config_key in YARN.items()
        if yarn.get(mistral_key) is not None
    }
    if not flag("apply_scale", yarn.get("apply_scale", True)):
        rope["attention_factor"] = 1.0
    return rope


def _with_temperature(config: Mapping[str, Any], scaling: object) -> dict[str, Any]:
    """Return the keys of Ministral 3, whose queries grow with their position, in steps of the trained length."""
    rope = config.get("rope_parameters", {})
    if not isinstance(scaling, Mapping) or "beta" not in scaling or scaling.get(TRAINED, 0) != rope.get(TRAINED):
        got = f"got llama_4_scaling={short_repr(scaling)}, expected beta and the {TRAINED} of yarn"
        raise InputError(got, OTHER_FILE)
    beta = number("beta", scaling["beta"])
    return {"model_type": "ministral3", "rope_parameters": {**rope, "llama_4_scaling_beta": beta}}
