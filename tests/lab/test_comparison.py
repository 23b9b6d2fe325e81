"""What `compare` measures is what it says, and the same every time."""

from __future__ import annotations

import itertools
import json
import math
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from locant import InputError, RangeError
from locant.lab import Decoder, Settings, compare
from locant.lab import training as trainings
from locant.lab.candidate import Candidate
from locant.lab.comparison import Progress
from locant.lab.results import Losses, Results
from locant.lab.text_learning import count, in_context, losses_in_windows, split_held_out
from locant.scaling import NTK, Linear, Llama3, YaRN
from tests.lab.fabricated import SMALL, VOCAB, ids
from tests.refusal import refuses
from tests.threads import threads


def small(**options: object) -> Settings:
    return Settings(**{**SMALL, **options})


def run(**options: object):
    return compare(ids(), VOCAB, small(**options))


def test_results_are_json_of_the_promised_form():
    results = run(encodings=("learned",), seeds=(0,), multiples=(1, 2, 8))
    data = json.loads(json.dumps(results.to_dict()))
    assert set(data) == {"schema", "settings", "environment", "records"}
    assert data["settings"]["train_length"] == 5
    assert data["environment"]["torch"] == torch.__version__
    [record] = data["records"]
    assert (record["task"], record["encoding"], record["rate"], record["steps"]) == ("text", "learned", 1.0, 3)
    assert record["seed"] == 0
    assert record["train_length"] == 5
    assert list(record["loss_by_length"]) == ["5", "10", "40"]
    assert len(record["loss_by_position"]) == 40
    assert {length: len(losses) for length, losses in record["loss_by_window"].items()} == {"5": 18, "10": 9, "40": 3}
    losses = [*record["loss_by_length"].values(), *record["loss_by_position"], *record["loss_by_window"]["40"]]
    assert all(math.isfinite(loss) for loss in [*losses, record["train_loss"]])
    counted = tuple(data["settings"]["text"].pop(f"{name}_loss") for name in ("unigram", "bigram"))
    assert counted == count(ids()[:810], ids()[810:], VOCAB)
    assert {length: len(each) for length, each in record["context_loss_by_stretch"].items()} == dict.fromkeys(
        ("5", "10", "40"), 1
    )
    assert data["settings"]["text"] == {"tokens": 900, "train_tokens": 810, "held_out_tokens": 90}


def test_the_encoding_and_the_seed_decide_the_numbers_and_nothing_else_random_does():
    state = torch.get_rng_state()
    first, other = run(encodings=("learned",), seeds=(1, 2)).records
    planned = compare(
        ids(), VOCAB, small(encodings=("alibi", "learned"), seeds=(0, 1)), on_plan=lambda results, seconds: None
    ).records[-1]
    assert (planned.encoding, planned.seed) == ("learned", 1)
    for name in ("loss_by_length", "loss_by_position", "loss_by_window", "train_loss"):
        assert getattr(first, name) == getattr(planned, name), "beside others, and after steps that were timed"
    assert first.loss_by_length != other.loss_by_length
    assert torch.equal(torch.get_rng_state(), state)


def test_models_that_train_at_once_have_the_numbers_of_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, fit, another = small(encodings=("learned", "fire"), seeds=(0, 1)), trainings.fit, threading.Barrier(2)
    with threads(1):
        alone = compare(ids(), VOCAB, settings).records

    def meet(*args: Any, **options: Any) -> float:
        another.wait(timeout=120)
        return fit(*args, **options)

    monkeypatch.setattr(trainings, "fit", meet)
    with threads(2):
        together = compare(ids(), VOCAB, settings).records
        assert torch.get_num_threads() == 2, "those of the caller come back"
    for one, other in zip(alone, together, strict=True):
        assert (one.encoding, one.seed, one.loss_by_position) == (other.encoding, other.seed, other.loss_by_position)


def test_an_interrupt_ends_every_training() -> None:
    done, going, interrupted = list[int](), threading.enumerate(), threading.Event()

    def wait(progress: Progress) -> None:
        done.append(progress.done)
        if progress.training.encoding == "alibi":
            interrupted.wait(timeout=120)

    def interrupt(results: Results) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    settings = small(encodings=("nope", "alibi", "rotary"), seeds=(0,), num_steps=200)
    with threads(1), pytest.raises(KeyboardInterrupt):
        compare(ids(), VOCAB, settings, on_progress=wait, on_record=interrupt)
    assert 200 <= len(done) < 600
    assert set(threading.enumerate()) <= {*going}


