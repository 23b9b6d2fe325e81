"""Train a decoder on a text with AdamW and a cosine schedule, and measure it on another text."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from locant.errors import InputError
from locant.lab.candidate import Candidate
from locant.lab.decoder import Decoder
from locant.lab.results import Losses
from locant.lab.settings import TEXT, Settings
from locant.positions import PositionEncoding, Positions
from locant.positions.base import ModelShape
from locant.text import Windows

HELD_OUT = 0.1
WARMUP_SHARE = 0.1
FINAL_SHARE = 0.1
CLIP_NORM = 1.0
WEIGHT_DECAY = 0.1
EVAL_TOKENS = 8_192  # tokens per batch of windows, unless a single window is longer
OVERLAP = 8
"""The number of times that a model reads each token if windows overlap."""

STRETCHES = 16
"""The largest number of stretches that are read with full context. It suffices to find a difference in any text."""

BUILDING = threading.Lock()  # because torch has one generator for all threads

OnStep = Callable[[int, float], None]
"""Called after every step with its number, starting at 1, and its loss."""


def build(
    candidate: Candidate, seed: int, vocab_size: int, settings: Settings, *, longest: int, task: str = TEXT
) -> Decoder:
    """Build an untrained model. The encoding's weights are drawn last, so the shared weights of all models are equal.

    Args:
        longest: tokens in the longest row that the model will read, for a table of positions.
    """

    def decoder(encoding: PositionEncoding) -> Decoder:
        torch.manual_seed(seed)
        return Decoder(
            vocab_size, encoding,
            d_model=settings.d_model, num_layers=settings.layers_for(task), num_heads=settings.num_heads,
            qk_norm=settings.qk_norm,
        )  # fmt: skip

    with BUILDING, torch.random.fork_rng(devices=[]):
        decoder(PositionEncoding())
        return decoder(candidate.build(shape(settings, longest))).to(settings.device)


def shape(settings: Settings, longest: int) -> ModelShape:
    """Return the sizes for an encoding. A table of positions will have `longest` rows."""
    return ModelShape(d_model=settings.d_model, num_heads=settings.num_heads, max_seq_len=longest)


def fit(
    model: Decoder, candidate: Candidate, ids: Int[np.ndarray, " tokens"], settings: Settings, *, num_steps: int,
    seed: int, rate: float = 1.0, on_step: OnStep | None = None,
) -> float:  # fmt: skip
    """Train a model in place on random windows.

    Return the mean loss, in nats per token, over the last tenth of the steps.
    """
    windows, batch_size = Windows(ids, settings.train_length, stride=1), settings.batch_for(TEXT)
    order, highest = torch.Generator().manual_seed(seed), settings.learning_rate * rate
    optimizer = optimizer_of(model.parameters(), highest)
    optimizer.zero_grad()
    losses = []
    model.train()
    for step in range(num_steps):
        batch = windows.__getitems__(torch.randint(len(windows), (batch_size,), generator=order).tolist())
        positions = candidate.positions(batch["ids"], settings.lengths[-1], step)
        loss = model.losses(batch["ids"], batch["targets"], positions).mean()
        loss.backward()
        update(model.parameters(), (optimizer, highest * schedule(step, num_steps)))
        losses.append(loss.item())
        if on_step is not None:
            on_step(step + 1, losses[-1])
    return float(np.mean(losses[-max(1, num_steps // 10) :]))


def split_held_out(ids: Int[np.ndarray, " tokens"], longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Split off the last tenth of a text. Raise `InputError` if it is too short for a window of `longest` tokens."""
    cut = int(len(ids) * (1 - HELD_OUT))
    if len(ids) - cut <= longest:
        remedy = f"use a text of at least {math.ceil((longest + 1) / HELD_OUT)} tokens, or a shorter length"
        raise InputError(f"got a text of {len(ids)} tokens, too short to hold out a window of {longest}", remedy)
    return ids[:cut], ids[cut:]


class CountingLosses(NamedTuple):
    """The losses of predictions from the counts of a training text, in nats per token of a held-out text."""

    unigram: float
    """The loss from the frequency of each token, without any context."""
    bigram: float
    """The loss from the frequency of each token after the token before it."""


