"""What does an encoding cost, when one token attends to a long cache, and when a prompt is read?

Each encoding on one thread of a CPU, beside torch's attention without a bias and, if decoding was slow, beside the
published formula in plain float32 operations with the same weights. It refuses to report if a result differs from
attention in float64. ``PYTHONPATH=src python -m benchmarks every_encoding``
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

import locant
from benchmarks.timing import Row, measure
from locant import Cope, Deberta, KVCache, PositionEncoding, Positions, Sandwich, TransformerXL, attend
from locant.attention.choice import BackendName
from locant.positions.base import reads_hidden_states
from locant.positions.encodings.path import PaTH
from locant.positions.encodings.selective_rope import NORM_EPSILON, SelectiveRoPE
from locant.positions.fields import TokenFeatures

__all__ = ["rows"]

HEADS, HEAD_DIM, D_MODEL, TOKENS = 8, 64, 512, 8_192
SCALE = HEAD_DIM**-0.5
NEAR = 1e-4
"""How far a contender may be from float64, over the largest output."""

Contender = Callable[[], Tensor]


def rows() -> list[Row]:
    """One token behind a cache, then a whole prompt. The memory of the prompt stays linear."""
    torch.manual_seed(0)
    with torch.no_grad(), _one_thread():
        return [*_decoding(), *_prefill(), *_rotating(1), *_rotating(TOKENS)]


@contextmanager
def _one_thread() -> Generator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _encodings() -> dict[str, PositionEncoding | None]:
    biases: dict[str, PositionEncoding] = {
        "ALiBi": locant.ALiBi(HEADS), "T5": locant.T5Bias(HEADS), "KERPLE": locant.Kerple(HEADS),
        "FIRE": locant.Fire(HEADS), "Shaw": locant.Shaw(HEAD_DIM), "FoX": locant.Fox(HEADS, D_MODEL),
        "CABLE": locant.encoding("cable", num_heads=HEADS, d_model=D_MODEL),
        "Inkling": locant.Inkling(HEADS, D_MODEL), "Sandwich": Sandwich(HEADS), "CoPE": Cope(HEAD_DIM),
        "Transformer-XL": TransformerXL(HEADS, D_MODEL), "DeBERTa": Deberta(HEADS, HEAD_DIM),
        "PaTH": PaTH(HEADS, HEAD_DIM, D_MODEL),
    }  # fmt: skip
    for encoding in biases.values():
        for parameter in encoding.parameters():
            parameter.normal_(std=0.02)
    return {"no bias": None, **biases}


def _decoding() -> list[Row]:
    q = torch.randn(1, HEADS, 1, HEAD_DIM)
    k, v = torch.randn(2, 1, HEADS, TOKENS, HEAD_DIM)
    contenders: dict[str, Contender] = {"SDPA without a bias": lambda: F.scaled_dot_product_attention(q, k, v)}
    for name, encoding in _encodings().items():
        keys = Positions.arange(TOKENS)
        if encoding is not None and reads_hidden_states(encoding):
            keys = encoding.read(torch.randn(1, TOKENS, D_MODEL), keys)
        ours = _ours(encoding, q, k, v, keys.slice(TOKENS - 1, TOKENS), keys)
        of_name = {f"{name}, locant": ours, **_published(name, encoding, q, k, v)}
        if isinstance(encoding, PaTH):
            of_name = {f"{name}, locant, in a cache that moves its keys": _behind_a_cache(encoding, q, k, v, keys)}
        truth = _ours(encoding, q.double(), k.double(), v.double(), keys.slice(TOKENS - 1, TOKENS), keys, "eager")()
        for contender, run in of_name.items():
            error = float((run().double() - truth).abs().max() / truth.abs().max())
            assert error < NEAR, f"{contender} is off by {error}"
        contenders |= of_name
        if isinstance(encoding, PaTH):
            contenders[f"{name}, locant, moving the keys once per 64 tokens"] = _moving_keys(encoding)
    question = f"one query over {TOKENS} keys, {HEADS} heads of {HEAD_DIM}, float32, one thread (wanted: 1.3)"
    return measure(question, contenders, rounds=31)


def _ours(
    encoding: PositionEncoding | None, q: Tensor, k: Tensor, v: Tensor, queries: Positions, keys: Positions,
    backend: BackendName = "auto",
) -> Contender:  # fmt: skip
    scale = encoding.scale if isinstance(encoding, Deberta) else None
    options = {"encoding": encoding, "positions": queries, "k_positions": keys, "scale": scale, "backend": backend}
    return lambda: attend(q, k, v, **options)  # type: ignore[call-overload]


def _behind_a_cache(encoding: PaTH, q: Tensor, k: Tensor, v: Tensor, keys: Positions) -> Contender:
    """Return a step that adds a token to a cache, which 64 tokens still have to change, and takes it back."""
    cache = KVCache(encoding=encoding)
    for start, stop in pairwise((0, TOKENS - 64, TOKENS - 1)):
        cache.append(k[:, :, start:stop], v[:, :, start:stop], keys.slice(start, stop))
    new = k[:, :, -1:], v[:, :, -1:], keys.slice(TOKENS - 1, TOKENS)

    def run() -> Tensor:
        all_k, all_v, all_keys = cache.append(*new)
        y = attend(q, all_k, all_v, encoding=encoding, positions=new[2], k_positions=all_keys)
        cache.truncate(TOKENS - 1)
        return y

    return run


def _moving_keys(encoding: PaTH) -> Contender:
    """Return what such a cache does once for every 64 tokens."""
    k, positions = torch.randn(1, HEADS, TOKENS, HEAD_DIM), Positions.arange(TOKENS)
    recent = encoding.read(torch.randn(1, 96, D_MODEL), Positions.arange(96)).read.of_key
    cached = replace(positions, read=TokenFeatures(recent=recent))
    return lambda: encoding.settle_keys(k, cached, Positions.after(TOKENS, 1))


def _published(name: str, encoding: PositionEncoding | None, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Contender]:
    """Return the formula in plain operations, computed anew in each step, as published code does."""
    distance = torch.arange(TOKENS - 1, -1, -1)

    def attended(scores: Tensor) -> Tensor:
        return scores.softmax(-1) @ v

    if isinstance(encoding, Cope):

        def run() -> Tensor:
            scores = q @ k.mT * SCALE
            counts = scores.sigmoid().flip(-1).cumsum(-1).flip(-1).clamp(max=encoding.max_positions - 1)
            below, products = counts.floor(), q @ encoding.weight.T
            lower, upper = (products.gather(-1, each.long()) for each in (below, counts.ceil()))
            return attended(scores + lower + (upper - lower) * (counts - below))

    elif isinstance(encoding, Sandwich):
        frequencies = encoding.angles.inv_freq.float()
        ratios = torch.arange(1, HEADS + 1) * 8 / HEADS

        def run() -> Tensor:
            decay = ((distance.float()[:, None] * frequencies).cos() - 1).sum(-1)
            bias = decay / ratios[:, None]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None, :, None])

    elif isinstance(encoding, TransformerXL):
        frequencies = encoding.angles.inv_freq.float()

        def run() -> Tensor:
            angles = distance.float()[:, None] * frequencies
            rows = torch.cat((angles.sin(), angles.cos()), -1) @ encoding.weight.T
            rows = rows.view(TOKENS, HEADS, HEAD_DIM).permute(1, 2, 0)
            return attended(((q + encoding.u[:, None]) @ k.mT + (q + encoding.v[:, None]) @ rows) * SCALE)

    elif isinstance(encoding, Deberta):

        def run() -> Tensor:
            projections = (encoding.key_projection, encoding.query_projection)
            of_query, of_key = (
                each(encoding.weight).view(-1, HEADS, HEAD_DIM).transpose(0, 1)  # type: ignore[misc]
                for each in projections
            )
            entries = encoding.rows(distance).expand(1, HEADS, 1, TOKENS)
            c2p, p2c = (q @ of_query.mT).gather(-1, entries), (k @ of_key.mT).gather(-1, entries.mT).mT
            return attended((q @ k.mT + c2p + p2c) * encoding.scale)

    else:
        return {}
    return {f"{name}, as published": run}


def _prefill() -> list[Row]:
    q, k, v = torch.randn(3, 1, HEADS, TOKENS, HEAD_DIM)
    plain, chosen = Positions.arange(TOKENS), ("Transformer-XL", "CoPE", "PaTH")
    contenders: dict[str, Contender] = {
        "causal SDPA without a bias": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    }
    for name, encoding in _encodings().items():
        if name not in chosen:
            continue
        reads = encoding is not None and reads_hidden_states(encoding)
        positions = encoding.read(torch.randn(1, TOKENS, D_MODEL), plain) if encoding is not None and reads else plain
        ours = _ours(encoding, q, k, v, positions, positions)
        last = positions.slice(TOKENS - 8, TOKENS)
        truth = _ours(encoding, q[:, :, -8:].double(), k.double(), v.double(), last, positions, "eager")()
        error = float((ours()[:, :, -8:].double() - truth).abs().max() / truth.abs().max())
        assert error < NEAR, f"{name} is off by {error}"
        contenders[f"{name}, locant"] = ours
    question = (
        f"a prompt of {TOKENS} tokens, {HEADS} heads of {HEAD_DIM}, float32, one thread "
        "(wanted: 4 for Transformer-XL, 10 for CoPE, 2 for PaTH)"
    )
    return measure(question, contenders, rounds=3, warmup=1)


def _rotating(new: int) -> list[Row]:
    """Read hidden states and rotate queries and keys. A single new token comes after a cache."""
    x, past = torch.randn(1, TOKENS, D_MODEL), TOKENS - new
    q, k = torch.randn(2, 1, HEADS, new, HEAD_DIM)
    sizes = {"head_dim": HEAD_DIM, "num_heads": HEADS, "d_model": D_MODEL}
    selective = SelectiveRoPE(HEAD_DIM, HEADS, D_MODEL)
    encodings = {
        "RoPE": locant.Rotary(HEAD_DIM), "RePo": locant.encoding("repo", **sizes), "Selective RoPE": selective,
    }  # fmt: skip
    positions = Positions.arange(TOKENS)
    contenders: dict[str, Contender] = {}
    for name, encoding in encodings.items():
        cached = encoding.read(x[:, :past], positions.slice(0, past)) if past else None

        def ours(encoding: PositionEncoding = encoding, cached: Positions | None = cached) -> Tensor:
            read = encoding.read(x[:, past:], positions.slice(past, TOKENS), cached)
            return torch.cat(encoding.rotate(q, k, read))

        contenders[f"{name}, locant"] = ours
    before = _summed_angles(selective, x[:, :past].double()) if past else torch.zeros(1, 1, 1, 1)
    narrow = selective.of_hidden(x[:, max(0, past - selective.kernel_size + 1) : past])

    def published(dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the authors' operations, with a state of the last sum and of the last tokens of the convolution."""
        given = narrow.to(dtype) if past else None
        angle = (_summed_angles(selective, x[:, past:].to(dtype), given) + before[:, -1:].to(dtype)).transpose(1, 2)
        first, second = torch.cat((q, k)).to(dtype).chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)

    contenders["Selective RoPE, as published"] = published
    error = float((contenders["Selective RoPE, locant"]().double() - published(torch.float64)).abs().max())
    assert error < NEAR, f"Selective RoPE is off by {error}"
    question = f"{new} of {TOKENS} tokens read and rotated, {HEADS} heads of {HEAD_DIM}, float32, one thread"
    return measure(question, contenders, rounds=31 if new == 1 else 5)


def _summed_angles(encoding: SelectiveRoPE, x: Tensor, earlier: Tensor | None = None) -> Tensor:
    """Return the sums of the published formula in plain operations, for heads and pairs."""
    heads = x.unflatten(-1, (HEADS, -1))
    scaled = (heads / (heads.square().sum(-1, keepdim=True) + NORM_EPSILON).sqrt()).flatten(2)
    narrow = (scaled @ encoding.down.to(x).T @ encoding.up.to(x).T).unflatten(-1, (HEADS, -1))
    earlier = narrow.new_zeros(1, encoding.kernel_size - 1, *narrow.shape[2:]) if earlier is None else earlier
    window = torch.cat((earlier, narrow), 1)
    kernel = encoding.kernel.to(x).flatten(1).T[:, None].flip(-1)
    steps = F.conv1d(window.flatten(2).mT, kernel, groups=len(kernel)).mT.unflatten(-1, (HEADS, -1))
    pair = torch.arange(HEAD_DIM // 2).to(x)
    return steps.cumsum(1) * encoding.base ** (-2 * pair / HEAD_DIM)
