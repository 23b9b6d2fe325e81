"""What another position encoding does to a trained model: its loss by length and position, and recall of a pass key.

The same weights read the same text with each encoding; nothing is trained. Every length reads the same tokens, in
windows side by side. Work and memory are bounded by the number of windows, and what is finished is not done again.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.arguments import one_of, whole
from locant.checkpoints.swap import swap
from locant.checkpoints.swap.rotary_point import rotary_points
from locant.errors import InputError
from locant.lab.results import RESULTS, ResultsFolder, environment
from locant.lab.settings import VOCAB_SIZE
from locant.lab.training import evaluate
from locant.positions.base import PositionEncoding
from locant.positions.encodings.dual_chunk import DualChunk
from locant.positions.encodings.rerope import ReRoPE
from locant.positions.encodings.rotary import Rotary
from locant.positions.encodings.self_extend import SelfExtend
from locant.positions.rotary_by_class import RotaryByClass
from locant.positions.scaling import NTK, DynamicNTK, Linear, Scaling, YaRN
from locant.text.corpus import Corpus, read_corpus
from locant.text.tokenizer import Tokenizer

__all__ = [
    "AsDecoder", "EvaluationSettings", "at_once", "evaluate_model", "fingerprint", "interval_of_mean", "load_model",
    "require_rows",
]  # fmt: skip

SCALINGS: dict[str, Callable[[float, int], Scaling]] = {
    "linear": lambda factor, trained: Linear(factor=factor),
    "ntk": lambda factor, trained: NTK(factor=factor),
    "yarn": lambda factor, trained: YaRN(factor=factor, original_max_seq_len=trained),
    "dynamic": lambda factor, trained: DynamicNTK(factor=factor, original_max_seq_len=trained),
}
BY_CLASS: dict[str, Callable[[float, int, Rotary], RotaryByClass]] = {
    "self-extend": lambda group, trained, own: SelfExtend(own, math.ceil(group), max(1, trained // 4)),
    "rerope": lambda _, trained, own: ReRoPE(own, max(1, trained // 2)),
    "dual-chunk": lambda _, trained, own: DualChunk(own, max(2, trained * 3 // 4), trained // 16),
}
"""Of a group size, the trained length and the model's own encoding: its distances near by, bounded far away."""
USUAL_FACTOR = {"dynamic": 1.0, "self-extend": 8.0, "rerope": 1.0, "dual-chunk": 1.0}
NOT_YET = {
    "longrope": "whose factors are found for each model by a search, and are in no other model's configuration",
}
PLAIN = ("own", "exact", "nope")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
QUESTION = "What is the pass key? The pass key is"
RESAMPLES = 2000
LOGITS = 2**27
"""Of one batch, unless a single window has more: they are what memory goes to."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """What is measured.

    Args:
        lengths: windows of so many tokens.
        ways: encodings: ``own``, ``exact``, ``nope``; ``linear``, ``ntk``, ``yarn`` or ``dynamic`` with a factor behind
            a colon, such as ``yarn:4``; and ``self-extend:8``, with the size of a group, ``rerope`` or ``dual-chunk``.
        windows: at most so many of the longest length; the shorter ones read the same tokens.
        keys: pass keys that are hidden at each depth of each length; 0 for none.
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096)
    ways: tuple[str, ...] = ("own", "exact", "yarn:4")
    windows: int = 16
    keys: int = 2

    def __post_init__(self) -> None:
        if not self.lengths or not self.ways:
            raise InputError("got no lengths or no encodings", "--lengths 1024,4096 --with own,exact")
        lengths = {whole("lengths", length, 2, remedy="--lengths 1024,4096") for length in self.lengths}
        object.__setattr__(self, "lengths", tuple(sorted(lengths)))
        object.__setattr__(self, "ways", tuple(dict.fromkeys(self.ways)))
        whole("windows", self.windows, 1, remedy="--windows 16")
        whole("keys", self.keys, 0, remedy="--keys 2, or 0 for none")


