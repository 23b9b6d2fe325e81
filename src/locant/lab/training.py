"""What can be compared, and how: a decoder trained on one text and measured on another, with AdamW and a cosine."""

from __future__ import annotations

import dataclasses
import inspect
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import nn
from torch.nn import functional as F

from locant.arguments import one_of, shown
from locant.errors import InputError, RangeError
from locant.lab.decoder import Decoder
from locant.lab.results import Losses
from locant.lab.settings import VOCAB_SIZE, Settings
from locant.positions import PositionEncoding
from locant.positions.base import ModelShape
from locant.positions.registry import encodings, find
from locant.positions.scaling import EXTENDING, SCALINGS, DynamicNTK, scaling_by_name
from locant.text import Tokenizer, Windows

HELD_OUT = 0.1
WARMUP_SHARE = 0.1
FINAL_SHARE = 0.1
CLIP_NORM = 1.0
WEIGHT_DECAY = 0.1
EVAL_TOKENS = 8_192  # in windows side by side; a longer one is read alone
CALIBRATION_STEPS = 4
BUILDING = threading.Lock()  # torch has one generator for all threads

OnStep = Callable[[int, float], None]
"""Called after every step with its number, from 1, and its loss."""

EXTENSIONS = tuple(name for name in EXTENDING if name != DynamicNTK.info.name)
"""The scalings that extend a context by a factor, whatever the length of a sequence."""

OPTIONS: dict[str, dict[str, float]] = {
    "learned": {"init_std": 1.0},  # as large as the decoder's scaled token rows, or it would have little effect
    "learned_grid": {"init_std": 1.0},
    "convolutional": {"causal": True},
}


@dataclass(frozen=True)
class Contestant:
    """An encoding, and how it is scaled beyond the trained length.

    The model is trained with the plain encoding, and not again with the scaled one: at each longer length the
    frequencies are scaled by length / trained length, as for a model whose context is extended without fine-tuning.
    """

    encoding: str
    scaling: str = ""

    @classmethod
    def of(cls, name: str) -> Contestant:
        """The contestant of a name such as ``alibi`` or ``rotary+yarn``."""
        encoding, plus, scaling = str(name).replace("++", "_plus_plus").partition("+")  # of RoPE++
        if encoding in SCALINGS:
            raise RangeError(f"got {shown(name)}, which is a scaling of rotary", f"rotary+{encoding}")
        kind = find(encoding)
        encoding = next(known for known, each in encodings().items() if each is kind)
        if plus and "scaling" not in inspect.signature(kind).parameters:
            cause = f"got {shown(name)}, but {encoding} has no frequencies to scale"
            raise RangeError(cause, f"{encoding}, or rotary+yarn")
        if plus:
            remedy = " or ".join(f"{encoding}+{known}" for known in EXTENSIONS)
            scaling = one_of("a scaling", scaling.strip().lower(), EXTENSIONS, remedy)
        return cls(encoding, scaling)

    @property
    def name(self) -> str:
        return f"{self.encoding}+{self.scaling}" if self.scaling else self.encoding

    def build(self, shape: ModelShape) -> PositionEncoding:
        """The encoding as it is trained."""
        return find(self.encoding).for_model(shape, **OPTIONS.get(self.encoding, {}))

    def at_length(self, trained: Any, length: int, train_length: int, shape: ModelShape) -> PositionEncoding:
        """The trained encoding as it is used in windows of `length` tokens."""
        if not self.scaling or length <= train_length:
            return trained
        dim, base = getattr(trained, "rotary_dim", shape.head_dim), getattr(trained, "base", 10_000.0)
        scaling = scaling_by_name(f"{self.scaling}:{length / train_length}", train_length, dim, base)
        scaled = find(self.encoding).for_model(shape, scaling=scaling)
        scaled.load_state_dict(trained.state_dict())
        return scaled