def count(training: Int[np.ndarray, " tokens"], held_out: Int[np.ndarray, " more"], vocab_size: int) -> CountingLosses:
    """Return the losses of counting. The targets are the same as in `losses_in_windows` at any length.

    All tokens share the probability that Witten & Bell (1991, method C) reserve for tokens that did not occur. If d
    different tokens occurred among n tokens, this probability is d / (n + d). For unigrams, it is shared equally. For
    bigrams, n and d count the tokens after the given token, and the probability is shared in proportion to the unigram
    probabilities.

    >>> losses = count(np.array([0, 0, 1, 0, 1]), np.array([0, 1, 0]), 2)  # unigram: 4/7 and 3/7
    >>> [round(math.exp(-2 * loss), 4) for loss in losses]  # 3/7 * 4/7, and behind 0 and 1 (2 + 2 * 3/7) / 5 and 11/14
    [0.2449, 0.449]
    """
    before, after = held_out[:-1].astype(np.int64), held_out[1:].astype(np.int64)
    counts = np.bincount(training, minlength=vocab_size)
    new = np.count_nonzero(counts)
    shares = (counts + new / vocab_size) / (len(training) + new)
    pairs, times = np.unique(training[:-1].astype(np.int64) * vocab_size + training[1:], return_counts=True)
    place = np.searchsorted(pairs, before * vocab_size + after).clip(max=len(pairs) - 1)
    follows = np.where(pairs[place] == before * vocab_size + after, times[place], 0)
    kinds, all_times = (np.bincount(pairs // vocab_size, each, vocab_size)[before] for each in (None, times))
    behind = np.where(kinds > 0, (follows + kinds * shares[after]) / np.maximum(all_times + kinds, 1), shares[after])
    return CountingLosses(float(-np.log(shares[after]).mean()), float(-np.log(behind).mean()))


@torch.no_grad()
def losses_in_windows(
    model: Any,
    ids: Int[np.ndarray, " tokens"],
    length: int,
    *,
    stride: int | None = None,
    positions: Callable[[Tensor], Positions] | None = None,
) -> Losses:
    """Return the losses of `ids` in windows of `length` tokens. Each target counts once.

    Args:
        model: a module with a method `losses` like `Decoder.losses`. The losses may be on another device.
        stride: tokens from one window to the next. The last `stride` targets of each window count. Default: `length`.
        positions: returns the positions of a batch of ids. Default: 0, 1, 2, ... in each window.
    """
    model.eval()
    windows, counting = Windows(ids, length, stride=stride), stride or length
    total, count = torch.zeros(2, counting, dtype=torch.float64)
    by_window: list[float] = []
    batch_size = max(1, EVAL_TOKENS // length)
    for first in range(0, len(windows), batch_size):
        batch = windows.collate(windows.__getitems__(range(first, min(first + batch_size, len(windows)))))
        if positions is not None:
            batch["positions"] = positions(batch["ids"])
        loss = model.losses(**batch)[:, -counting:].cpu().double()
        real = batch["targets"][:, -counting:] >= 0
        total += loss.sum(0)
        count += real.sum(0)
        by_window += (loss.sum(1) / real.sum(1)).tolist()
    return Losses(float(total.sum() / count.sum()), (total / count).tolist(), by_window)


def in_context(
    model: Any, ids: Int[np.ndarray, " tokens"], length: int, longest: int,
    positions: Callable[[Tensor], Positions] | None = None,
) -> list[float]:  # fmt: skip
    """Return the mean losses of stretches of `longest` targets, which have about `length` tokens before them.

    Every length has the same targets, which are the last tokens of `ids`, in at most `STRETCHES` stretches. Windows
    overlap and start an eighth of their length apart, or less. So each target has at least seven eighths of a window
    before it. This costs at least eight times as much as windows without overlap.
    """
    stride = next(size for size in range(max(1, length // OVERLAP), 0, -1) if longest % size == 0)
    stretches = min(STRETCHES, len(ids) // longest - 1)
    first = len(ids) - stretches * longest if stretches > 0 else longest
    losses = losses_in_windows(model, ids[first + stride - 1 - length :], length, stride=stride, positions=positions)
    if stretches < 1:  # fewer targets than a stretch has
        return [losses.mean]
    return np.reshape(losses.by_window, (stretches, -1)).mean(1).tolist()


def optimizer_of(parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices only, because gains and biases have no reason to shrink."""
    trained = list(parameters)
    matrices = {"params": [each for each in trained if each.ndim >= 2], "weight_decay": WEIGHT_DECAY}
    vectors = {"params": [each for each in trained if each.ndim < 2], "weight_decay": 0.0}
    return torch.optim.AdamW([matrices, vectors], lr=learning_rate, betas=(0.9, 0.95), fused=True)


def update(parameters: Iterable[nn.Parameter], *optimizers: tuple[torch.optim.Optimizer, float]) -> None:
    """Clip all gradients together, take one step of each optimizer at its rate, and clear the gradients."""
    nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
    for optimizer, rate in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()


def schedule(step: int, num_steps: int) -> float:
    """Return the factor of the learning rate. It rises linearly in the first tenth and falls to 0.1 as a cosine."""
    warmup = max(1, int(num_steps * WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))
