"""Training a model on one text, and measuring it on another: AdamW, a warm-up, a cosine, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from locant.lab.decoder import Decoder
from locant.text import Windows

__all__ = ["evaluate", "train"]

WARMUP_SHARE = 0.1
FINAL_SHARE = 0.1
CLIP_NORM = 1.0
WEIGHT_DECAY = 0.1
EVAL_TOKENS = 8_192  # tokens per batch: bounds the memory of logits and scores


def train(
    model: Decoder,
    windows: Windows,
    *,
    num_steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    on_step: Callable[[int, float], None] | None = None,
) -> float:
    """Train in place on windows drawn at random.

    Returns the mean loss, in nats per token, over the last tenth of the steps.
    """
    order = torch.Generator().manual_seed(seed)
    optimizer = _optimizer(model, learning_rate)
    losses = []
    model.train()
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * _schedule(step, num_steps)
        batch = windows.__getitems__(torch.randint(len(windows), (batch_size,), generator=order).tolist())
        loss = F.cross_entropy(model(batch["ids"], batch["positions"]).flatten(0, 1), batch["targets"].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        losses.append(loss.item())
        if on_step is not None:
            on_step(step + 1, losses[-1])
    return float(np.mean(losses[-max(1, num_steps // 10) :])) if losses else math.nan


@torch.no_grad()
def evaluate(model: Decoder, windows: Windows, length: int) -> tuple[float, list[float]]:
    """Mean loss in nats per token over all windows, and the mean at each position of the window."""
    model.eval()
    total, count = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)
    batch_size = max(1, EVAL_TOKENS // length)
    for first in range(0, len(windows), batch_size):
        batch = windows.__getitems__(list(range(first, min(first + batch_size, len(windows)))))
        logits = model(batch["ids"], batch["positions"])
        loss = F.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none")
        total += loss.double().sum(0)
        count += (batch["targets"] >= 0).sum(0)
    return float(total.sum() / count.sum()), (total / count).tolist()


def _optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Weight decay for matrices only: a decayed gain or bias is pulled to where nothing says it should be."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups: list[dict[str, list[Tensor] | float]] = [
        {"params": [*matrices], "weight_decay": WEIGHT_DECAY},
        {"params": [*vectors], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def _schedule(step: int, num_steps: int) -> float:
    """Rises linearly over the first tenth, then falls along a cosine to a tenth."""
    warmup = max(1, int(num_steps * WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))
