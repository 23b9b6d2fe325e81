"""What do n-grams and per-layer embeddings cost beside a token table, in time and in memory?

The peers are `torch.nn.Embedding` and, for the parts of the layers, the code of `transformers`. A square matrix shows
what a model does for each token anyway. All tables are in memory and in float32. The model is small: 8,192 tokens, a
width of 1,024 and 8 layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

from benchmarks.timing import Row, measure
from locant import NGramEmbedding, PerLayerEmbedding
from locant.embedding import NGramGate, NGramHash, PerLayerGate

__all__ = ["rows"]

VOCAB, WIDTH, LAYERS, PART, BATCH, LENGTH = 8_192, 1_024, 8, 256, 2, 256
ROUNDS = 7


def rows() -> list[Row]:
    """Forward, then forward and backward. The memory is the parameters'."""
    tokens = nn.Embedding(VOCAB, WIDTH)
    hashing = NGramHash.of(orders=(2, 3), heads=8, size=VOCAB, vocab_size=VOCAB)
    ngrams = NGramEmbedding(hashing, WIDTH // hashing.num_columns)
    ngram_gate = NGramGate(ngrams.output_width, WIDTH)
    per_layer = PerLayerEmbedding(VOCAB, LAYERS, PART, WIDTH)
    layer_gate = PerLayerGate(WIDTH, PART)
    linear, theirs = nn.Linear(WIDTH, WIDTH, bias=False), _gemma_4()
    ids, hidden = torch.randint(VOCAB, (BATCH, LENGTH)), torch.randn(BATCH, LENGTH, WIDTH)
    some_rows, part = torch.randn(BATCH, LENGTH, ngrams.output_width), torch.randn(BATCH, LENGTH, PART)
    parts: dict[str, tuple[Callable[[], Tensor], list[nn.Module]]] = {
        "torch.nn.Embedding": (lambda: tokens(ids), [tokens]),
        "torch.nn.Linear of this width": (lambda: linear(hidden), [linear]),
        "NGramEmbedding, 16 columns": (lambda: ngrams(ids), [ngrams]),
        "NGramGate of one layer": (lambda: ngram_gate(hidden, some_rows), [ngram_gate]),
        "PerLayerEmbedding, 8 layers": (lambda: per_layer(ids, hidden), [per_layer]),
        "PerLayerEmbedding, its table alone": (lambda: per_layer.rows(ids), []),
        "transformers' Gemma 4, 8 layers": (
            lambda: theirs.project_per_layer_inputs(hidden, theirs.get_per_layer_inputs(ids)), []
        ),
        "PerLayerGate of one layer": (lambda: layer_gate(hidden, part), [layer_gate]),
    }  # fmt: skip
    memory = {
        name: sum(each.numel() * each.itemsize for module in modules for each in module.parameters()) / 1e6
        for name, (_, modules) in parts.items()
    }
    what = f"inputs of {BATCH * LENGTH:,} tokens"
    calls = {name: call for name, (call, _) in parts.items()}
    with torch.no_grad():
        found = measure(what, calls, rounds=ROUNDS)
    found += measure(
        f"{what}, with gradients", {name: _with_gradients(call) for name, call in calls.items()}, rounds=ROUNDS
    )
    return [replace(row, megabytes=round(memory[row.contender], 1) or None) for row in found]


def _with_gradients(call: Callable[[], Tensor]) -> Callable[[], None]:
    cotangent = torch.randn_like(call())
    return lambda: call().backward(cotangent)


def _gemma_4() -> Gemma4TextModel:
    """A model with these tables and almost nothing else."""
    full_attention: dict[str, Any] = {"global_head_dim": 8}  # which its signature does not name
    config = Gemma4TextConfig(
        vocab_size=8, vocab_size_per_layer_input=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        hidden_size_per_layer_input=PART, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1,
        head_dim=8, pad_token_id=0, **full_attention,
    )  # fmt: skip
    return Gemma4TextModel(config)
