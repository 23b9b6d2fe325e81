"""The facts that decide whether a batch fits a model: how the model uses, limits and counts positions.

They come from the configuration and from the code of `transformers`, which ``tests/engines/test_batch_model.py`` runs.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from locant.arguments import short_repr
from locant.checkpoints.config_source import read_source
from locant.engines.batches.grid_rules import GridRule, rule_of
from locant.errors import LocantError
from locant.models.config_values import LENGTHS, config_dict, value_at
from locant.models.encodings import encoding_from_config, layer_types
from locant.positions.base import PositionEncoding
from locant.positions.batches import AXES
from locant.positions.encodings.learned import Learned
from locant.positions.encodings.rotary import Rotary

Source = object
"""A model of `transformers`, its configuration as an object or a dictionary, its folder, or the name of a preset."""

Counting = Literal["slots", "mask", "tokens"]

COUNT_THE_MASK = ("opt",)
"""Models that count the ones of ``attention_mask`` if there are no ``position_ids``."""

COUNT_TOKENS = (
    "altclip_text_model", "bridgetower_text_model", "camembert", "clap_text_model", "data2vec-text", "esm", "ibert",
    "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""Models that count all tokens but padding if there are no ``position_ids``, beginning with ``pad_token_id + 1``."""

READ_ROWS = (*COUNT_TOKENS, "mra", "nystromformer", "yoso")
"""Models whose ``position_ids`` are row numbers of the position table. Its first rows do not belong to positions."""

ENCODER_DECODERS = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "fsmt", "led", "longt5", "m2m_100", "marian", "mbart",
    "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet", "switch_transformers", "t5", "udop",
    "umt5",
)  # fmt: skip

TAKE_NO_IDS = (
    *ENCODER_DECODERS, "bloom", "cpmant", "dpr", "falcon_mamba", "funnel", "lxmert", "mamba", "mamba2", "mpt",
    "roformer", "rwkv", "trocr", "xlnet", "xlstm",
)  # fmt: skip
"""Models whose ``forward`` has no ``position_ids``."""

ENCODERS = (
    *COUNT_TOKENS, *ENCODER_DECODERS, "albert", "bert", "big_bird", "bros", "canine", "convbert", "deberta",
    "deberta-v2", "distilbert", "dpr", "electra", "ernie", "esmc", "eurobert", "flaubert", "fnet", "funnel", "gte",
    "jina_embeddings_v3", "layoutlm", "lxmert", "megatron-bert", "mobilebert", "modernbert", "mra", "nomic_bert",
    "nystromformer", "rembert", "roc_bert", "roformer", "splinter", "squeezebert", "tapas", "visual_bert", "xlm",
    "yoso",
)  # fmt: skip
"""Models whose tokens see later tokens unless ``is_decoder`` is set. They do not look for documents in position ids."""

FIND_NO_DOCUMENTS = (
    *COUNT_THE_MASK, *ENCODERS, *TAKE_NO_IDS, "bert-generation", "biogpt", "granitemoehybrid", "imagegpt",
    "openai-gpt", "xglm",
)  # fmt: skip
"""Models that make their mask without ``position_ids``, so ids that restart do not separate documents."""

MAKE_THEIR_OWN_MASK = ("deberta", "deberta-v2")
"""Models that do not support a 4-D mask that separates documents."""

CARRY_STATE = (
    "falcon_mamba", "jamba", "mamba", "minimax", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zaya",
)  # fmt: skip
"""Models whose layers always carry a state or a convolution across documents."""

READ_SEQ_IDX = (
    "bailing_hybrid", "bamba", "falcon_h1", "glm5_next_text", "granitemoehybrid", "inkling2_text", "inkling_text",
    "kimi_linear", "lara_mini", "lfm2", "lfm2_moe", "lfm3", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "zamba2",
)  # fmt: skip
"""Models whose layers carry a state across documents, unless ``seq_idx`` numbers the documents."""

NOT_LEFT_TO_RIGHT = ("dream", "llada", "llada_moe", "xlnet")
"""Language models that do not generate from left to right."""

