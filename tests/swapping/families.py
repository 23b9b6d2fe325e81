"""Every causal and masked language model of `transformers`, built tiny from its configuration, and swapped.

``python -m tests.swapping.families`` writes the page of the documentation that tells what became of each. Two
columns of it take longer, and are read from `compiled_and_sharded.json`, which a module of this name writes.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as auto

import locant
from locant.swapping.rotary_point import rotary_points
from tests.models.rotary_modules import folders, one_of_each_code
from tests.swapping.work import Work, adapted, called, generated, ids, of_bfloat16, packed, trained

__all__ = [
    "BESIDE_16", "LLAMA", "LONG", "LONG_WORKS", "SAME", "SCALINGS", "WORKS", "WRITTEN", "Family", "Outcome", "cells",
    "differences", "families", "one_of_each", "outcome", "page", "scaled", "telling", "tiny", "worked",
]  # fmt: skip

SIZES: dict[str, Any] = {
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "intermediate_size": 96, "ffn_dim": 96, "num_hidden_layers": 4,
    "n_layer": 4, "num_layers": 4, "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 99, "head_dim": 16, "max_position_embeddings": 128, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "q_lora_rank": 32,
    "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 1,
    "topk_group": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "shared_expert_intermediate_size": 32,
    "sliding_window": 8, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "embedding_size": 64, "type_vocab_size": 2,
    "entity_vocab_size": 99, "entity_emb_size": 64,
}  # fmt: skip
"""What every configuration is given of these keys, where it has them."""

LINEAR_FIRST = ["linear_attention", "full_attention"] * 2
WIDER_HEADS = {"layer_types": ["sliding_attention", "full_attention"] * 2,
               "per_layer_config": {1: {"head_dim": 32}, 3: {"head_dim": 32}}}  # fmt: skip
BIASED = ("t5", "mt5", "umt5", "switch_transformers", "longt5")
"""Models of an encoder and a decoder, with a bias by buckets of distances."""

OTHER: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2, "layer_types": LINEAR_FIRST, "num_key_value_heads": 4,
                       "mlp_layer_types": ["dense", "sparse"] * 2, "linear_num_heads": 4, "linear_head_dim": 16},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16},
    "blt": {"encoder_hash_byte_group_vocab": 99},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2}, "ffn_config": {"ffn_hidden_size": 64}, "n_heads": 4,
             "n_layers": 2, "max_seq_len": 128},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": 99, "mask_token_id": 98, "pad_token_id": 0, "position_embedding_type": "rotary"},
    "esmc": {"num_key_value_heads": 4},
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16,
                  "mamba_chunk_size": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 99},
    "gemma4_text": {"head_dim": 16, **WIDER_HEADS, "hidden_size_per_layer_input": 16,
                    "vocab_size_per_layer_input": 99},
    "gemma4_unified_text": {"head_dim": 16, **WIDER_HEADS, "hidden_size_per_layer_input": 16,
                            "vocab_size_per_layer_input": 99},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": LINEAR_FIRST, "mamba_n_heads": 8, "mamba_d_head": 16,
                         "position_embedding_type": "rope"},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mimo_v2_flash": {"head_dim": 128},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 2, "indexer_head_dim": 16, "indexer_budget": 8,
                       "indexer_compress_ratio": 2},
    **{kind: {"d_ff": 96, "num_decoder_layers": 4, "decoder_start_token_id": 0} for kind in BIASED},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "dots3_note_text": {"per_layer_config": {}, "num_attention_heads": 4, "num_key_value_heads": 4, "index_n_heads": 2,
                        "index_head_dim": 16},
    "neomme": {"per_layer_config": {}, "sliding_window": 8},
}  # fmt: skip
"""What single configurations need beside; ``None`` for a key that they are not to be given."""


@dataclass(frozen=True)
class Family:
    """One class of a model, by the name of its configuration."""

    model_type: str
    cls: str

    @property
    def id(self) -> str:
        return f"{self.model_type}-{self.cls}"


LLAMA = Family("llama", "LlamaForCausalLM")
WRITTEN = [LLAMA, Family("qwen2", "Qwen2ForCausalLM"), Family("gpt_neox", "GPTNeoXForCausalLM")]
"""Those that are tested with other encodings."""


def families() -> list[Family]:
    """All of them, with those that have no rotary positions."""
    of_both = {kind: auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[kind] for kind in BIASED}
    found = [
        Family(model_type, cls if isinstance(cls, str) else cls[0])
        for mapping in (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, of_both)
        for model_type, cls in mapping.items()
    ]
    return [*dict.fromkeys(found)]


def one_of_each() -> list[Family]:
    """The classes of one folder for each code of a rotation, and those with a bias by buckets."""
    folder_of = {family: getattr(transformers, family.cls).__module__.split(".")[2] for family in families()}
    rotating = [name for name in folders() if name in folder_of.values()]  # in one order, whatever the hash seed
    chosen = one_of_each_code(sorted(rotating, key=lambda name: name not in MOST_USED))
    return [family for family, folder in folder_of.items() if folder in chosen or family.model_type in BIASED]


MOST_USED = {"llama", "gemma3", "gpt_neox", "deepseek_v3", "modernbert"}


def tiny(family: Family, **options: Any) -> Any:
    """A model with some hundred thousand random weights."""
    cls = getattr(transformers, family.cls)
    kind = CONFIG_MAPPING[family.model_type]
    if cls.config_class is not None and not issubclass(kind, cls.config_class):  # the text part of several
        kind = cls.config_class
    default = kind()
    sizes = _sizes(default, OTHER.get(kind.model_type, {}))
    for name in kind.sub_configs or {}:
        part = getattr(default, name, None)
        if part is not None:
            sizes[name] = _sizes(part, OTHER.get(part.model_type, {}))
    torch.manual_seed(0)
    return cls(kind(**{**sizes, **options})).eval()


def telling(family: Family = LLAMA, **options: Any) -> Any:
    """Two layers in float64, with weights large enough that order shows."""
    model = tiny(family, **{"num_hidden_layers": 2, **options}).double()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 16},
}
OTHER_SCALINGS: dict[str, dict[str, Any]] = {"phimoe": {"short_mscale": 1.2, "long_mscale": 1.2}}
OF_A_SCALING = {*(key for keys in SCALINGS.values() for key in keys), "type", "beta_fast", "beta_slow", "truncate"}
FACTORS = {"short_factor": 1.0, "long_factor": 3.0}
BESIDE_16 = (16, 17, 64, 65)


def scaled(model: Any, scaling: str) -> Any:
    """Another of that class, trained at 16 tokens and stretched to 64."""
    widths = {kind: len(each.inv_freq) for kind, each in rotary_points(model, angles="float32")[0].own.items()}
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    nested = any(isinstance(each, Mapping) for each in text.rope_parameters.values())

    def stretched(rope: Any, kind: str | None) -> Any:
        if rope is None:
            return None
        rest = {key: value for key, value in rope.items() if key not in OF_A_SCALING}
        pairs = widths.get(kind, next(iter(widths.values())))
        factors = {name: [first + 0.1 * pair for pair in range(pairs)] for name, first in FACTORS.items()}
        other = OTHER_SCALINGS.get(text.model_type, {})
        return {**rest, "rope_type": scaling, **SCALINGS[scaling], **(factors | other if scaling == "longrope" else {})}

    ropes = text.rope_parameters
    text.rope_parameters = (
        {kind: stretched(rope, kind) for kind, rope in ropes.items()} if nested else stretched(ropes, None)
    )
    text.max_position_embeddings = 16 if scaling == "dynamic" else 64
    if scaling == "longrope":
        text.original_max_position_embeddings = 16
    torch.manual_seed(0)
    return type(model)(config).eval()


def differences(model: Any, lengths: Iterable[int]) -> dict[int, float]:
    """By how much its own encoding in float32 changes the logits of rows of these lengths, where it does at all."""
    rows, before = list[torch.Tensor](), list[torch.Tensor]()
    with torch.no_grad():
        for row in [(3 + torch.arange(length) % 90)[None] for length in lengths]:
            with suppress(IndexError):  # behind the last row of GPT-J's table of angles
                before.append(called(model, row).logits)
                rows.append(row)
        with locant.swap(model, angles="float32"):
            after = [called(model, row).logits for row in rows]
    pairs = zip(rows, before, after, strict=True)
    return {row.shape[1]: (y - x).abs().max().item() for row, x, y in pairs if not torch.equal(x, y)}


def _sizes(default: Any, other: dict[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in SIZES.items() if key not in other and _has(default, key)}
    if "kv_lora_rank" in given:  # latent attention
        given["num_key_value_heads"] = given["num_attention_heads"]
    return given | {key: value for key, value in other.items() if value is not None}


def _has(config: Any, key: str) -> bool:
    try:
        return getattr(config, key, None) is not None
    except (AttributeError, ValueError):
        return False


# ---------------------------------------------------------------------- what becomes of each

SAME, SHORT = "same bits", "✓"
BEYOND = (SIZES["sliding_window"] + 1, SIZES["max_position_embeddings"] + 12)
"""Lengths behind every one that the configurations name; `scaled` models name more."""
LONG = Path(__file__).with_name("compiled_and_sharded.json")
LONG_WORKS = {"torch.compile": "compiled", "FSDP2": "sharded"}
WORKS: dict[str, Work] = {
    "generation": generated,
    "packed": packed,
    "gradients": trained,
    "LoRA": adapted,
    "bfloat16": of_bfloat16,
}


@dataclass(frozen=True)
class Outcome:
    """``same bits``, ``differs``, ``refused`` or ``not built``, and why; of each work ``same bits`` or ``–``."""

    verdict: str
    why: str = ""
    works: tuple[str, ...] = ("",) * len(WORKS)


def outcome(family: Family, works: Collection[str] = tuple(WORKS)) -> Outcome:
    """What becomes of its logits, and where they stay the same, of each of these works."""
    try:
        model = tiny(family)
        swapped = locant.swap(model, angles="float32")
        swapped.undo()
        with torch.no_grad():
            before = called(model, ids()).logits
    except locant.LocantError as error:
        return Outcome("refused", _line(error.cause))
    except Exception as error:  # noqa: BLE001  # whatever a class of transformers raises is told in the table
        return Outcome("not built", _line(f"{type(error).__name__}: {error}"))
    with torch.no_grad(), locant.swap(model, angles="float32"):
        same = torch.equal(called(model, ids()).logits, before) and bool(before.isfinite().all())
    same = same and not differences(model, BEYOND)
    told = tuple(worked(model, work) if same and name in works else "" for name, work in WORKS.items())
    return Outcome(SAME if {SAME, *told} <= {SAME, "–", ""} and same else "differs", "", told)


def worked(model: Any, work: Work) -> str:
    """``same bits``, ``differs``, ``breaks``, or a dash for a model that cannot do it, swapped or not."""
    try:
        before = _seeded(copy.deepcopy(model), work)
    except Exception:  # noqa: BLE001  # a masked model does not generate, and a few know no checkpoints or LoRA
        return "–"
    swapped = copy.deepcopy(model)
    with locant.swap(swapped, angles="float32"):
        try:
            return SAME if torch.equal(_seeded(swapped, work), before) else "differs"
        except Exception:  # noqa: BLE001  # the table is to tell of it
            return "breaks"


def _seeded(model: Any, work: Work) -> torch.Tensor:
    """Dropout is the same in both."""
    torch.manual_seed(0)
    return work(model)


def _line(text: str) -> str:
    """Its first line, without what would end a cell of a table."""
    first = text.strip().splitlines()[0].strip().replace("|", "/").replace("`", "")
    return first if len(first) <= 140 else first[:139] + "…"


INTRODUCTION = """\
# Supported models: which transformers models swap can change

