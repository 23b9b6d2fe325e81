"""Warnings carry what such a mistake cost in trained models. The record is one written here, or the published one."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import locant
from benchmarks.real_models.bugs import BUGS
from benchmarks.real_models.record import RESULTS
from locant import position_costs
from locant.engines.batches import check_batch
from locant.position_costs import PLACES, SMALL, Cost, costs

ROOT = Path(__file__).parents[1]


NATS = {"frequencies-bfloat16": (0.0, 0.001), "positions-float16": (0.001, 0.7), "padding-visible": (1.5, 0.2)}


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A record of three mistakes: one costs nothing, one something in long texts, and one much."""
    rows = {
        kind: {"sentence": f"there is {kind}", "costs": {"a": {"2048": {"cost": short}, "8192": {"cost": long}}}}
        for kind, (short, long) in NATS.items()
    }
    written = {"weights": {"a": {"title": "Model A"}}, "summary": {"rows": rows}}
    (tmp_path / "real_models").mkdir()
    (tmp_path / "real_models" / "bugs.json").write_text(json.dumps(written))
    monkeypatch.setattr(position_costs, "PLACES", (tmp_path / "nothing", tmp_path))
    costs.cache_clear()
    yield
    costs.cache_clear()


@pytest.mark.usefixtures("record")
def test_a_sentence_states_the_costs_at_two_lengths() -> None:
    begin, found = "This matters: if there is", costs()
    expected = f"{begin} padding-visible, the loss rises by 1.50 nats at 2,048 tokens and 0.20 at 8,192 in Model A."
    assert str(found["padding-visible"]) == expected
    expected = f"{begin} positions-float16, the loss rises by 0.00 nats at 2,048 tokens and 0.70 at 8,192 in Model A."
    assert str(found["positions-float16"]) == expected
    expected = "frequencies-bfloat16, the loss rises by less than 0.005 nats up to 8,192 tokens in Model A."
    assert str(found["frequencies-bfloat16"]) == f"This hardly matters: if there is {expected}"


def test_what_costs_nothing_states_how_far_each_model_was_read() -> None:
    both = {"Model A": {512: 0.0, 8192: 0.001}, "Model B": {2048: 0.0}}
    assert str(Cost("a bug", both)).endswith(" up to 8,192 tokens in Model A and up to 2,048 tokens in Model B.")
    both["Model B"][8192] = 0.0
    assert str(Cost("a bug", both)).endswith(" up to 8,192 tokens in Model A and Model B.")


@pytest.mark.usefixtures("record")
def test_the_most_costly_comes_first_behind_what_is_unknown_and_notes_are_last() -> None:
    unknown, note = (None, True), (None, False)
    nothing, some, much = ((kind, True) for kind in NATS)
    ranked = sorted([nothing, note, much, unknown, some], key=lambda each: position_costs.rank(*each))
    assert ranked == [unknown, much, some, nothing, note]
    assert [position_costs.matters(*each) for each in ranked] == [True, True, True, False, False]


def test_without_a_record_there_are_warnings_without_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(position_costs, "PLACES", (tmp_path,))
    costs.cache_clear()
    assert position_costs.with_cost("A mistake.", "padding-visible") == "A mistake."
    assert position_costs.rank("padding-visible") == position_costs.rank(None)
    costs.cache_clear()


@pytest.mark.usefixtures("record")
def test_a_batch_states_the_cost_of_its_mistake_and_keeps_it() -> None:
    batch = {"input_ids": torch.tensor([[0, 0, 5, 6, 7]])}
    (found,) = check_batch(batch, model={"model_type": "llama", "pad_token_id": 0})
    assert found.kind == "padding-visible"
    assert str(found).startswith("row 0 begins with padding (token 0)")
    assert str(found).endswith("; give an attention_mask with 0 at padding. " + str(costs()["padding-visible"])[:-1])
    assert found.remedy == "give an attention_mask with 0 at padding"
    again = pickle.loads(pickle.dumps(found))  # noqa: S301  # our own
    assert (str(again), again.to_dict()) == (str(found), found.to_dict())


def test_every_kind_in_the_code_is_a_bug_that_is_measured() -> None:
    """Kinds are strings, so one that is misspelt would have no cost, in silence."""
    files = [*(ROOT / "src/locant/probing").glob("*.py"), *(ROOT / "src/locant/engines/batches").glob("*.py")]
    texts = [file.read_text(encoding="utf-8") for file in files if file.name != "model.py"]  # which has names of models
    kinds = {word for text in texts for word in re.findall(r'"([a-z]+(?:-[a-z0-9]+)+)"', text)}
    assert len(kinds) > 15
    assert kinds <= {*BUGS}, kinds - {*BUGS}


def test_the_published_record_is_what_the_package_reads() -> None:
    """Its rows are the bugs of today, and the costs in warnings are its numbers."""
    assert PLACES[1] == RESULTS.parent
    written = json.loads((RESULTS / "bugs.json").read_text(encoding="utf-8"))
    costs.cache_clear()
    assert {*written["summary"]["rows"]} == {*BUGS}
    for kind, cost in costs().items():
        row = written["summary"]["rows"][kind]
        assert cost.mistake == row["sentence"] == BUGS[kind].sentence
        assert cost.worst == max(each["cost"] for lengths in row["costs"].values() for each in lengths.values())


def test_rounded_frequencies_cost_nothing_and_rounded_positions_much() -> None:
    """The published finding that orders the warnings of `probe`."""
    found = costs()
    assert found["frequencies-bfloat16"].worst < SMALL
    assert found["positions-bfloat16"].worst > 0.5
    frequencies = 10_000.0 ** -(torch.arange(0, 64, 2) / 64)

    def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = positions[..., None].bfloat16().float() * frequencies
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    warnings = locant.probe(rotate, head_dim=64).warnings
    assert any(str(found["positions-bfloat16"]) in each for each in warnings)


def test_a_cost_without_numbers_is_never_made() -> None:
    assert not Cost("nothing happens", {"Model A": {2048: 0.0}}).matters