PREFIX_MODELS = ("colpali", "gemma3", "gemma3n", "gemma4", "git", "paligemma", "pi0", "shieldgemma2")
"""Models in which tokens of a prompt or of an image see later tokens."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts about a model that matter for a batch. A fact is ``None`` if it is unknown.

    Args:
        name: its ``model_type``.
        adds_positions: whether its outputs change if all position ids grow by the same number.
        first_id: the position id of the first token of a text.
        num_ids: the number of position ids, counted from 0.
        has_table: whether it has a table of positions, so that larger ids and negative ids cause an error.
        counting: the tokens that it counts if a batch has no position ids.
        axes: the number of position ids of a token.
        finds_documents: whether it looks for documents in position ids.
        takes_ids: whether its ``forward`` has ``position_ids``.
        takes_blocks: whether a 4-D mask separates documents.
        reads_seq_idx: ``True`` if its layers carry a state from token to token unless there are ``seq_idx``, ``False``
            if they always do, or ``None`` if they carry no state.
        is_causal: whether tokens do not see later tokens.
        sees_prefix: whether tokens of a prompt or of an image see later tokens although the model is causal.
        makes_cache: whether it makes a cache by default.
        attention: its attention implementation, such as ``"sdpa"``.
        rule: the rule by which it numbers images.
        config: the whole configuration.
        doubt: why its positions are unknown.
    """

    name: str = "the model"
    adds_positions: bool | None = None
    first_id: int = 0
    num_ids: int | None = None
    has_table: bool = False
    counting: Counting = "slots"
    axes: int | None = None
    finds_documents: bool | None = None
    takes_ids: bool | None = None
    reads_seq_idx: bool | None = None
    takes_blocks: bool | None = None
    is_causal: bool | None = None
    sees_prefix: bool = False
    makes_cache: bool = True
    attention: str | None = None
    rule: GridRule | None = None
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    doubt: str | None = None

    @property
    def mixing_remedy(self) -> str:
        """The remedy if the model mixes the documents of a row."""
        if self.reads_seq_idx:
            return "give seq_idx and cu_seq_lens_q of the documents, or put each document into its own row"
        if self.reads_seq_idx is False or self.takes_blocks is False:
            return "put each document into its own row"
        return "give an attention_mask of four axes that shows each document only itself"

    @property
    def is_known(self) -> bool:
        """Return whether these facts are about a model. If not, all have their defaults."""
        return bool(self.config)


def facts_of(model: Source | None) -> ModelFacts:
    """Return the facts about a model, or the defaults for ``None``."""
    if model is None:
        return ModelFacts()
    config = _whole_config(model)
    text = config_dict(config)
    name = str(config.get("model_type") or text.get("model_type") or "the model")
    encoding, doubt = _encoding_or_doubt(config)
    rule = rule_of(name, config)
    kind = str(text.get("model_type", name))
    counting: Counting = "mask" if kind in COUNT_THE_MASK else "tokens" if kind in COUNT_TOKENS else "slots"
    takes_ids = _takes_ids(model, kind)
    first = encoding.offset if isinstance(encoding, Learned) and kind in READ_ROWS else 0
    return ModelFacts(
        name=name,
        adds_positions=None if encoding is None else "embed" in encoding.methods(),
        first_id=first,
        num_ids=_num_ids(encoding, text, first),
        has_table=isinstance(encoding, Learned),
        counting=counting,
        axes=AXES if rule is not None else None if encoding is None else encoding.num_axes,
        finds_documents=takes_ids and kind not in FIND_NO_DOCUMENTS,
        takes_ids=takes_ids,
        takes_blocks=takes_ids and kind not in MAKE_THEIR_OWN_MASK,
        reads_seq_idx=None if _is_attention_alone(text) else _reads_seq_idx(kind),
        is_causal=_is_causal(kind, config, text, encoding),
        sees_prefix=name in PREFIX_MODELS,
        makes_cache=text.get("use_cache") is not False,
        attention=_attention(model),
        rule=rule,
        config=config,
        doubt=doubt,
    )


