"""Whatever an embedding is given, it answers with a module, or with an error that says what was got.

Every parameter of every public class is tried, as the signatures have them: none can be forgotten.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from locant import InputEmbedding, KVCache, Learned, NGramEmbedding, SegmentEmbedding, TokenEmbedding, embedding
from locant.embedding import NGramGate, NGramHash, PerLayerEmbedding, PerLayerGate, QuantisedEmbedding
from locant.errors import RangeError
from tests.odd import FLAG, POSITIVE, REAL, parameters, require_refused
from tests.refusal import refuses

HASHING = NGramHash.of(orders=(2,), heads=1, size=7, vocab_size=11)
SAMPLE = {
    "vocab_size": 11, "d_model": 8, "num_segments": 2, "table": TokenEmbedding(11, 8),
    "hashing": HASHING, "width": 4, "rows_width": 4, "num_layers": 2,
}  # fmt: skip
CLASSES = [one for one in vars(embedding).values() if inspect.isclass(one) and issubclass(one, nn.Module)]

ACCEPTED: dict[str, Collection[str]] = {
    "scale": {"None"} | REAL, "scale_sum": {"None"} | REAL, "max_seq_len": {"None"},
    "init_std": {"None", "0"} | POSITIVE, "padding_idx": {"None", "0", "-1"},
    "dropout": {"0", "tiny"}, "max_len": {"None"}, "encoding": {"None"}, "norm": {"None"}, "backend": {"None"},
    "InputEmbedding.num_segments": {"0"}, "ngrams": {"None"}, "num_rows": {"None"}, "token_map": {"None"},
    "kernel_size": {"0"}, "eps": {"0"} | POSITIVE, "bias": FLAG,
    "PerLayerEmbedding.vocab_size": {"None"}, "per_layer": {"None"}, "outside_row": {"None", "0", "-1"},
    "rounded_factors": FLAG, "placeholder_ids": {"()"},
}  # fmt: skip
typed = pytest.mark.unchecked  # the shape checks refuse the numbers of other libraries

OTHERS = {
    "encoding", "norm", "backend", "scale", "scale_sum", "init", "combine", "table", "code", "hashing", "token_map",
    "ngrams", "per_layer", "activation", "placeholder_ids",
}  # fmt: skip
"""Parameters that are no numbers, or may be a name."""


@pytest.mark.parametrize(
    ("build", "required", "name"),
    [
        pytest.param(build, required, name, id=f"{build.__name__}.{name}")
        for build in (*CLASSES, KVCache)
        for name, required in parameters(build, SAMPLE)
    ],
)
def test_an_odd_argument_is_refused_by_name(build: type, required: dict[str, Any], name: str) -> None:
    accepted = ACCEPTED.get(f"{build.__name__}.{name}", ACCEPTED.get(name, ()))
    require_refused(build, required, name, accepted, number=name not in OTHERS)


def test_no_class_is_forgotten() -> None:
    tables = {TokenEmbedding, SegmentEmbedding, QuantisedEmbedding, NGramEmbedding, PerLayerEmbedding}
    assert tables | {InputEmbedding, NGramGate, PerLayerGate} == set(CLASSES)


def test_a_class_is_no_norm_and_no_encoding() -> None:
    with refuses(RangeError, "norm"):
        InputEmbedding(11, 8, norm=nn.LayerNorm)  # type: ignore[arg-type]
    with refuses(RangeError, "encoding"):
        InputEmbedding(11, 8, encoding=Learned)  # type: ignore[arg-type]


@typed
@pytest.mark.parametrize("number", [np.int64(4), np.array(4), torch.tensor(4)], ids=repr)
def test_numbers_of_other_kinds_become_plain_ones(number: Any) -> None:
    table = TokenEmbedding(number, number, scale=number, padding_idx=number - 1)
    assert (table.weight.shape, table.padding_idx) == ((4, 4), 3)
    assert {type(table.padding_idx), type(table.scale)} == {int, float}
    assert TokenEmbedding(4, 4, scale=Decimal("0.5")).scale == 0.5
    assert InputEmbedding(number, number, num_segments=number, dropout=np.float32(0.5)).dropout.p == 0.5
    assert type(KVCache(number).max_len) is int


@typed
def test_what_was_written_is_shown() -> None:
    assert repr(TokenEmbedding(11, 8, scale=2)) == "TokenEmbedding(vocab_size=11, d_model=8, scale=2)"


def test_the_next_positions_are_a_count() -> None:
    for n in (-1, 1.5, True, "2"):
        with refuses(RangeError, "for n"):
            KVCache().next_positions(n)  # type: ignore[arg-type]
