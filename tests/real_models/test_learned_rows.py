"""What is said of learned rows, for tables that are known, and for a tiny random model of sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from benchmarks.real_models import learned_rows
from benchmarks.real_models.learned_rows import AFTER, Embedder, rows_of_table, stretched
from tests.tolerances import LOGITS, SIX_DIGITS


def test_rows_on_a_circle_have_neighbours_two_dimensions_and_the_cosine_of_their_distance() -> None:
    angles = 2 * np.pi * np.arange(64) / 64
    table = torch.tensor(np.stack([np.cos(angles), np.sin(angles), np.zeros(64)], 1) + 5.0, dtype=torch.float32)
    found = rows_of_table(table)
    assert found["nearest_is_neighbour"] >= 62 / 64, "the first and the last row are neighbours on the circle"
    assert found["dimensions"] == {"50%": 1, "90%": 2, "99%": 2}
    assert found["similarity"]["1"] == pytest.approx(np.cos(2 * np.pi / 64), abs=SIX_DIGITS)
    assert found["similarity"]["32"] == pytest.approx(-1.0, abs=SIX_DIGITS)
    assert found["common"] == pytest.approx(5 * np.sqrt(3), abs=SIX_DIGITS)
    assert np.shape(found["map"]) == (8, 8)


def test_a_stretched_table_keeps_both_ends_and_is_linear_between_rows() -> None:
    table = torch.tensor([[0.0, 10.0], [1.0, 20.0], [3.0, 0.0]])
    expected = torch.tensor([[0.0, 10.0], [0.5, 15.0], [1.0, 20.0], [2.0, 10.0], [3.0, 0.0]])
    assert torch.allclose(stretched(table, 5), expected)


@pytest.fixture
def embed() -> Embedder:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BertModel(BertConfig(**sizes, vocab_size=50, initializer_range=0.5, max_position_embeddings=128))
    return Embedder(model.eval(), None)


IDS = torch.tensor([[1, 10, 11, 12, 13, 2]])


def test_positions_of_each_reading(embed: Embedder) -> None:
    places = {reading: embed.places(6, reading)[0].tolist() for reading in learned_rows.READINGS}
    assert places["own"] == places["removed"] == [*range(6)]
    assert places["reversed"] == [0, 4, 3, 2, 1, 5]
    assert sorted(places["shuffled"]) == [*range(6)]
    assert places["shuffled"] != [*range(6)]
    assert places["equal"] == [0, 1, 1, 1, 1, 5]
    assert places["shifted"] == [AFTER + each for each in range(6)]


def test_exchanged_words_have_one_vector_without_rows_and_two_with_them(embed: Embedder) -> None:
    """Words at exchanged positions are the same as exchanged words."""
    other, places = IDS[:, [0, 4, 3, 2, 1, 5]], embed.places(6, "own")
    own, exchanged = embed.of_ids(IDS, places), embed.of_ids(other, places)
    assert not torch.allclose(own, exchanged, atol=LOGITS)
    assert torch.allclose(embed.of_ids(IDS, embed.places(6, "reversed")), exchanged, atol=LOGITS)
    one, two = (embed.of_ids(each, places, without_rows=True) for each in (IDS, other))
    assert torch.allclose(one, two, atol=LOGITS)
    assert torch.equal(embed.of_ids(IDS, places), own), "the rows are back"


def test_a_second_calculation_that_differs_is_seen(tmp_path: Path) -> None:
    cosines = {reading: {"exchanged": 0.9, "same meaning": 0.8, "own": 1.0} for reading in learned_rows.READINGS}
    measured: dict[str, Any] = {
        "rows": {"nearest_is_neighbour": 1.0, "similarity": {"1": 0.9}, "spectrum": [0.5, 0.5]},
        "sentences": {"biting": cosines}, "long texts": {},
        "second calculation": {
            "nearest_is_neighbour": 1.0, "similarity": 0.9, "spectrum": [0.5], "exchanged": {"biting": 0.87},
        },
    }  # fmt: skip
    found = learned_rows.summary(measured)
    assert found["check"] == 0.03
    assert found["readings"]["own"]["order seen"] == 0
