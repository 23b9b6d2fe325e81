"""Small models with n-gram tables, as `transformers` has them, and the published formulas in plain Python."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import BltConfig, BltModel, Qwen4ExpTextConfig, Qwen4ExpTextModel

__all__ = ["BLT", "ENGRAM", "LONGCAT", "QWEN", "blt", "engram_rows", "longcat_rows", "qwen"]

QWEN: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "ple_layer_ids": [1, 3], "ngram_vocab_size_base": 50,
    "heads_per_ngram": 2, "eos_token_id": 5, "split_ngram_parts": 4, "ple_embed_dim": 24, "hc_count": 3,
    "layer_types": [*["linear_attention"] * 3, "indexed_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1,
    "indexer_head_dim": 64, "indexer_budget": 8, "indexer_compress_ratio": 2, "head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "hc_lowrank": 8, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    },
}  # fmt: skip
PART = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1,
        "intermediate_size": 16, "vocab_size": 260, "head_dim": 8}  # fmt: skip
BLT: dict[str, Any] = {
    "encoder_config": PART, "decoder_config": PART, "global_config": {**PART, "hidden_size": 32},
    "patcher_config": PART, "encoder_hash_byte_group_vocab": 101, "encoder_hash_byte_group_nb_functions": 3,
    "encoder_hash_byte_group_size": [3, 1, 8],
}  # fmt: skip
ENGRAM: dict[str, Any] = {
    "model_type": "deepseek_v41", "vocab_size": 61, "hidden_size": 8, "engram_layer_ids": [1, 14],
    "engram_max_ngram_size": 4, "engram_vocab_size": 50, "engram_n_heads": 3, "engram_head_dim": 4,
    "engram_pad_token_id": 2, "engram_compressed_vocab_size": 61, "hc_mult": 2,
}  # fmt: skip
LONGCAT: dict[str, Any] = {
    "model_type": "longcat_flash", "vocab_size": 61, "hidden_size": 24, "ngram_vocab_size_ratio": 3,
    "emb_neighbor_num": 4, "emb_split_num": 2, "eos_token_id": 3,
}  # fmt: skip


def _random(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model.eval()


def qwen() -> Qwen4ExpTextModel:
    return _random(Qwen4ExpTextModel(Qwen4ExpTextConfig(**QWEN)))  # type: ignore[return-value]


def blt() -> BltModel:
    return _random(BltModel(BltConfig(**BLT)))  # type: ignore[return-value]


def engram_rows(row: list[int], place: int, numbers: int, pad: int) -> list[list[int]]:
    """The rows of one text in the table of the `place`-th layer, as the Engram paper and its demonstration have them.

    Of each order the heads have the next primes that no other head has. A token before the text is `pad`.
    """
    layers, heads, low = ENGRAM["engram_layer_ids"], ENGRAM["engram_n_heads"], ENGRAM["engram_vocab_size"]
    orders = range(2, ENGRAM["engram_max_ngram_size"] + 1)
    free = [n for n in range(low, 2_000) if all(n % d for d in range(2, int(n**0.5) + 1))]
    sizes = [{order: [free.pop(0) for _ in range(heads)] for order in orders} for _ in layers][place]
    bound = max(1, (2**63 - 1) // numbers // 2)
    random = np.random.default_rng(10_007 * layers[place])
    multipliers = random.integers(low=0, high=bound, size=max(orders), dtype=np.int64) * 2 + 1
    offsets = [0, *itertools.accumulate(size for order in orders for size in sizes[order])]
    rows = list[list[int]]()
    for end in range(len(row)):
        tokens = [row[end - back] if end >= back else pad for back in range(max(orders))]
        products = np.array(tokens, dtype=np.int64) * multipliers
        hashes = [np.bitwise_xor.reduce(products[:order]) % size for order in orders for size in sizes[order]]
        rows.append([int(each) + offset for each, offset in zip(hashes, offsets[:-1], strict=True)])
    return rows


def longcat_rows(row: list[int]) -> list[list[int]]:
    """The rows of one text in LongCat: the number whose digits are the last ids, in the base of the vocabulary."""
    base, splits, eos = LONGCAT["vocab_size"], LONGCAT["emb_split_num"], LONGCAT["eos_token_id"]
    rows = list[list[int]]()
    for end in range(len(row)):
        found, offset = list[int](), 0
        for column, order in enumerate(o for o in range(2, LONGCAT["emb_neighbor_num"] + 1) for _ in range(splits)):
            size = LONGCAT["ngram_vocab_size_ratio"] * base + 2 * column + 1
            first = max([0, end - order + 1, *(place + 1 for place in range(end) if row[place] == eos)])
            number = sum(row[place] * base ** (end - place) for place in range(first, end + 1))
            found.append(number % size + offset)
            offset += size
        rows.append(found)
    return rows