def train(
    text: str,
    encoding: str = "rotary",
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    on_step: OnStep | None = None,
    **settings: Any,
) -> tuple[Decoder, Tokenizer]:
    """A small decoder trained on a text, and its tokenizer.

    Args:
        text: all of it is trained on.
        encoding: the name of an encoding; a learned one has a position for each token of a training window.
        tokenizer: default: byte-pair encoding with `vocab_size` entries, trained on the text.
        settings: those of `Settings` for one training: ``num_steps``, ``train_length``, ``batch_size``,
            ``learning_rate``, ``d_model``, ``num_layers``, ``num_heads``, ``minutes``.

    >>> model, tokenizer = train("to be, or not to be. " * 40, "alibi", vocab_size=300, num_steps=2, d_model=32)
    >>> model(torch.from_numpy(tokenizer.encode("to be")).long()[None]).shape[-1] == tokenizer.vocab_size
    True
    """
    contestant = Contestant.of(encoding)
    if contestant.scaling:
        raise RangeError(f"got {encoding!r}, but a scaling is not trained", repr(contestant.encoding))
    chosen = Settings(encodings=(encoding,), multiples=(1,), seeds=(seed,), **settings)
    tokenizer = Tokenizer.train([text], vocab_size) if tokenizer is None else tokenizer
    ids = np.asarray(tokenizer.encode(text))
    chosen = dataclasses.replace(chosen, num_steps=num_steps(ids, tokenizer.vocab_size, chosen))
    model = build(contestant, seed, tokenizer.vocab_size, chosen)
    fit(model, ids, chosen, seed=seed, on_step=on_step)
    return model.eval(), tokenizer


def build(contestant: Contestant, seed: int, vocab_size: int, settings: Settings) -> Decoder:
    """An untrained model. What encodings draw comes after the weights: those that all models share start the same."""

    def decoder(encoding: PositionEncoding) -> Decoder:
        torch.manual_seed(seed)
        return Decoder(
            vocab_size, encoding,
            d_model=settings.d_model, num_layers=settings.num_layers, num_heads=settings.num_heads,
        )  # fmt: skip

    with BUILDING, torch.random.fork_rng(devices=[]):
        decoder(PositionEncoding())
        return decoder(contestant.build(shape(settings)))


def shape(settings: Settings) -> ModelShape:
    """The sizes that encodings are built for."""
    return ModelShape(d_model=settings.d_model, num_heads=settings.num_heads, max_seq_len=settings.lengths[-1])


