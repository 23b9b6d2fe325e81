"""What `compare` measures is what it says, and the same every time."""

from __future__ import annotations

import itertools
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from locant import InputError, LocantError, RangeError, Windows
from locant.lab import Settings, compare
from locant.lab.compare import CALIBRATION_STEPS, _model, _split, _steps_that_fit
from locant.lab.train import _schedule, evaluate, train
from tests.tolerances import FEW_ROUNDINGS, LOSS

VOCAB = 17
SMALL = {"train_length": 5, "num_steps": 3, "batch_size": 4, "d_model": 16, "num_layers": 1, "num_heads": 2}


def ids(n: int = 900) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, n)


def small(**options: object) -> Settings:
    return Settings(**{**SMALL, **options})


def run(**options: object):
    return compare(ids(), VOCAB, small(**options))


def test_there_is_a_record_for_every_seed_and_encoding_in_turn():
    results = run(encodings=("nope", "alibi"), seeds=(3, 5))
    assert [(r.seed, r.encoding) for r in results.records] == [(3, "nope"), (3, "alibi"), (5, "nope"), (5, "alibi")]


def test_results_are_json_of_the_promised_form():
    results = run(encodings=("learned",), seeds=(0,), multiples=(1, 2, 8))
    data = json.loads(json.dumps(results.to_dict()))
    assert set(data) == {"settings", "environment", "records"}
    assert data["settings"]["train_length"] == 5
    assert data["environment"]["torch"] == torch.__version__
    [record] = data["records"]
    assert record["encoding"] == "learned"
    assert record["seed"] == 0
    assert record["train_length"] == 5
    assert list(record["loss_by_length"]) == ["5", "10", "40"]
    assert len(record["loss_by_position"]) == 40
    assert all(math.isfinite(loss) for loss in [*record["loss_by_length"].values(), *record["loss_by_position"]])


def test_the_same_seed_gives_the_same_numbers_and_another_does_not():
    first, again, other = (run(encodings=("t5",), seeds=(seed,)).records[0] for seed in (1, 1, 2))
    assert first.loss_by_length == again.loss_by_length
    assert first.loss_by_position == again.loss_by_position
    assert first.loss_by_length != other.loss_by_length


def test_an_encoding_has_the_same_numbers_whichever_others_are_compared():
    alone = run(encodings=("alibi",), seeds=(1,)).records[0]
    beside = run(encodings=("learned", "alibi"), seeds=(0, 1)).records[-1]
    assert beside.encoding == "alibi"
    assert alone.loss_by_length == beside.loss_by_length


def test_all_models_of_a_seed_start_alike_but_for_the_encoding():
    models = [_model(name, 4, VOCAB, small()) for name in ("nope", "learned", "t5")]
    for key, parameter in models[0].named_parameters():
        for model in models[1:]:
            assert torch.equal(dict(model.named_parameters())[key], parameter)


def test_comparing_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    run(encodings=("learned",), seeds=(0,))
    assert torch.equal(torch.get_rng_state(), state)


def test_progress_reaches_the_total_and_results_come_after_every_run():
    steps, seen = [], []
    compare(
        ids(), VOCAB, small(encodings=("nope", "alibi"), seeds=(0, 1)),
        on_progress=steps.append, on_record=lambda results: seen.append(len(results.records)),
    )  # fmt: skip
    assert [step.done for step in steps] == list(range(1, 13))
    assert {step.total for step in steps} == {12}
    assert seen == [1, 2, 3, 4]


def test_training_lowers_the_loss_of_a_text_with_a_pattern():
    text = np.tile(np.arange(VOCAB), 60)
    settings = small(encodings=("rotary",), seeds=(0,), num_steps=60, batch_size=16)
    loss = compare(text, VOCAB, settings).records[0].loss_by_length[5]
    assert loss < 0.3 * math.log(VOCAB)


def test_the_held_out_part_is_never_trained_on():
    training, held_out = _split(np.arange(1_000), small())
    assert len(training) == 900
    assert len(held_out) == 100
    assert not set(training.tolist()) & set(held_out.tolist())