def _whole_config(model: Source) -> Mapping[str, Any]:
    """Return the configuration with all its parts, as a dictionary."""
    if isinstance(model, (str, Path)):
        return read_source(model)
    config = getattr(model, "config", model)
    to_dict = getattr(config, "to_dict", None)
    values = to_dict() if callable(to_dict) else config
    if not isinstance(values, Mapping) or not values:
        got = f"got {short_repr(model)} for model, expected a model of transformers or its configuration"
        raise LocantError(got, "model='config.json', the folder of the model, or model.config")
    return values


def _encoding_or_doubt(config: Mapping[str, Any]) -> tuple[PositionEncoding | None, str | None]:
    """Return the encoding of a model, or the reason why it is unknown.

    If a model has several encodings, return the encoding that is added to the token embeddings. If none is added,
    return the encoding of the first kind of layers.
    """
    encodings, doubt = dict[str | None, PositionEncoding](), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they concern base and layout, which do not matter for a batch
        for kind in (None, *_layer_types(config)):
            try:
                encodings[kind] = encoding_from_config(config, layer_type=kind, allow_no_rotation=True)
            except LocantError as error:
                doubt = doubt or error.cause
    added = (each for each in encodings.values() if "embed" in each.methods())
    encoding = next(added, None) or next(iter(encodings.values()), None)
    return encoding, doubt if encoding is None else None


def _layer_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    try:
        return layer_types(config)
    except LocantError:
        return ()


def _num_ids(encoding: PositionEncoding | None, text: Mapping[str, Any], first: int) -> int | None:
    """Return the number of position ids that a model supports, or ``None`` if it is unknown.

    The limit is the end of a learned table, or the longest sequence that a rotary encoding is made for.
    """
    if isinstance(encoding, Learned):
        return first + encoding.max_seq_len
    if not isinstance(encoding, Rotary):
        return None
    stated = value_at(text, *LENGTHS)
    reach = [stated] if isinstance(stated, int) else []
    scaling = encoding.scaling
    trained, factor = (getattr(scaling, name, None) for name in ("original_max_seq_len", "factor"))
    if factor is not None and (trained or reach):
        reach.append(int(factor * (trained or reach[0])))
    return max(reach, default=None)


def _takes_ids(model: Source, kind: str) -> bool:
    """Return whether a model has ``position_ids`` as an argument, by its ``forward`` or by its model type."""
    names = set[str]()
    for module in (model, getattr(model, "base_model", None)):
        forward = getattr(module, "forward", None)
        names |= inspect.signature(forward).parameters.keys() if callable(forward) else set()
    return "position_ids" in names if "input_ids" in names else kind not in TAKE_NO_IDS


def _reads_seq_idx(kind: str) -> bool | None:
    return True if kind in READ_SEQ_IDX else False if kind in CARRY_STATE else None


def _is_attention_alone(text: Mapping[str, Any]) -> bool:
    """Return whether all layers in the configuration are attention layers. This is possible even in hybrid models."""
    kinds = text.get("layer_types") or text.get("layers_block_type") or ()
    return bool(kinds) and {*map(str, kinds)} <= {"attention", "full_attention", "sliding_attention"}


def _is_causal(
    kind: str, config: Mapping[str, Any], text: Mapping[str, Any], encoding: PositionEncoding | None
) -> bool | None:
    """Return whether tokens do not see later tokens, or ``None`` if this is unknown."""
    if kind in ENCODERS or text.get("is_causal") is False or text.get("use_bidirectional_attention") is True:
        return bool(text.get("is_decoder"))
    if config.get("is_encoder_decoder"):
        return False
    architectures = [str(name) for name in config.get("architectures") or ()]
    if kind.lower() in NOT_LEFT_TO_RIGHT or any(name.endswith("ForMaskedLM") for name in architectures):
        return None
    named = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)
    return True if named or encoding is not None else None


def _attention(model: Source) -> str | None:
    """Return the attention implementation of a model or a configuration object, or ``None``."""
    config = getattr(model, "config", model)
    stated = getattr(config, "_attn_implementation", None)
    return stated if isinstance(stated, str) else None
