"""CABLE: against the paper's formula and ALiBi; what holds for every bias of hidden states is in `test_hidden`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from locant import Fox, LocantError, Positions, attend
from locant.positions.encodings.cable import Cable
from tests.positions.claims import shaken
from tests.positions.encodings.test_hidden import D_MODEL, HEAD_DIM, HEADS, QUERIES, agrees_with_formula
from tests.refusal import refuses


def cable(queries: list[int], keys: list[int], x: np.ndarray, weight: np.ndarray, **slope: np.ndarray) -> np.ndarray:
    """Veisi et al. 2025, equations 2 to 7, taken away; without slopes that of CABLE-NW."""
    steps = np.maximum(x @ weight.T, 0.0)
    out = np.zeros((len(weight), len(queries), len(keys)))
    for h, m, n in np.ndindex(*out.shape):
        first, last = sorted((queries[m], keys[n]))
        distance = sum(steps[place, h] for place in range(first + 1, last + 1))
        times = math.log1p(math.exp(x[queries[m]] @ slope["slope"][h])) if slope else 1.0
        out[h, m, n] = -times * distance
    return out


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("queries", QUERIES.values(), ids=QUERIES)
def test_values_and_gradients_are_those_of_the_formula(queries: list[int], weighted: bool) -> None:
    encoding: Any = shaken(Cable(2, D_MODEL, weighted=weighted))
    agrees_with_formula(encoding, queries, partial(cable, queries, list(range(12))))


def test_without_slopes_attention_works_in_blocks_of_far_keys_as_in_fox() -> None:
    assert Cable(2, 4, weighted=False).far == Fox(2, 4).far == 0
    assert Cable(2, 4).far is None  # the slope of a query is no summand


def test_vector_features_have_no_score_function() -> None:
    """Compiled for a CPU, FlexAttention reads other numbers than those of the token."""
    x, q = torch.randn(1, 3, D_MODEL), torch.zeros(1, HEADS, 3, HEAD_DIM)
    encoding, plain = Cable(HEADS, D_MODEL), Cable(HEADS, D_MODEL, weighted=False)
    with torch.no_grad():
        read = encoding.read(x, Positions.arange(3))
        assert encoding.score_mod(q, q, read) is None
        assert plain.score_mod(q, q, plain.read(x, Positions.arange(3))) is not None
        with refuses(LocantError, "no score_mod", "backend='tiled'"):
            attend(q, q, q, encoding=encoding, positions=read, backend="flex")
