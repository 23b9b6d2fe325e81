"""Tuning a model of some thousand weights: what is trained, what is written, and that a killed run goes on."""

from __future__ import annotations

import io
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import locant
from locant import files
from locant.checkpoints import load_swapped
from locant.errors import InputError
from locant.lab import TuneSettings, resume_state, tune, tuning
from locant.text.windows.loader import BatchSampler
from tests.lab.on_a_device import SMALL, TEXT, small_model
from tests.refusal import refuses
from tests.tolerances import LOGITS, SHORT_SUM, assert_close


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    small_model(folder, torch.bfloat16)
    return folder


@pytest.fixture
def here(original: Path, tmp_path: Path) -> Path:
    """A folder with a model and a text, to be written into."""
    return shutil.copytree(original, tmp_path / "here")


def tuned(here: Path, way: str, name: str = "out", force: bool = False, **settings: Any) -> dict[str, Any]:
    chosen = TuneSettings(way=way, **{**SMALL, **settings})
    return tune(here / "model", [str(here / "text.txt")], chosen, output=here / name, force=force)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_stretched_model_is_one_of_transformers_alone(here: Path) -> None:
    record = tuned(here, "yarn:4")
    assert record["settings"]["length"] == 64
    assert record["after_by_length"].keys() == {"16", "32", "64"}
    np.testing.assert_allclose(record["after_by_length"]["64"], np.mean(record["after"]), **SHORT_SUM)
    config = json.loads((here / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 64
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert config["rope_parameters"]["original_max_position_embeddings"] == 16
    model = AutoModelForCausalLM.from_pretrained(here / "out")
    assert model.dtype == torch.bfloat16
    assert type(model) is LlamaForCausalLM
    assert not same(here / "model", here / "out")
    assert sorted(each.name for each in (here / "out").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tuning.json",
    ]  # fmt: skip
    assert json.loads((here / "out" / "tuning.json").read_text()) == record
    assert not (here / "out-unfinished").exists()
    shutil.rmtree(here / "model")
    (here / "out").rename(here / "model")
    assert tuned(here, "own")["settings"]["length"] == 64, "what it was stretched to"


@pytest.mark.parametrize("way", ["own", "nope"])
def test_a_longer_training_is_stated_and_generation_goes_past_the_old_length(here: Path, way: str) -> None:
    (here / "model" / "tokenizer_config.json").write_text('{"model_max_length": 16}')
    tuned(here, way, length=48, num_steps=1)
    assert json.loads((here / "out" / "tokenizer_config.json").read_text()) == {"model_max_length": 48}
    model = AutoModelForCausalLM.from_pretrained(here / "out") if way == "own" else load_swapped(here / "out")
    assert model.config.max_position_embeddings == 48
    said = io.StringIO()
    handler, logger = logging.StreamHandler(said), transformers.utils.logging.get_logger("transformers")
    logger.addHandler(handler)
    model.generate(torch.ones(1, 30, dtype=torch.long), max_new_tokens=10, min_new_tokens=10, pad_token_id=0)
    logger.removeHandler(handler)
    assert "exceeded" not in said.getvalue()
    tuned(here, "yarn:2", "scaled", num_steps=1)
    (here / "model").rename(here / "old")
    (here / "scaled").rename(here / "model")
    tuned(here, "own", "longer", length=48, num_steps=1)
    assert json.loads((here / "longer" / "config.json").read_text())["max_position_embeddings"] == 32, "16 times 2"


def test_the_training_is_that_of_plain_torch(here: Path) -> None:
    """Written out: windows in the order of the seed, a warm-up and a cosine, clipped gradients, decay of matrices."""
    config = json.loads((here / "model" / "config.json").read_text()) | {"attention_dropout": 0.0}
    (here / "model" / "config.json").write_text(json.dumps(config))
    record = tuned(here, "own")
    model: Any = AutoModelForCausalLM.from_pretrained(here / "model", dtype=torch.float32)
    ids = torch.from_numpy(np.asarray(locant.Tokenizer.load(str(here / "model")).encode(TEXT))).long()
    cut = int(len(ids) * 0.9)
    order = list(BatchSampler(range((cut - 1) // 16), 2, seed=0))
    matrices, vectors = ([each for each in model.parameters() if (each.ndim > 1) is wide] for wide in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                                  betas=(0.9, 0.95))  # fmt: skip
    held_out = ids[cut:]

    def loss_of(text: torch.Tensor, first: int) -> torch.Tensor:
        return F.cross_entropy(model(text[None, first : first + 16]).logits[0], text[first + 1 : first + 17])

    assert record["before"][1] == pytest.approx(loss_of(held_out, 16).item(), abs=LOGITS)
    for step, rate in enumerate([1.0, 1.0, 0.775, 0.325]):
        loss = sum(loss_of(ids, 16 * int(window)) for window in order[step]) / 2
        assert record["train_loss"][step] == pytest.approx(loss.item(), abs=LOGITS * 10**step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * rate
        optimizer.step()
        optimizer.zero_grad()
    for name, each in weights(here / "out").items():
        assert_close(each, model.state_dict()[name].bfloat16())


def test_only_what_is_new_is_trained(here: Path) -> None:
    tuned(here, "kerple", train="new")
    model = load_swapped(here / "out")
    fresh = locant.Kerple(num_heads=2)
    before, after = weights(here / "model"), weights(here / "out")
    assert after.keys() - before.keys() == {"model.locant.0.r1", "model.locant.0.r2"}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.equal(after["model.locant.0.r1"], fresh.r1.detach().bfloat16())
    assert type(model.model.locant.get_submodule("0")) is locant.Kerple


def test_merged_adapters_are_what_they_add(here: Path) -> None:
    pytest.importorskip("peft")
    tuned(here, "ntk:2", "merged", train="lora", rank=2)
    tuned(here, "ntk:2", "alone", train="lora", rank=2, adapter=True)
    adapters = load_file(here / "alone" / "adapter_model.safetensors")
    before, after = weights(here / "model"), weights(here / "merged")
    for name, each in before.items():
        inner = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{inner}.lora_A.weight" in adapters:
            added = 2 * adapters[f"{inner}.lora_B.weight"].float() @ adapters[f"{inner}.lora_A.weight"].float()
            assert added.any()
            assert_close(after[name], (each.float() + added).bfloat16())
        else:
            assert torch.equal(after[name], each)
    both = [json.loads((here / name / "config.json").read_text())["rope_parameters"] for name in ("merged", "alone")]
    assert both[0] == both[1]
    assert both[0]["rope_theta"] > 10_000


def test_an_interrupted_run_ends_with_the_same_bits(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps and while the folder is written, in epochs of a batch and a rest; dropout draws the same numbers.

    What `minutes` chose, the same number of steps makes again.
    """
    steps_in_time = tuning._Run._steps_in_time
    monkeypatch.setattr(tuning._Run, "_steps_in_time", lambda run, seconds: max(3, min(5, steps_in_time(run, seconds))))
    monkeypatch.setattr(tuning, "SAVE_SECONDS", 0.0)
    chosen = TuneSettings(way="kerple", minutes=1.0, batch_size=30, learning_rate=1e-2)
    text, done, reports = [str(here / "text.txt")], [], list[str]()

    def interrupt(step: int, steps: int, said: str) -> None:
        done.append(step)
        reports.append(said.partition(", ")[2])
        if len(done) < 3:
            raise KeyboardInterrupt

    write = tuning._write

    def half(*given: Any, **options: Any) -> None:
        if len(done) >= 3 and not (here / "half").exists():
            (here / "half").touch()
            monkeypatch.setattr("locant.lab.tuning.flush", lambda path: (_ for _ in ()).throw(KeyboardInterrupt()))
        write(*given, **options)

    monkeypatch.setattr(tuning, "_write", half)
    for attempt in range(4):
        try:
            record = tune(here / "model", text, chosen, output=here / "out", on_step=interrupt)
        except KeyboardInterrupt:
            assert attempt < 3
            assert not (here / "out").exists()
            monkeypatch.setattr("locant.lab.tuning.flush", files.flush)
    assert done == [*range(1, record["num_steps"] + 1)]
    measured = {step: f"held-out {loss:.3f} at step {step}" for step, loss in record["held_out"]}
    during = [min(step, done[-1] - 1) for step in done]  # the last loss is measured after the last report
    expected = [measured[max(each for each in measured if each <= step)] for step in during]
    assert reports == expected, "a loss has the number of the step at which it was measured"
    again = tuned(here, "kerple", "again", num_steps=record["num_steps"], batch_size=30)
    assert same(here / "out", here / "again")
    assert {**again, "settings": 0} == {**record, "settings": 0}
    assert sorted(each.name for each in here.iterdir()) == ["again", "half", "model", "out", "text.txt"]


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from transformers import LlamaForCausalLM  # once for all
from locant.lab import TuneSettings, resume_state, tune, tuning

torch.set_num_threads(1)
tuning.SAVE_SECONDS = 0.0
here = Path(sys.argv[1])
for point in ("state", "step", "folder", "end", "no"):  # each in a process of its own, in which all is imported
    if not (child := os.fork()):
        break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(point, code, (here / "out").exists())
else:
    sys.exit()

def die(*given, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def half(tensors, path, metadata):
    if len(tuple(here.glob("out-unfinished/state.safetensors"))):
        Path(path).write_bytes(b"half of it")
        die()
    save(tensors, path, metadata)

save = resume_state.save_file
if point == "state":
    resume_state.save_file = half
if point == "folder":
    tuning.write_whole = die
if point == "end":
    resume_state.StateFolder.remove = die
chosen = TuneSettings(way="alibi", num_steps=4, batch_size=2, learning_rate=1e-2)
tune(here / "model", [str(here / "text.txt")], chosen, output=here / "out",
     on_step=lambda done, total, said: done == 2 and point == "step" and die())
"""


@pytest.mark.slow
def test_a_killed_process_goes_on_to_the_same_bits(here: Path) -> None:
    """By SIGKILL: while the state is written, between steps, while the folder is, and before the state is removed."""
    done = subprocess.run([sys.executable, "-uc", KILLED, here], capture_output=True, text=True, check=False)
    killed = [f"{point} -9 {point == 'end'}" for point in ("state", "step", "folder", "end")]
    assert done.stdout.splitlines() == [*killed, "no 0 True"], done.stderr
    assert not (here / "out-unfinished").exists()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tuned(here, "alibi", "again")
    torch.set_num_threads(threads)
    assert same(here / "out", here / "again")


def test_a_training_that_diverges_says_so_and_a_full_disk_keeps_what_there_is(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refuses(InputError, "diverged", "learning_rate=1e+29", "force=True"):
        tuned(here, "own", num_steps=8, learning_rate=1e30)

    def full(*_: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(resume_state, "save_file", full)
    with refuses(InputError, "cannot write", "No space left", "run the same command again"):
        tuned(here, "own", force=True)
    monkeypatch.undo()
    (here / "out-unfinished").mkdir()
    (here / "out-unfinished" / "state.safetensors").write_bytes(b"junk")
    with refuses(InputError, "not the state of an unfinished run", "force=True"):
        tuned(here, "own")
    for left in ("out-unfinished/.state.1.safetensors", ".out.0123abcd/model.safetensors"):  # by SIGKILL
        (here / left).parent.mkdir(exist_ok=True)
        (here / left).write_bytes(b"half of it")
    tuned(here, "own", force=True)
    assert sorted(each.name for each in here.iterdir()) == ["model", "out", "text.txt"]


def test_what_cannot_be_written_in_the_end_is_refused_before_the_training(here: Path) -> None:
    (here / "model" / "tokenizer_config.json").write_text("[]")
    with refuses(InputError, "tokenizer_config.json, which holds a list"):
        tuned(here, "own")
    assert not (here / "out-unfinished").exists()
    (here / "model" / "tokenizer_config.json").unlink()
    with resume_state.StateFolder(here / "out"), refuses(InputError, "another run"):
        tuned(here, "own")
    (here / "out").mkdir()
    (here / "out" / "config.json").write_text("{}")  # a model, but the text lies in it
    (here / "text.txt").rename(here / "out" / "text.txt")
    text = str(here / "out" / "text.txt")
    with refuses(InputError, "lies in the input"):
        tune(here / "model", [text], TuneSettings(way="own", **SMALL), output=here / "out", force=True)
    assert (here / "out" / "text.txt").exists()


def test_another_run_is_not_gone_on_with(here: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as told:
        tune(here / "model", [str(here / "text.txt")], TuneSettings(way="own", **SMALL), output=here / "out",
             on_step=stop)  # fmt: skip
    assert "the same command continues it" in told.value.__notes__[0]
    with refuses(InputError, "another way", "force=True"):
        tuned(here, "alibi", seed=1)
    assert tuned(here, "alibi", seed=1, force=True)["settings"]["seed"] == 1
    first = weights(here / "out")
    assert tuned(here, "alibi", seed=1)["settings"]["seed"] == 1, "finished, so nothing is done again"
    with refuses(InputError, "not empty", "a new folder"):
        tuned(here, "alibi")
    tuned(here, "alibi", force=True)
    assert not torch.equal(first["lm_head.weight"], weights(here / "out")["lm_head.weight"])


def test_weights_that_were_saved_in_place_are_of_another_run(here: Path) -> None:
    tuned(here, "own", num_steps=1)
    file = here / "model" / "model.safetensors"
    size, trained = file.stat().st_size, LlamaForCausalLM.from_pretrained(here / "model")
    trained.lm_head.weight.data *= 1.5
    trained.save_pretrained(here / "model")
    assert file.stat().st_size == size
    with refuses(InputError, "not empty", "a new folder"):
        tuned(here, "own", num_steps=1)
