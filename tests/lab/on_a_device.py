"""The work of `test_device.py`, in a process of its own: ``python -m tests.lab.on_a_device other FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import locant
from locant.checkpoints.config_source import read_source
from locant.checkpoints.extension import extend
from locant.lab import Settings, TuneSettings, compare, tune, tuning
from locant.lab.evaluation import EvaluationSettings, evaluate_model
from locant.lab.factor_search import search_factors
from tests.gpu_without_gpu import other_device

__all__ = ["SMALL", "TEXT", "small_model"]

TEXT = "the cat sat on the mat; the rat sat on the cat. a dog saw both of them and went away. " * 60
COMPARED = {
    "encodings": ("rotary+yarn", "alibi", "learned@randomized", "cope", "fox"), "tasks": ("text", "copy"),
    "seeds": (0,), "train_length": 8, "multiples": (1, 4), "task_length": 3, "num_steps": 8, "batch_size": 4,
    "d_model": 16, "num_heads": 2,
}  # fmt: skip
WAYS = ("own", "exact", "nope", "yarn:4", "dynamic:2", "self-extend:4", "alibi", "learned", "cope")
ASKED = {"lengths": (400,), "ways": ("own",), "windows": 1, "keys": 1}
SMALL = {"num_steps": 4, "batch_size": 2, "learning_rate": 1e-2}
TUNED = {"way": "kerple", **SMALL}


def small_model(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[str, list[str]]:
    """A model with dropout, trained at 16 tokens as it says, and a text."""
    (folder / "text.txt").write_text(TEXT)
    tokenizer = locant.Tokenizer.train([TEXT], 290)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, attention_dropout=0.1,
        vocab_size=tokenizer.vocab_size, max_position_embeddings=16, initializer_range=0.3, dtype=dtype,
    )  # fmt: skip
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder / "model")
    tokenizer.save(folder / "model" / "tokenizer.json")
    return str(folder / "model"), [str(folder / "text.txt")]


def interrupted(model: str, files: list[str], device: str, output: Path) -> dict[str, Any]:
    """A tuning that stops after two steps, and then goes on; in between other numbers are drawn."""

    def stop(done: int, total: int, said: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    tuning.SAVE_SECONDS = 0.0
    settings = TuneSettings(**TUNED, device=device)
    try:
        tune(model, files, settings, output=output, on_step=stop)
    except KeyboardInterrupt:
        torch.manual_seed(99)
    try:
        tune(model, files, TuneSettings(**TUNED, device="cpu"), output=output)
    except locant.InputError as error:
        return {**tune(model, files, settings, output=output), "elsewhere": str(error)}
    raise AssertionError("another device goes on with it")


def main(device: str, folder: Path) -> dict[str, Any]:
    """What there was found, on the CPU and on the device."""
    if device == other_device.OTHER:
        other_device.register()
    model, files = small_model(folder)
    asked = {"lengths": (16, 64), "ways": WAYS, "windows": 4, "keys": 0}
    extension = extend(read_source(model), to=64, method="longrope")
    found: dict[str, Any] = {}
    for where in ("cpu", device):
        settings = EvaluationSettings(**asked, device=where)
        place = folder / f"found-{where}"
        found[f"evaluated {where}"] = evaluate_model(model, files, settings, output=place)
        again = evaluate_model(model, files, settings, output=place)
        assert again["records"] == found[f"evaluated {where}"]["records"], "finished, so nothing is done again"
        if device != other_device.OTHER:  # of which transformers makes no cache
            asking = EvaluationSettings(**ASKED, device=where)
            [record] = evaluate_model(model, files, asking, output=folder / f"asked-{where}")["records"]
            found[f"asked {where}"] = record["pass_keys"]
        measured = place / "search.json"
        search_factors(model, files, extension, record=measured, generations=1, windows=1, device=where)
        found[f"searched {where}"] = json.loads(measured.read_text())["measured"][:3]
        results = compare(np.arange(3_000) ** 2 % 29, 29, Settings(**COMPARED, device=where))
        found[f"compared {where}"] = results.to_dict()
    found["tuned"] = tune(model, files, TuneSettings(**TUNED, device=device), output=folder / "whole")
    found["tuned again"] = interrupted(model, files, device, folder / "interrupted")
    return found


if __name__ == "__main__":
    there = Path(sys.argv[2])
    (there / "found.json").write_text(json.dumps(main(sys.argv[1], there)))
