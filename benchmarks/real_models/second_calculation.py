"""A second calculation of losses, with `transformers` and a hook, and without any code of this package."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

__all__ = ["log_losses", "losses_of_transformers"]

ROWS = 256
"""The number of queries whose scores are in memory."""


@torch.inference_mode()
def losses_of_transformers(folder: str | Path, way: str, ids: Tensor, trained: int) -> np.ndarray:
    """Return the nats of every token but the first, as float64.

    Args:
        way: ``own``, ``nope``, ``self-extend:G``, or ``linear``, ``ntk``, ``dynamic`` and ``yarn`` with a factor.
        trained: the length that the model was trained at.
    """
    config = AutoConfig.from_pretrained(folder)
    name, _, factor = way.partition(":")
    base, width = config.rope_parameters["rope_theta"], config.head_dim
    rope = {"rope_type": "default", "rope_theta": base}
    if name in ("linear", "yarn"):
        rope = {"rope_type": name, "rope_theta": base, "factor": float(factor)}
        rope |= {"original_max_position_embeddings": trained} if name == "yarn" else {}
    elif name == "ntk":
        rope["rope_theta"] = base * float(factor) ** (width / (width - 2))
    elif name == "dynamic":
        rope |= {"rope_type": "dynamic", "factor": float(factor or 1)}
        config.max_position_embeddings = trained
    config.rope_parameters = rope
    model: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    if name not in ("nope", "self-extend"):
        return log_losses(model(ids[None], use_cache=False).logits[0], ids)
    with _without_rotation():
        if name == "self-extend":
            group, near = int(factor), trained // 4
            shift = near - near // group
            function = _by_distance(near, lambda i: i // group + shift, lambda j: j // group, base, width)
            AttentionInterface.register("second_calculation", function)
            model.set_attn_implementation("second_calculation")
        return log_losses(model(ids[None], use_cache=False).logits[0], ids)


def log_losses(logits: Tensor, ids: Tensor) -> np.ndarray:
    """Return the nats of each token after the first, from the logits of all tokens."""
    losses = list[np.ndarray]()
    for rows, targets in zip(logits[:-1].split(ROWS), ids[1:].split(ROWS), strict=True):
        scores, chosen = rows.double().numpy(), targets.numpy()
        scores -= scores.max(-1, keepdims=True)
        losses.append(np.log(np.exp(scores).sum(-1)) - scores[np.arange(len(chosen)), chosen])
    return np.concatenate(losses)


@contextmanager
def _without_rotation() -> Generator[None]:
    usual = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = lambda q, k, *_, **__: (q, k)
    try:
        yield
    finally:
        modeling_llama.apply_rotary_pos_emb = usual


Index = Callable[[Tensor], Tensor]


def _by_distance(near: int, far_query: Index, far_key: Index, base: float, width: int) -> Callable[..., Any]:
    """Return an attention that rotates pairs nearer than `near` as usual, and all others by these positions."""
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)

    def rotate(x: Tensor, index: Tensor) -> Tensor:
        angles = index[:, None] * frequencies
        cos, sin = angles.cos().float(), angles.sin().float()
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, scaling: float, **_: Any) -> Any:
        index = torch.arange(query.shape[2])
        key, value = (each.repeat_interleave(module.num_key_value_groups, 1) for each in (key, value))
        queries, keys = (
            (rotate(query, index), rotate(query, far_query(index))),
            (rotate(key, index), rotate(key, far_key(index))),
        )
        parts = list[Tensor]()
        for rows in index.split(ROWS):
            distance = rows[:, None] - index
            usual, other = (q[:, :, rows] @ k.mT * scaling for q, k in zip(queries, keys, strict=True))
            scores = torch.where(distance < near, usual, other).masked_fill(distance < 0, -torch.inf)
            parts.append(scores.softmax(-1) @ value)
        return torch.cat(parts, 2).transpose(1, 2), None

    return attend