def test_progress_reaches_the_total_and_results_come_after_every_run():
    steps, seen = [], []
    results = compare(
        ids(), VOCAB, small(encodings=("nope", "alibi"), seeds=(3, 5)),
        on_progress=steps.append, on_record=lambda results: seen.append(len(results.records)),
    )  # fmt: skip
    assert [(r.seed, r.encoding) for r in results.records] == [(3, "nope"), (3, "alibi"), (5, "nope"), (5, "alibi")]
    assert [step.done for step in steps] == list(range(1, 13))
    assert {step.total for step in steps} == {12}
    assert seen == [1, 2, 3, 4]


def test_how_long_it_will_take_is_said_before_the_first_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which a step takes 2 s (of nope, 1 s), and to read a token of the held-out text an eighth."""
    clock, called = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now), []

    def reading(model: object, ids: np.ndarray, length: int, **_: object) -> Losses:
        clock.now += 0.125 * (len(ids) - 1)
        return Losses(mean=0.0, by_position=[0.0] * length, by_window=[0.0])

    def training(
        model: object, candidate: Candidate, ids: np.ndarray, *_: object, num_steps: int, **__: object
    ) -> float:
        clock.now += num_steps * (1.0 if candidate.encoding == "nope" else 2.0)
        called.append(num_steps)
        return 0.0

    monkeypatch.setattr(trainings, "time", clock)

    def in_context(*_: object) -> list[float]:
        clock.now += 0.125 * 8 * 40
        return [0.0]

    monkeypatch.setattr(trainings, "fit", training)
    monkeypatch.setattr(trainings, "losses_in_windows", reading)
    monkeypatch.setattr(trainings, "in_context", in_context)
    settings = small(encodings=("nope", "rotary", "rotary+ntk"), seeds=(0, 1, 2), num_steps=50)
    with threads(1):
        compare(ids(), VOCAB, settings, on_plan=lambda results, seconds: called.append((results, seconds)))
    place = next(at for at, each in enumerate(called) if isinstance(each, tuple))
    (results, seconds), after = called[place], called[place + 1 :]
    assert (results.settings.num_steps, results.records, results.text["train_tokens"]) == (50, (), 810)
    each = 0.125 * len(settings.lengths) * (80 + 8 * 40)  # two windows, and one of them in full context
    measuring = each * (90 / 40 + 8 * 90 / 40) / (2 + 8)
    assert seconds == 3 * ((50 * 1.0 + measuring) + (50 * 2.0 + 2 * measuring))
    assert after == [50] * 6


@pytest.mark.parametrize(
    ("minutes", "others", "wanted"),
    [
        (1e-9, {}, 1),
        (10.0, {}, 2040),
        (20.0, {}, 4080),
        (10.0, {"seeds": (0, 1, 2)}, 680),
        (10.0, {"encodings": ("nope", "alibi")}, 1020),
        (10.0, {"encodings": ("rotary", "rotary+yarn")}, 2040),
        (10.0, {"tasks": ("text", "copy")}, 1020),
        (10.0, {"rates": (1.0, 0.3)}, 680),
    ],
)
def test_minutes_become_steps_in_proportion(monkeypatch: pytest.MonkeyPatch, minutes, others, wanted) -> None:
    """A step takes a quarter of a second by this clock, and 85 % of the minutes are for steps."""
    clock, planned = itertools.count(step=trainings.CALIBRATION_STEPS / 4), []
    monkeypatch.setattr(trainings, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    options = {"encodings": ("nope",), "seeds": (0,), "num_steps": None, "minutes": minutes, "task_length": 2}

    def plan(results: Results, seconds: float) -> None:
        planned.append(results.settings)
        raise KeyboardInterrupt

    with threads(1), pytest.raises(KeyboardInterrupt):
        compare(ids(), VOCAB, small(**{**options, **others}), on_plan=plan)
    assert [(each.num_steps, each.minutes) for each in planned] == [(wanted, minutes)]


def test_a_text_too_short_to_hold_out_a_window_is_refused_with_the_length_it_needs():
    longest = 5 * 8
    with pytest.raises(InputError, match=str((longest + 1) * 10)):
        compare(ids(400), VOCAB, small())
    assert compare(ids((longest + 1) * 10), VOCAB, small(encodings=("nope",), seeds=(0,))).records


def test_models_train_on_the_first_part_and_are_measured_on_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is a different one, so the ids tell where in the text they are from."""
    seen: dict[str, set[int]] = {}

    def training(model: object, candidate: object, ids: np.ndarray, settings: Settings, **_: object) -> float:
        seen["train"] = set(ids.tolist())
        return 0.0

    def measuring(model: object, ids: np.ndarray, length: int, **_: object) -> Losses:
        seen.setdefault("evaluate", set()).update(ids.tolist())
        return Losses(mean=0.0, by_position=[0.0] * length, by_window=[0.0])

    monkeypatch.setattr(trainings, "fit", training)
    monkeypatch.setattr(trainings, "losses_in_windows", measuring)
    monkeypatch.setattr(trainings, "in_context", lambda model, ids, *_: measuring(model, ids, 1).by_window)
    compare(np.arange(1_000), 1_000, small(encodings=("nope",), seeds=(0,)))
    assert seen == {"train": set(range(900)), "evaluate": set(range(900, 1_000))}


