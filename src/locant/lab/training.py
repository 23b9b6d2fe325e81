"""What can be compared, and how: a decoder trained on one text and measured on another, with AdamW and a cosine."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.errors import InputError
from locant.lab.contestant import Contestant
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
EVAL_TOKENS = 8_192  # in windows side by side; a longer one is read alone
BUILDING = threading.Lock()  # torch has one generator for all threads

OnStep = Callable[[int, float], None]
"""Called after every step with its number, from 1, and its loss."""


def build(
    contestant: Contestant, seed: int, vocab_size: int, settings: Settings, *, longest: int, task: str = TEXT
) -> Decoder:
    """An untrained model. What encodings draw comes after the weights: those that all models share start the same.

    Args:
        longest: tokens of the longest row that it will read, for a table of positions.
    """

    def decoder(encoding: PositionEncoding) -> Decoder:
        torch.manual_seed(seed)
        return Decoder(
            vocab_size, encoding,
            d_model=settings.d_model, num_layers=settings.layers_for(task), num_heads=settings.num_heads,
        )  # fmt: skip

    with BUILDING, torch.random.fork_rng(devices=[]):
        decoder(PositionEncoding())
        return decoder(contestant.build(shape(settings, longest)))


def shape(settings: Settings, longest: int) -> ModelShape:
    """What an encoding is made for, with a table of `longest` positions where it has one."""
    return ModelShape(d_model=settings.d_model, num_heads=settings.num_heads, max_seq_len=longest)


def fit(
    model: Decoder, contestant: Contestant, ids: Int[np.ndarray, " tokens"], settings: Settings, *, seed: int,
    rate: float = 1.0, on_step: OnStep | None = None,
) -> float:  # fmt: skip
    """Train in place on windows drawn at random, for `settings.num_steps` steps.

    Returns the mean loss, in nats per token, over the last tenth of the steps.
    """
    windows, steps = Windows(ids, settings.train_length, stride=1), settings.steps_for(len(ids))
    batch_size = settings.batch_for(TEXT)
    order, highest = torch.Generator().manual_seed(seed), settings.learning_rate * rate
    optimizer = optimizer_of(model.parameters(), highest)
    optimizer.zero_grad()
    losses = []
    model.train()
    for step in range(steps):
        batch = windows.__getitems__(torch.randint(len(windows), (batch_size,), generator=order).tolist())
        positions = contestant.positions(batch["ids"], settings.lengths[-1], step)
        loss = F.cross_entropy(model(batch["ids"], positions).flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        update(model.parameters(), optimizer, highest * schedule(step, steps))
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

    Nothing of what stands before a token is used. The targets are those of `evaluate`, at any length. Tokens that do
    not occur share what Witten & Bell (1991, method C) leave them: as much as if each of those that do had once been
    new.

    >>> round(unigram_loss(np.array([0, 0, 0, 1]), np.array([1, 0, 1]), 2), 4)  # shares of 4/6 and 2/6
    0.752
    """
    counts = np.bincount(training, minlength=vocab_size)
    new = np.count_nonzero(counts)
    shares = (counts + new / vocab_size) / (len(training) + new)
    return float(-np.log(shares[held_out[1:]]).mean())


@torch.no_grad()
def evaluate(
    model: Any, ids: Int[np.ndarray, " tokens"], length: int, *, positions: Callable[[Tensor], Positions] | None = None
) -> Losses:
    """The losses of `ids` in windows of `length` tokens; each target counts once.

    Args:
        model: a module with `losses`, as `Decoder` has it; these may be on another device.
        positions: where the tokens of a batch stand; default: 0, 1, 2, ... in each window.
    """
    model.eval()
    windows = Windows(ids, length)
    total, count = torch.zeros(2, length, dtype=torch.float64)
    by_window: list[float] = []
    batch_size = max(1, EVAL_TOKENS // length)
    for first in range(0, len(windows), batch_size):
        batch = windows.__getitems__(list(range(first, min(first + batch_size, len(windows)))))
        if positions is not None:
            batch["positions"] = positions(batch["ids"])
        loss = model.losses(**batch).cpu().double()
        real = batch["targets"] >= 0
        total += loss.sum(0)
        count += real.sum(0)
        by_window += (loss.sum(1) / real.sum(1)).tolist()
    return Losses(float(total.sum() / count.sum()), (total / count).tolist(), by_window)


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