This page covers every class of `transformers` {version} for causal and masked language models. It also covers the
sequence-to-sequence classes that learn a bias in their attention as T5 does (ByT5 uses T5's class). Each model is
built tiny from its configuration, with random weights.

- *Same bits* (✓): with `locant.swap(model, angles="float32")` the logits are finite and bit for bit equal to the
  original. They are compared at 12 tokens, beyond the model's window, and beyond the longest sequence of its
  configuration.
- *Refused*: `swap` raises an error that states the reason, and changes nothing.
- *Not built*: the class could not be built that small, or does not run on token ids alone, so it was not tested.

The other columns compare in the same way:

- *generation*: the logits of six generated tokens, with a cache and left padding
- *packed*: the logits of two packed documents
- *gradients*: every gradient of a training step with activation checkpoints
- *LoRA*: every gradient of LoRA on all linear layers
- *bfloat16*: the logits with weights in bfloat16
- *torch.compile*: the logits if the whole model is one graph (`fullgraph=True`) whose operators run unchanged
  (`backend="eager"`)
- *FSDP2*: the logits and every gradient on two processes, with every layer sharded

A dash means that the class does not support this even without `swap`. An empty cell was not tested. Three families are
also tested with other encodings, against models written by hand.

This command runs all classes and writes this page. `make sweep` repeats the logits of every class, and one of the next
five columns in turn. `make test-slow` repeats these columns for one class of each type of rotation:

```sh
python -m tests.swapping.families
```

The columns `torch.compile` and FSDP2 were measured with torch {torch} and transformers {transformers}. `make test-slow`
repeats some of their rows. This command measures all of them in about twenty minutes of one core, and resumes if it was
stopped:

```sh
python -m tests.swapping.compiled_and_sharded
```

```text
{counts}
```

| configuration | class | logits | {works} |
|---|---|---|{rule}
"""

OTHERS = """
## Classes that are refused or not built

| configuration | class | verdict | why |
|---|---|---|---|
"""


def page(outcomes: Mapping[Family, Outcome]) -> str:
    """The page of the documentation."""
    long = json.loads(LONG.read_text(encoding="utf-8"))
    numbers = Counter(told.verdict for told in outcomes.values())
    works = sorted((*cells(family, told), *_long(long, family)) for family, told in outcomes.items() if not told.why)
    others = sorted((*cells(family, told)[:3], told.why) for family, told in outcomes.items() if told.why)
    return INTRODUCTION.format(
        version=transformers.__version__,
        counts=", ".join(f"{count} {verdict}" for verdict, count in numbers.most_common()),
        works=" | ".join([*WORKS, *LONG_WORKS]), rule="---|" * (len(WORKS) + len(LONG_WORKS)),
        **long["versions"],
    ) + _lines(works) + OTHERS + _lines(others)  # fmt: skip


def _lines(rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(SHORT if cell == SAME else cell for cell in row)} |\n" for row in rows)


def cells(family: Family, told: Outcome) -> tuple[str, ...]:
    """A row of the first table, without the columns that take longer."""
    return (family.model_type, family.cls, told.verdict, *told.works)


def _long(long: Mapping[str, Any], family: Family) -> list[str]:
    return [long[name].get(family.id, "") for name in LONG_WORKS.values()]


if __name__ == "__main__":
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    where = Path(__file__).resolve().parents[2] / "docs" / "guides" / "swapped-models.md"
    where.write_text(page({family: outcome(family) for family in families()}), encoding="utf-8")