def test_little_text_gets_fewer_steps_unless_they_are_given() -> None:
    """16 epochs at most: 16 x 45 tokens are 36 steps of 4 windows of 5 tokens."""
    few = Settings(**{**SMALL, "num_steps": None, "encodings": ("nope",), "seeds": (0,), "multiples": (1,)})
    [record] = compare(ids(100), VOCAB, few).records
    assert record.steps == 16 * 90 // 20
    assert small().steps_for(90) == 3
    assert Settings().steps_for(194_970) == 300  # the sample text


def test_a_scaling_is_measured_with_the_model_that_was_trained_without(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Decoder] = []
    fit = trainings.fit
    monkeypatch.setattr(
        trainings, "fit", lambda model, *rest, **more: trained.append(model) or fit(model, *rest, **more)
    )
    names = ("rotary", "rotary+linear", "rotary+ntk", "rotary+yarn", "rotary+llama3")
    settings = small(encodings=names, seeds=(0,), multiples=(1, 4), train_length=8)
    records = {record.encoding: record for record in compare(ids(), VOCAB, settings).records}
    (model,) = trained
    assert [*records] == [*names]
    assert len({record.loss_by_length[8] for record in records.values()}) == 1
    assert len({record.loss_by_length[32] for record in records.values()}) == 5
    plain, held_out = model.embedding.encoding, split_held_out(ids(), settings.lengths[-1])[1]
    scalings = {
        "linear": Linear(factor=4.0),
        "ntk": NTK(factor=4.0),
        "yarn": YaRN(factor=4.0, original_max_seq_len=8),
        "llama3": Llama3(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8),
    }
    for name, scaling in scalings.items():
        model.embedding.encoding = type(plain)(plain.head_dim, scaling=scaling)
        assert records[f"rotary+{name}"].loss_by_length[32] == losses_in_windows(model, held_out, 32).mean
        assert records[f"rotary+{name}"].context_loss_by_stretch[32] == in_context(model, held_out, 32, 32)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"train_length": 0}, ("train_length",)),
        ({"num_steps": 0}, ("num_steps",)),
        ({"batch_size": 0}, ("batch_size",)),
        ({"seeds": ()}, ("seeds",)),
        ({"seeds": (1, 1)}, ("seeds", "each once")),
        ({"encodings": ()}, ("encodings",)),
        ({"encodings": ("rope", "rotary")}, ("each once",)),
        ({"encodings": ("alibbi",)}, ("alibbi", "alibi")),
        ({"encodings": ("alibi+yarn",)}, ("alibi", "no frequencies")),
        ({"encodings": ("rotary+yarm",)}, ("yarm", "yarn")),
        ({"encodings": ("rotary+",)}, ("scaling",)),
        ({"encodings": ("yarn",)}, ("rotary+yarn",)),
        ({"multiples": (0, 1)}, ("multiples",)),
        ({"d_model": 15}, ("d_model=15",)),
        ({"d_model": 6, "num_heads": 2}, ("even width",)),
        ({"learning_rate": 0.0}, ("learning_rate",)),
        ({"learning_rate": math.nan}, ("learning_rate",)),
        ({"minutes": 0.0}, ("minutes",)),
        ({"rates": (0.0,)}, ("rates",)),
        ({"rates": (1.0, 1.0)}, ("each once",)),
        ({"encodings": ("rotary@everywhere",)}, ("everywhere", "randomized")),
        ({"tasks": ()}, ("tasks",)),
        ({"tasks": ("coppy",)}, ("coppy", "copy")),
        ({"tasks": ("mqar",), "task_length": 64}, ("64", "mqar", "task_length=16")),
        ({"task_length": 0}, ("task_length",)),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], words: tuple[str, ...]) -> None:
    with refuses(RangeError, *words):
        small(**wrong)


def test_an_encoding_is_known_by_its_aliases() -> None:
    assert small(encodings=("RoPE", "ALiBi", "rope+yarn")).encodings == ("rotary", "alibi", "rotary+yarn")