def load_model(folder: str | Path) -> Any:
    """A causal language model of `transformers` from a folder of this machine, in the dtype it was saved in."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    path = Path(folder)
    if not (path / "config.json").is_file():
        raise InputError(f"got {path}, expected the folder of a model with its config.json", "a folder as saved")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if "auto_map" in config:
        raise InputError(f"got {path}, whose model has code of its own", "a model whose class is part of transformers")
    if "locant" in config:
        raise InputError(f"got {path}, which was saved with another encoding in it", "the model it was made from")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # of reading the weights: ours is the one that is shown
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        got = f"got {path}, which transformers cannot load: {str(error).splitlines()[0]}"
        raise InputError(got, "a model in safetensors, as save_pretrained writes it") from None
    finally:
        if shown:
            logging.enable_progress_bar()
    model, told = loaded
    if told["missing_keys"]:  # transformers draws them at random, and says so in a table
        got = f"got {path} without {min(told['missing_keys'])}, a weight of {type(model).__name__}"
        raise InputError(got, "a causal language model with its head")
    return model.eval()


def plan(way: str, model: Any, trained: int) -> PositionEncoding | None:
    """The encoding that `swap` is given for one of `EvaluationSettings.ways`; ``None`` for the model's own."""
    name, _, factor = way.partition(":")
    if name in NOT_YET:
        raise InputError(
            f"got {way}, {NOT_YET[name]}", "own, exact, nope, yarn:4, ntk:4, linear:4, dynamic or self-extend:8"
        )
    one_of("with", name, (*PLAIN, *SCALINGS, *BY_CLASS))
    if name in PLAIN:
        return PositionEncoding() if name == "nope" else None
    try:
        times = float(factor) if factor else USUAL_FACTOR[name]
    except (KeyError, ValueError):
        raise InputError(f"got {way}, expected a factor behind a colon", f"{name}:4") from None
    points = rotary_points(model, angles="exact")
    own = {repr(rotary): rotary for point in points for rotary in point.own.values()}
    if len(own) != 1:
        got = f"got {way} for {type(model).__name__}, which has {len(own)} rotary encodings"
        raise InputError(got, "own, exact or nope")
    rotary: Rotary = next(iter(own.values()))
    if name in BY_CLASS:
        return BY_CLASS[name](times, trained, rotary)
    return rotary.alike(scaling=SCALINGS[name](times, trained), seq_len=None)


