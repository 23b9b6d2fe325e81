"""Does `locant audit` find lies about positions in trained models? The lies of `lies.py`, each at short windows first.

A lie is found if the best reading undoes it. It is found among others if the reading that undoes it is within noise of
the best. The first losses of some audits are computed a second time, by `transformers` and torch alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.real_models import lies, weights
from benchmarks.real_models.lies import LIES, TRUTH, Lie
from benchmarks.real_models.record import RESULTS, Record
from locant.lab.audit import audit
from locant.text import sample_text

__all__ = ["run", "summary"]

PART = "audit"
WINDOWS = 10
"""The number of windows, which is the smallest that allows a verdict."""
CHECKED = ("smollm2-truth", "base-10000", "interleaved", "gemma3-truth", "local-base", "full-layers-none")
"""The audits whose first losses are computed a second time."""
FOUND, AMONG, MISSED = "found", "found among others", "missed"


def found(lie: Lie, audited: Mapping[str, Any]) -> str:
    """Return whether an audit found a lie."""
    if audited["best"] == lie.truth:
        return FOUND
    return AMONG if audited["best"] != TRUTH and lie.truth in audited["within_noise"] else MISSED


def _audit(lie: Lie, length: int) -> dict[str, Any]:
    last = ""

    def on_step(done: int, total: int, reading: str) -> None:
        nonlocal last
        if reading != last:
            last = reading
            print(f"  {done} of {total} windows, {reading}", flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        lies.write(lie, weights.folder(lie.model), Path(temporary), weights.path(lie.model))
        began = time.perf_counter()
        got = audit(temporary, length=length, windows=WINDOWS, on_step=on_step)
    kept = ("verdict", "sentence", "best", "within_noise", "dropped", "left_out")
    seconds = round(time.perf_counter() - began, 1)
    losses = {name: round(loss, 5) for name, loss in got["losses"].items()}
    return {key: got[key] for key in kept} | {"losses": losses, "unigram": round(got["unigram"], 5), "seconds": seconds}


@torch.inference_mode()
def _by_transformers(lie: Lie, length: int) -> float:
    """Return the mean loss of a lie in the same windows, by `transformers` and torch alone."""
    import transformers

    with tempfile.TemporaryDirectory() as temporary:
        lies.write(lie, weights.folder(lie.model), Path(temporary), weights.path(lie.model))
        model = transformers.AutoModelForCausalLM.from_pretrained(temporary, dtype=torch.float32).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(temporary)
    ids = torch.tensor(tokenizer(sample_text(), add_special_tokens=False).input_ids[: WINDOWS * length + 1])
    beginning, losses = torch.tensor(tokenizer("").input_ids, dtype=torch.long), list[float]()
    for begin in range(0, WINDOWS * length, length):
        window = ids[begin : begin + length].clone()
        window[: len(beginning)] = beginning
        logits = model(window[None], use_cache=False).logits[0]
        losses.append(F.cross_entropy(logits.double(), ids[begin + 1 : begin + length + 1]).item())
    return round(sum(losses) / len(losses), 5)


def run(*, anew: bool = False, folder: Path = RESULTS) -> None:
    """Audit the truth and every lie."""
    record = Record(PART, ["smollm2", "gemma3"], anew=anew, folder=folder, summary=summary)
    for name, lie in LIES.items():
        for length in lie.lengths:
            settings = {"truth": lie.truth, "length": length, "windows": WINDOWS}
            audited = record.measure(f"{name}/{length}", settings, _measurement(_audit, lie, length))
            if lie.truth != TRUTH and found(lie, audited) == FOUND:
                break
    for name in CHECKED:
        length = LIES[name].lengths[0]
        settings = {"length": length, "windows": WINDOWS}
        record.measure(f"check/{name}", settings, _measurement(_by_transformers, LIES[name], length))
    record.write()


def _measurement(function: Callable[[Lie, int], Any], lie: Lie, length: int) -> Callable[[], Any]:
    return lambda: function(lie, length)


def summary(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was found of each lie, at which length, and what the second calculation says."""
    rows = {}
    for name, lie in LIES.items():
        at = {length: measured[f"{name}/{length}"] for length in lie.lengths if f"{name}/{length}" in measured}
        if not at:
            continue
        last = [*at.values()][-1]
        own = last["losses"][TRUTH]
        rows[name] = {
            "model": lie.model, "sentence": lie.sentence, "truth": lie.truth, "lengths": [*at], "windows": WINDOWS,
            "outcome": found(lie, last), "verdict": last["verdict"], "best": last["best"],
            "within_noise": last["within_noise"], "loss": own,
            "gain": round(own - last["losses"][last["best"]], 3),
            "seconds": round(sum(each["seconds"] for each in at.values()), 1),
        }  # fmt: skip
    checks = {}
    for name in CHECKED:
        if (second := measured.get(f"check/{name}")) is not None:
            first = measured[f"{name}/{LIES[name].lengths[0]}"]["losses"][TRUTH]
            checks[name] = {"audit": first, "transformers": second, "difference": round(abs(first - second), 5)}
    told = [row for name, row in rows.items() if LIES[name].truth != TRUTH]
    counts = {outcome: sum(row["outcome"] == outcome for row in told) for outcome in (FOUND, AMONG, MISSED)}
    return {"counts": counts, "rows": rows, "checks": checks}