def fit(
    model: Decoder, ids: Int[np.ndarray, " tokens"], settings: Settings, *, seed: int, on_step: OnStep | None = None
) -> float:
    """Train in place on windows drawn at random, for `settings.num_steps` steps.

    Returns the mean loss, in nats per token, over the last tenth of the steps.
    """
    windows, steps = Windows(ids, settings.train_length, stride=1), settings.steps_for(len(ids))
    order = torch.Generator().manual_seed(seed)
    optimizer = optimizer_of(model.parameters(), settings.learning_rate)
    optimizer.zero_grad()
    losses = []
    model.train()
    for step in range(steps):
        batch = windows.__getitems__(torch.randint(len(windows), (settings.batch_size,), generator=order).tolist())
        loss = F.cross_entropy(model(batch["ids"], batch["positions"]).flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        update(model.parameters(), optimizer, settings.learning_rate * schedule(step, steps))
        losses.append(loss.item())
        if on_step is not None:
            on_step(step + 1, losses[-1])
    return float(np.mean(losses[-max(1, steps // 10) :]))


def split_off(ids: Int[np.ndarray, " tokens"], longest: int) -> tuple[np.ndarray, np.ndarray]:
    """The part of a text that is trained on, and the last tenth, which holds a window of `longest` tokens."""
    cut = int(len(ids) * (1 - HELD_OUT))
    if len(ids) - cut <= longest:
        remedy = f"a text of at least {math.ceil((longest + 1) / HELD_OUT)} tokens, or a shorter length"
        raise InputError(f"got a text of {len(ids)} tokens, too short to hold out a window of {longest}", remedy)
    return ids[:cut], ids[cut:]


def unigram_loss(training: Int[np.ndarray, " tokens"], held_out: Int[np.ndarray, " more"], vocab_size: int) -> float:
    """What counting alone knows: nats per token of a held-out text, by how often each token is in the training text.

    Nothing of what stands before a token is used. The targets are those of `losses_in_windows`, at any length. Tokens
    that do not occur share what Witten & Bell (1991, method C) leave them: as much as if each of those that do had once
    been new.

    >>> round(unigram_loss(np.array([0, 0, 0, 1]), np.array([1, 0, 1]), 2), 4)  # shares of 4/6 and 2/6
    0.752
    """
    counts = np.bincount(training, minlength=vocab_size)
    new = np.count_nonzero(counts)
    shares = (counts + new / vocab_size) / (len(training) + new)
    return float(-np.log(shares[held_out[1:]]).mean())


@torch.no_grad()
def losses_in_windows(model: Any, ids: Int[np.ndarray, " tokens"], length: int) -> Losses:
    """The losses of `ids` in windows of `length` tokens; each target counts once.

    Args:
        model: a module with `losses`, as `Decoder` has it; these may be on another device.
    """
    model.eval()
    windows = Windows(ids, length)
    total, count = torch.zeros(2, length, dtype=torch.float64)
    by_window: list[float] = []
    batch_size = max(1, EVAL_TOKENS // length)
    for first in range(0, len(windows), batch_size):
        batch = windows.__getitems__(list(range(first, min(first + batch_size, len(windows)))))
        loss = model.losses(**batch).cpu().double()
        real = batch["targets"] >= 0
        total += loss.sum(0)
        count += real.sum(0)
        by_window += (loss.sum(1) / real.sum(1)).tolist()
    return Losses(float(total.sum() / count.sum()), (total / count).tolist(), by_window)


def num_steps(ids: Int[np.ndarray, " tokens"], vocab_size: int, settings: Settings, at_once: int = 1) -> int:
    """The training steps of these settings: as given, as fit in the minutes, or by the amount of text.

    `at_once` is how many models train at the same time.
    """
    if settings.minutes is None:
        return settings.steps_for(len(ids))
    encodings = {Contestant.of(name).encoding for name in settings.encodings}
    with ThreadPoolExecutor(at_once) as pool:
        seconds = statistics.fmean(pool.map(lambda each: timed(each, ids, vocab_size, settings)[1], encodings))
    rounds = math.ceil(len(encodings) * len(settings.seeds) / at_once)
    return max(1, int(0.85 * settings.minutes * 60 / (seconds * rounds)))


def timed(encoding: str, ids: Int[np.ndarray, " tokens"], vocab_size: int, settings: Settings) -> tuple[Decoder, float]:
    """A model after a few training steps, and the seconds that each of them took."""
    model = build(Contestant(encoding), settings.seeds[0], vocab_size, settings)
    fit(model, ids, dataclasses.replace(settings, num_steps=2), seed=0)  # the first use of an operation takes longer
    began = time.perf_counter()
    fit(model, ids, dataclasses.replace(settings, num_steps=CALIBRATION_STEPS), seed=0)
    return model, (time.perf_counter() - began) / CALIBRATION_STEPS


def optimizer_of(parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """Weight decay for matrices only: gains and biases have no reason to shrink."""
    given = list(parameters)
    matrices = {"params": [each for each in given if each.ndim >= 2], "weight_decay": WEIGHT_DECAY}
    vectors = {"params": [each for each in given if each.ndim < 2], "weight_decay": 0.0}
    return torch.optim.AdamW([matrices, vectors], lr=learning_rate, betas=(0.9, 0.95), fused=True)


def update(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, rate: float) -> None:
    """One step with the gradients that there are, clipped; none are left."""
    nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def schedule(step: int, num_steps: int) -> float:
    """Rises linearly over the first tenth, then falls along a cosine to a tenth."""
    warmup = max(1, int(num_steps * WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))