def evaluate_model(
    folder: str,
    files: Sequence[str],
    settings: EvaluationSettings,
    *,
    output: Path,
    force: bool = False,
    on_step: Callable[[int, int], object] = lambda done, total: None,
) -> dict[str, Any]:
    """Measure a model with each encoding; returns what is in `results.json`, which is written anew after each.

    Encodings that an earlier call with the same model, text and settings finished are taken from there.
    """
    model = load_model(folder)
    trained = _trained_length(model)
    encodings = {way: plan(way, model, trained) for way in settings.ways}
    corpus = read_corpus(files, tokenizer=folder, usual_vocab_size=VOCAB_SIZE)
    longest = settings.lengths[-1]
    count = min(settings.windows, (len(corpus.ids) - 1) // longest)
    if not count:
        got = f"got a text of {len(corpus.ids):,} tokens, too short for a window of {longest:,}"
        raise InputError(got, f"a text of more than {longest:,} tokens, or shorter --lengths")
    require_rows(model, int(corpus.ids.max()))
    results = _results(settings, _facts(folder, corpus, count, trained))
    kept = _finished(output, results)
    place = ResultsFolder(output, force=force)
    steps = len(settings.lengths) * (1 + (len(DEPTHS) if settings.keys else 0))
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        on_step(done, steps * len(encodings))

    try:
        for way, encoding in encodings.items():
            if way in kept:
                done += steps
            else:
                with nullcontext() if way == "own" else swap(model, encoding):
                    kept[way] = _measured(model, way, trained, corpus, count * longest + 1, settings, step)
            results["records"].append(kept[way])
            place.write(results)
    finally:
        place.remove_if_empty()
    return results


def _results(settings: EvaluationSettings, text: dict[str, Any]) -> dict[str, Any]:
    """As `Results.to_dict`, without a record."""
    said = {name: [*value] if isinstance(value, tuple) else value for name, value in vars(settings).items()}
    return {"settings": {**said, "text": text}, "environment": environment(), "records": []}


def _trained_length(model: Any) -> int:
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    found = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
    if not isinstance(found, int):
        raise InputError(f"got {type(model).__name__} without max_position_embeddings", "a model that states it")
    return found


def require_rows(model: Any, largest: int) -> None:
    """Raise where a tokenizer has larger ids than the model."""
    if largest >= model.config.get_text_config().vocab_size:
        raise InputError(f"got a tokenizer with id {largest}, which the model has no row for", "the model's tokenizer")


def fingerprint(folder: str) -> str:
    """Of a model's configuration and the names and sizes of its weights."""
    path = Path(folder)
    weights = sorted((each.name, each.stat().st_size) for each in path.glob("*.safetensors"))
    return hashlib.sha256((path / "config.json").read_bytes() + repr(weights).encode()).hexdigest()


def _facts(folder: str, corpus: Corpus, count: int, trained: int) -> dict[str, Any]:
    name = Path(folder).name
    return {**corpus.facts(), "tokenizer": name, "model": name, "model_sha256": fingerprint(folder),
            "trained_length": trained, "windows": count}  # fmt: skip


def _finished(output: Path, results: Mapping[str, Any]) -> dict[str, Any]:
    """Records that an earlier call left in the folder, by their encodings, if all else was the same."""
    try:
        earlier = json.loads((output / RESULTS).read_text(encoding="utf-8"))
        same = {name: each for name, each in earlier["settings"].items() if name != "ways"}
        now = json.loads(json.dumps({name: each for name, each in results["settings"].items() if name != "ways"}))
        return {record["encoding"]: record for record in earlier["records"]} if same == now else {}
    except (OSError, ValueError, KeyError):
        return {}


def at_once(model: Any) -> int:
    """The tokens of a batch."""
    return LOGITS // model.config.get_text_config().vocab_size


class AsDecoder(nn.Module):
    """A model of transformers, called as the lab's own are."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, positions: object) -> Float[Tensor, "batch seq vocab"]:
        return self.model(ids.long(), use_cache=False).logits.float()


def _measured(
    model: Any, way: str, trained: int, corpus: Corpus, tokens: int, settings: EvaluationSettings,
    step: Callable[[], None],
) -> dict[str, Any]:  # fmt: skip
    began, losses = time.perf_counter(), {}
    for length in settings.lengths:
        losses[length] = evaluate(AsDecoder(model), corpus.ids[:tokens], length, batch_tokens=at_once(model))
        step()
    return {
        "encoding": way,
        "seed": 0,
        "train_length": trained,
        "loss_by_length": {str(length): _finite(loss.mean) for length, loss in losses.items()},
        "loss_by_position": [_finite(loss) for loss in losses[settings.lengths[-1]].by_position],
        "loss_by_window": {str(length): [*map(_finite, loss.by_window)] for length, loss in losses.items()},
        "interval_by_length": {str(length): interval_of_mean(loss.by_window) for length, loss in losses.items()},
        "pass_keys": _pass_keys(model, corpus.tokenizer, settings, step),
        "train_loss": None,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(time.perf_counter() - began, 3),
    }


@torch.no_grad()
def _pass_keys(
    model: Any, tokenizer: Tokenizer, settings: EvaluationSettings, step: Callable[[], None]
) -> list[dict[str, Any]]:
    """How many keys are recalled at each depth of each length: every token of one is the model's first choice."""
    found: list[dict[str, Any]] = []
    for length in settings.lengths if settings.keys else ():
        for depth in DEPTHS:
            rows = [_row_with_key(tokenizer, length, depth, seed) for seed in range(settings.keys)]
            fit = [row for row in rows if row is not None]
            recalled = sum(
                torch.equal(model(ids[None, :-1], use_cache=False).logits[0, -answer:].argmax(-1), ids[-answer:])
                for ids, answer in fit
            )
            found += [{"length": length, "depth": depth, "recalled": recalled, "asked": len(fit)}]
            step()
    return found


def _row_with_key(tokenizer: Tokenizer, length: int, depth: float, seed: int) -> tuple[Tensor, int] | None:
    """A row of `length` tokens that ends with the answer, and of how many tokens that is; ``None``: too short."""
    key = int(np.random.default_rng((length, int(100 * depth), seed)).integers(10_000, 100_000))
    needle = _encoded(tokenizer, f"The pass key is {key}. Remember it. {key} is the pass key. ")
    question, answer = _encoded(tokenizer, QUESTION), _encoded(tokenizer, f" {key}")
    room = length - len(needle) - len(question) - len(answer)
    if room < 0:
        return None
    sentence = _encoded(tokenizer, FILLER)
    filler = (sentence * (room // len(sentence) + 1))[:room]
    before = int(depth * room)
    return torch.tensor([*filler[:before], *needle, *filler[before:], *question, *answer]), len(answer)


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*map(int, tokenizer.encode(text))]


def interval_of_mean(values: Sequence[float]) -> list[float] | None:
    """The 95 % interval of a mean over neighbouring windows, by a circular block bootstrap (Politis & Romano 1992).

    Blocks of the cube root of the number of windows are drawn, 2 000 times, always the same ones; ``None`` where a
    loss is not finite, or there is one window.

    >>> interval_of_mean([1.0, 1.0, 1.0])
    [1.0, 1.0]
    """
    numbers = np.asarray(values, dtype=np.float64)
    count = len(numbers)
    if count < 2 or not np.isfinite(numbers).all():
        return None
    block = max(1, math.ceil(count ** (1 / 3)))
    starts = np.random.default_rng(0).integers(0, count, (RESAMPLES, math.ceil(count / block)))
    drawn = (starts[..., None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :count] % count
    low, high = np.quantile(numbers[drawn].mean(1), [0.025, 0.975])
    return [float(low), float(high)]


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