def test_models_train_on_the_first_part_and_are_measured_on_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is a different one, so each window tells where in the text it is from."""
    seen: dict[str, set[int]] = {"train": set(), "evaluate": set()}

    def note(what: str, windows: Windows) -> None:
        batch = windows.__getitems__(range(len(windows)))
        seen[what] |= {*batch["ids"].flatten().tolist(), *batch["targets"].flatten().tolist()} - {-100, 0}

    def training(model: object, windows: Windows, **_: object) -> float:
        note("train", windows)
        return 0.0

    def measuring(model: object, windows: Windows, length: int) -> tuple[float, list[float]]:
        note("evaluate", windows)
        return 0.0, [0.0] * length

    room = sys.modules["locant.lab.compare"]  # the package has a function of that name
    monkeypatch.setattr(room, "train", training)
    monkeypatch.setattr(room, "evaluate", measuring)
    compare(np.arange(1_000), 1_000, small(encodings=("nope",), seeds=(0,)))
    assert seen == {"train": set(range(1, 900)), "evaluate": set(range(900, 1_000))}


def test_nothing_is_dropped_while_measuring() -> None:
    model, windows = _model("nope", 0, VOCAB, small()), Windows(ids(43), 8)
    expected = evaluate(model, windows, 8)
    model.embedding.dropout.p = 0.5
    model.train()
    assert evaluate(model, windows, 8) == expected


def test_evaluation_is_the_mean_over_all_targets_and_ignores_filling():
    """Against probabilities summed up one token at a time; the last of the windows is filled up."""
    model, text = _model("alibi", 0, VOCAB, small()), ids(43)
    total, by_position = evaluate(model, Windows(text, 8), 8)
    losses = [[] for _ in range(8)]
    for start in range(0, 42, 8):
        piece = torch.from_numpy(text[start : start + 9])
        probabilities = model(piece[None, :-1]).detach().double().softmax(-1)[0]
        for place, target in enumerate(piece[1:].tolist()):
            losses[place].append(-math.log(probabilities[place, target]))
    assert total == pytest.approx(np.mean(np.concatenate(losses)), abs=LOSS)
    assert by_position == pytest.approx([np.mean(row) for row in losses], abs=LOSS)


def test_the_rate_rises_over_a_tenth_and_falls_to_a_tenth():
    rates = [_schedule(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)], rel=FEW_ROUNDINGS, abs=0)
    assert rates[10] == 1
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert 0.1 < rates[-1] < 0.11


def test_no_steps_give_no_loss():
    model = _model("nope", 0, VOCAB, small())
    options = {"num_steps": 0, "batch_size": 2, "learning_rate": 1e-3, "seed": 0}
    assert math.isnan(train(model, Windows(ids(), 5), **options))


@pytest.mark.parametrize(
    ("minutes", "others", "wanted"),
    [
        (1e-9, {}, 1),
        (10.0, {}, 2040),
        (20.0, {}, 4080),
        (10.0, {"seeds": (0, 1, 2)}, 680),
        (10.0, {"encodings": ("nope", "alibi")}, 1020),
    ],
)
def test_minutes_become_steps_in_proportion(monkeypatch, minutes, others, wanted):
    """A step takes a quarter of a second by this clock, and 85 % of the minutes are for steps."""
    clock = itertools.count(step=CALIBRATION_STEPS / 4)
    monkeypatch.setattr(sys.modules["locant.lab.compare"], "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    settings = small(**{"encodings": ("nope",), "seeds": (0,), **others})
    assert _steps_that_fit(minutes, ids(), VOCAB, settings) == wanted


def test_a_moment_is_enough_for_one_step():
    assert run(encodings=("nope",), seeds=(0,), minutes=1e-9).settings.num_steps == 1


def test_a_text_too_short_to_hold_out_a_window_is_refused_with_the_length_it_needs():
    longest = 5 * 8
    with pytest.raises(InputError, match=str((longest + 1) * 10)):
        compare(ids(400), VOCAB, small())
    assert compare(ids((longest + 1) * 10), VOCAB, small(encodings=("nope",), seeds=(0,))).records


@pytest.mark.parametrize(
    "wrong",
    [
        {"train_length": 0},
        {"num_steps": 0},
        {"batch_size": 0},
        {"seeds": ()},
        {"seeds": (1, 1)},
        {"encodings": ()},
        {"multiples": (0, 1)},
        {"d_model": 15},
        {"d_model": 6, "num_heads": 2},
        {"learning_rate": 0.0},
        {"learning_rate": math.nan},
        {"minutes": 0.0},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(RangeError):
        small(**wrong)


def test_an_unknown_encoding_is_refused_before_anything_is_trained():
    with pytest.raises(LocantError, match="alibi"):
        small(encodings=("alibbi",))
