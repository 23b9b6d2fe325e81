"""How far models read: rows, short windows, and pages that follow from records. No weights are needed."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.real_models import reach
from benchmarks.real_models.cost_of_bugs import texts
from benchmarks.real_models.reach import CUT, SEARCHED, Plan, Reading, Subject, Tuning, make_row, read_cut
from benchmarks.real_models.second_calculation import log_losses
from docs.generator.reach import advice, how_far
from tests.real_models.conftest import TRAINED
from tests.tolerances import LOGITS

WAYS = ("own", "linear:2", "ntk:2", "dynamic", "yarn:2", "self-extend:4", "nope")
PLAN = Plan(
    model="smollm2", trained=TRAINED, numbers=2, generations=0, offsets=(0, 2**22), offset_length=128,
    readings=(Reading(384, (*WAYS, CUT, "exact", "rerope", "dual-chunk")),),
    tunings=(), checked=(Reading(384, WAYS),),
)  # fmt: skip


def test_a_row_is_the_text_with_numbers_in_it_and_a_question_for_each(subject: Subject) -> None:
    text = texts()["documentation"]
    row = make_row(subject.tokenizer, text, 600, 3, last=50, seed=1)
    assert len(row.ids) == 600
    assert len(row.counted) == 599
    ids = row.ids.tolist()
    of_text = subject.tokenizer.decode([ids[0], *(ids[1:][n] for n in range(599) if row.counted[n])])
    assert text.startswith(of_text)
    assert row.counted[: int(row.counted.nonzero()[-1]) + 1][-50:].all()
    facts = dict(re.findall(r"The secret number of (\S+) is (\d{7})\.\n\n", subject.tokenizer.decode(ids)))
    assert len(facts) == 3
    for place, start, stop in row.answers:
        value = subject.tokenizer.decode(ids[start:stop])
        question = subject.tokenizer.decode(ids[:start]).rpartition("secret number of ")[2].removesuffix(" is")
        assert value == f" {facts[question]}"
        assert ids[place : place + stop - start] == ids[start:stop]


def test_a_cut_context_is_that_of_the_last_tokens(subject: Subject) -> None:
    model: Any = subject.model.module
    ids = torch.randint(0, 400, (100,), generator=torch.Generator().manual_seed(0))
    nats, hits = read_cut(model, ids, near=40)
    expected, most_probable = np.zeros(99), np.zeros(99, dtype=bool)
    with torch.inference_mode():
        for target in range(1, 100):
            window = 40 if target < 40 else min((target - 40) // 20 * 20 + 60, 100)
            part = ids[window - 40 : target + 1]
            logits = model(part[None]).logits[0]
            expected[target - 1] = log_losses(logits, part)[-1]
            most_probable[target - 1] = logits[-2].argmax() == part[-1]
    np.testing.assert_allclose(nats.numpy(), expected, atol=LOGITS, rtol=0)
    assert (hits.numpy() == most_probable).all()


def test_every_encoding_reads_what_transformers_with_a_hook_reads(subject: Subject, tmp_path: Path) -> None:
    reach.run(folder=tmp_path, plan=PLAN, subject=subject)
    record = json.loads((tmp_path / "reach.json").read_text())
    rows, checks = record["summary"]["lengths"]["384"], record["summary"]["checks"]
    assert rows.keys() == {*WAYS, CUT, "exact", "rerope", "dual-chunk"}
    assert checks.keys() == {f"384/{way}" for way in WAYS}
    for each in checks.values():
        assert each["first"] == pytest.approx(each["second"], abs=2 * LOGITS)
    assert len({round(each["first"], 3) for each in checks.values()}) >= len(WAYS) - 1, "dynamic is NTK at one length"
    first, last = record["summary"]["offsets"]
    assert first["own"] == pytest.approx(first["exact"], abs=2 * LOGITS)
    assert last["exact"] == pytest.approx(first["exact"], abs=2 * LOGITS)
    assert abs(last["own"] - last["exact"]) > 10 * LOGITS
    assert "Rows of 384 tokens" in how_far(record)


@pytest.mark.slow
def test_factors_are_searched_and_models_are_tuned(subject: Subject, tmp_path: Path) -> None:
    plan = PLAN._replace(
        readings=(Reading(384, ("own", CUT, "yarn:2", "nope", SEARCHED)),), checked=(), offsets=(),
        tunings=(Tuning("yarn:2", 2, 128, (384,)), Tuning("drope", 2, 128, (384,))),
    )  # fmt: skip
    reach.run(folder=tmp_path, plan=plan, subject=subject)
    record = json.loads((tmp_path / "reach.json").read_text())
    found = record["measured"]["search"]["value"]
    assert len(found["factors"]) == 8
    assert str(tmp_path) not in json.dumps(record)
    assert str(subject.folder) not in json.dumps(record)
    for way in ("yarn:2", "drope"):
        tuned = record["summary"]["tuned"][way]["readings"]["384"]
        assert tuned["after"]["within"] != tuned["before"]["within"]
    assert len(advice(record["summary"])) == 3
    before = {file: file.stat().st_mtime_ns for file in subject.folder.parent.rglob("tuning.json")}
    reach.run(folder=tmp_path, plan=plan, subject=subject)
    assert {file: file.stat().st_mtime_ns for file in before} == before
    reach.run(folder=tmp_path, plan=plan, subject=subject, anew=True)
    assert all(file.stat().st_mtime_ns > time for file, time in before.items())
    assert json.loads((tmp_path / "reach.json").read_text())["summary"] == record["summary"]


# ---------------------------------------------------------------------- pages


def row(within: float, beyond: float, far: int, *, cost: float, against: float) -> dict[str, Any]:
    interval = [against - 0.01, against + 0.01]
    return {
        "by_position": [[0, 2048, within], [2048, 16_384, beyond]], "within": within, "beyond": beyond,
        "found": far + 1, "asked": 16, "found_far": far, "asked_far": 8, "nats": 3.0, "nats_far": 20.0 - far,
        "cost_within": {"mean": cost, "interval": [cost - 0.001, cost + 0.001]},
        "against_cut": {"mean": against, "interval": interval},
    }  # fmt: skip


def made(**beyond: float) -> dict[str, Any]:
    names = {"yarn": "yarn:2", "extend": "self-extend:4"}
    losses = {"own": 4.5, "cut": 2.3, "yarn": 2.2, "extend": 2.1} | beyond
    rows = {
        names.get(name, {"cut": CUT}.get(name, name)): row(
            2.4, loss, number, cost=0.02 if name == "yarn" else 0.0, against=loss - losses["cut"]
        )
        for number, (name, loss) in enumerate(losses.items())
    }
    after = {"within": 2.41, "beyond": 2.0, "found": 9, "asked": 16}
    tuned = {
        "steps": 12, "length": 4096,
        "readings": {"16384": {"before": {**after, "beyond": losses["yarn"]}, "after": after}},
    }  # fmt: skip
    return {
        "model": "smollm2", "trained": 8192, "lengths": {"16384": rows}, "tuned": {"yarn:2": tuned}, "checks": {},
        "offsets": [], "angles": {}, "search": None,
    }  # fmt: skip


def test_three_sentences_follow_from_the_numbers() -> None:
    within, beyond, tuned = advice(made())
    assert within.startswith("Up to 8,192 tokens, keep the model's own positions")
    assert "+0.020 with YaRN by 2" in within
    assert "use Self-Extend by 4" in beyond
    assert all(number in beyond for number in ("2.100", "4.500", "2.300", "of 8 numbers", "finds 3 (17.0 nats each)"))
    assert tuned.startswith("Train if you can: 12 steps of 4,096 tokens take YaRN by 2 from 2.200 to 2.000")


def test_another_record_makes_other_sentences() -> None:
    assert "use YaRN by 2" in advice(made(yarn=2.05))[1]
    assert "finds 2" in advice(made(yarn=2.05))[1]
    assert "but Self-Extend by 4 finds 3" in advice(made(yarn=2.05))[1]
    assert "cut the text into windows" in advice(made(cut=2.1))[1]
    assert "keep the model's own positions" in advice(made(own=2.0))[1]
    worse = made()
    worse["tuned"]["yarn:2"]["readings"]["16384"]["after"]["beyond"] = 2.15
    assert advice(worse)[2].startswith("Do not train for so few steps")
    better = made()
    better["lengths"]["16384"]["self-extend:4"]["cost_within"] = {"mean": -0.1, "interval": [-0.11, -0.09]}
    assert advice(better)[0].startswith("Up to 8,192 tokens, use Self-Extend by 4")
    none = made()
    none["tuned"] = {}
    assert advice(none)[2] == "No training is recorded."


def test_the_page_shows_every_number_of_a_record_or_how_to_make_one() -> None:
    record: dict[str, Any] = {
        "command": "python -m benchmarks.real_models reach", "versions": {"torch": "2.13.0", "gguf": None},
        "weights": {"smollm2": {"title": "A model", "file": "a.gguf", "sha256": "0123456789abcdef0"}},
        "seconds": 120.0, "summary": made(),
    }  # fmt: skip
    page = how_far(record)
    assert "| Self-Extend by 4 | 2.400 | 2.100 | -0.200 (-0.210 to -0.190) |" in page
    assert "| Self-Extend by 4 | 4 of 16 | 3.0 | 3 of 8 | 17.0 |" in page
    assert "torch 2.13.0. `python -m benchmarks.real_models reach` took 2 minutes" in page
    other = copy.deepcopy(record)
    other["summary"]["lengths"]["16384"]["yarn:2"]["by_position"][0][2] = 2.777
    assert "2.777" not in page
    assert "2.777" in how_far(other)
    assert "make real PARTS=reach" in how_far({})
