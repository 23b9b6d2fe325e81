"""What decides, in a model, whether a batch is right for it: where positions act, how many there are, who counts them.

Read off a configuration, and off the code of `transformers`, which ``tests/engines/test_batch_model.py`` runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from locant.arguments import shown
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
"""Without ``position_ids`` these count the ones of ``attention_mask``."""

COUNT_TOKENS = (
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet",
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""Without ``position_ids`` these count the tokens that are not ``pad_token_id``, on from the row after it."""

FIND_NO_DOCUMENTS = (
    *COUNT_THE_MASK, *COUNT_TOKENS, "albert", "bart", "bert", "bert-generation", "biogpt", "blenderbot",
    "blenderbot-small", "bloom", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "imagegpt", "led", "longt5",
    "m2m_100", "marian", "mbart", "mpt", "mt5", "mvp", "nllb-moe", "pegasus", "plbart", "rembert", "roc_bert", "t5",
    "trocr", "umt5", "xglm",
)  # fmt: skip
"""These make their mask without ``position_ids``: no id begins a document for them."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a model makes of a batch; ``None`` where it is not known.

    Args:
        name: its ``model_type``.
        absolute: whether the same tokens with larger ids give other outputs.
        first_id: the id of the first token of a text.
        longest: how many ids there are from 0 on.
        has_table: whether ids past the longest end in an error, and negative ones, too.
        counting: which tokens it counts where a batch has no ids.
        axes: how many ids a token has.
        finds_documents: whether it looks for documents in ids.
        attention: how its attention is computed, ``"sdpa"`` for one.
        rule: how it counts images.
        config: the whole configuration.
        doubt: why its positions are not known.
    """

    name: str = "the model"
    absolute: bool | None = None
    first_id: int = 0
    longest: int | None = None
    has_table: bool = False
    counting: Counting = "slots"
    axes: int | None = None
    finds_documents: bool | None = None
    attention: str | None = None
    rule: GridRule | None = None
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    doubt: str | None = None

    @property
    def is_given(self) -> bool:
        """Whether there is a model at all."""
        return bool(self.config)


def facts_of(model: Source | None) -> ModelFacts:
    """Read the facts about a model; about ``None`` there are none."""
    if model is None:
        return ModelFacts()
    config = _whole_config(model)
    text = config_dict(config)
    name = str(config.get("model_type") or text.get("model_type") or "the model")
    encoding, doubt = _encoding_or_doubt(config)
    rule = rule_of(name, config)
    kind = str(text.get("model_type", name))
    counting: Counting = "mask" if kind in COUNT_THE_MASK else "tokens" if kind in COUNT_TOKENS else "slots"
    first = encoding.offset if isinstance(encoding, Learned) and counting == "tokens" else 0
    return ModelFacts(
        name=name,
        absolute=None if encoding is None else "embed" in encoding.doors(),
        first_id=first,
        longest=_longest(encoding, text, first),
        has_table=isinstance(encoding, Learned),
        counting=counting,
        axes=AXES if rule is not None else None if encoding is None else encoding.num_axes,
        finds_documents=kind not in FIND_NO_DOCUMENTS,
        attention=_attention(model),
        rule=rule,
        config=config,
        doubt=doubt,
    )


def _whole_config(model: Source) -> Mapping[str, Any]:
    """The configuration with all its parts, as a dictionary."""
    if isinstance(model, (str, Path)):
        return read_source(model)
    config = getattr(model, "config", model)
    to_dict = getattr(config, "to_dict", None)
    values = to_dict() if callable(to_dict) else config
    if not isinstance(values, Mapping) or not values:
        got = f"got {shown(model)} for model, expected a model of transformers or its configuration"
        raise LocantError(got, "model='config.json', the folder of the model, or model.config")
    return values


def _encoding_or_doubt(config: Mapping[str, Any]) -> tuple[PositionEncoding | None, str | None]:
    """The encoding of a model, of its first kind of layers where they differ; or why there is none to be had."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of base and layout, which no batch depends on
        try:
            return encoding_from_config(config, allow_no_rotation=True), None
        except LocantError as error:
            first = error
        try:
            kinds = layer_types(config)
            return encoding_from_config(config, layer_type=next(iter(kinds)), allow_no_rotation=True), None
        except (LocantError, StopIteration):
            return None, first.cause


def _longest(encoding: PositionEncoding | None, text: Mapping[str, Any], first: int) -> int | None:
    """How many ids a table has rows for, or rotary positions are made for."""
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


def _attention(model: Source) -> str | None:
    """How attention is computed, of a model or a configuration object that says so."""
    config = getattr(model, "config", model)
    stated = getattr(config, "_attn_implementation", None)
    return stated if isinstance(stated, str) else None
