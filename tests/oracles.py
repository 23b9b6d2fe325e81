"""What our results are held against: plain NumPy in float64, mpmath and loops, transcribed from the papers.

Nothing here is shared with the package, and nothing here is fast except `angles`, which has to be.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import mpmath
import numpy as np

__all__ = [
    "AttentionGradients",
    "alibi_slopes",
    "angles",
    "attention",
    "attention_gradients",
    "edge_positions",
    "is_allowed",
    "rotate",
    "sinusoidal",
    "softmax",
    "true_angles",
]

Array = np.ndarray


# ---------------------------------------------------------------------- angles


def true_angles(positions: Sequence[int], dim: int, base: float) -> tuple[Array, Array]:
    """``cos(p base^(-2i/dim))`` and the sine with 60 digits, rounded to float64: the definition itself, and slow."""
    with mpmath.workdps(60):
        frequencies = [mpmath.power(mpmath.mpf(base), mpmath.mpf(-2 * i) / dim) for i in range((dim + 1) // 2)]
        cos = [[float(mpmath.cos(p * f)) for f in frequencies] for p in positions]
        sin = [[float(mpmath.sin(p * f)) for f in frequencies] for p in positions]
    return np.array(cos), np.array(sin)


def angles(positions: Array, dim: int, base: float) -> tuple[Array, Array]:
    """The same within 4e-15, fast enough for millions of angles.

    A frequency in turns is cut into pieces of 22 bits. A position has 31, so each product is exact in float64, and so
    is what remains of it after whole turns are taken away. `test_angles` holds this against `true_angles`.
    """
    p = np.asarray(positions, dtype=np.float64)[..., None]
    bits = _frequency_bits(dim, base)
    fraction = np.zeros((*p.shape[:-1], len(bits)))
    for place in range(1, 5):
        piece = np.array([(b >> 22 * (4 - place)) & (2**22 - 1) for b in bits], dtype=np.float64) * 2.0 ** (-22 * place)
        product = p * piece
        fraction += product - np.floor(product)
    angle = 2 * np.pi * (fraction - np.round(fraction))
    return np.cos(angle), np.sin(angle)


@functools.cache
def _frequency_bits(dim: int, base: float) -> tuple[int, ...]:
    """The 88 bits behind the point of each frequency, in turns."""
    with mpmath.workdps(60):
        turns = [
            mpmath.power(mpmath.mpf(base), mpmath.mpf(-2 * i) / dim) / (2 * mpmath.pi) for i in range(-(-dim // 2))
        ]
        return tuple(int(mpmath.floor(t * mpmath.mpf(2) ** 88)) for t in turns)


def edge_positions(limit_bits: int = 31) -> list[int]:
    """2^k - 1, 2^k and 2^k + 1 below 2^limit_bits: where numbers of any width run out of bits."""
    near = {2**k + step for k, step in itertools.product(range(limit_bits + 1), (-1, 0, 1))}
    return sorted(p for p in near if p < 2**limit_bits)


# ---------------------------------------------------------------------- encodings


def sinusoidal(positions: Sequence[int], d_model: int, base: float = 10_000.0) -> Array:
    """Vaswani et al. 2017, section 3.5, entry by entry."""
    table = np.zeros((len(positions), d_model))
    for row, p in enumerate(positions):
        for column in range(d_model):
            angle = p / base ** (2 * (column // 2) / d_model)
            table[row, column] = math.cos(angle) if column % 2 else math.sin(angle)
    return table


def rotate(x: Array, cos: Array, sin: Array, layout: str) -> Array:
    """Su et al. 2021, equation 15: a block-diagonal matrix of 2 x 2 rotations for every token, written out.

    x is ``batch heads seq head_dim``; cos and sin are ``seq pairs``.
    """
    pairs, head_dim = cos.shape[-1], x.shape[-1]
    out, i = np.empty_like(x), np.arange(pairs)
    first, second = (i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1)
    for token in range(x.shape[2]):
        matrix = np.eye(head_dim)
        matrix[first, first] = matrix[second, second] = cos[token]
        matrix[first, second], matrix[second, first] = -sin[token], sin[token]
        out[:, :, token] = x[:, :, token] @ matrix.T
    return out


def alibi_slopes(num_heads: int) -> list[float]:
    """Press et al. 2022, section 3: a geometric sequence from 2^(-8/n) for n a power of two, else the authors' rule."""
    if num_heads & (num_heads - 1) == 0:
        start = 2.0 ** (-8.0 / num_heads)
        return [start * start**i for i in range(num_heads)]
    smaller = 1 << (num_heads.bit_length() - 1)
    return alibi_slopes(smaller) + alibi_slopes(2 * smaller)[0::2][: num_heads - smaller]


# ---------------------------------------------------------------------- attention


def is_allowed(
    q_index: Array, q_document: Array, k_index: Array, k_document: Array, *, causal: bool, window: int | None
) -> Array:
    """The rule in words, one pair at a time; everything is ``batch seq``, the answer is ``batch query key``."""
    batch, queries, keys = q_index.shape[0], q_index.shape[1], k_index.shape[1]
    seen = np.zeros((batch, queries, keys), dtype=bool)
    for b in range(batch):
        for i in range(queries):
            for j in range(keys):
                if q_document[b, i] == -1 or k_document[b, j] == -1:
                    continue  # padding neither looks nor is looked at
                if q_document[b, i] != k_document[b, j]:
                    continue
                if causal and k_index[b, j] > q_index[b, i]:
                    continue
                if window is not None and abs(int(q_index[b, i]) - int(k_index[b, j])) >= window:
                    continue
                seen[b, i, j] = True
    return seen


def softmax(scores: Array) -> Array:
    shifted = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def _weights(q: Array, k: Array, b: int, h: int, group: int, bias: Array, seen: Array, scale: float) -> Array:
    """The weights of one head of one row: ``query key``, with rows of zeros where nothing is seen."""
    scores = q[b, h] @ k[b, h // group].T * scale + bias[b, h]
    weights = np.zeros_like(scores)
    for i in range(scores.shape[0]):
        if seen[b, i].any():
            weights[i, seen[b, i]] = softmax(scores[i, seen[b, i]])
    return weights


def attention(q: Array, k: Array, v: Array, bias: Array, seen: Array, scale: float) -> tuple[Array, Array]:
    """Softmax attention head by head; `bias` is ``batch heads query key``. Returns the output and the weights."""
    group = q.shape[1] // k.shape[1]
    output = np.zeros((*q.shape[:3], v.shape[-1]))
    weights = np.zeros((*q.shape[:3], k.shape[2]))
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        weights[b, h] = _weights(q, k, b, h, group, bias, seen, scale)
        output[b, h] = weights[b, h] @ v[b, h // group]
    return output, weights


@dataclass
class AttentionGradients:
    q: Array
    k: Array
    v: Array
    bias: Array


def attention_gradients(
    q: Array, k: Array, v: Array, bias: Array, seen: Array, scale: float, cotangent: Array
) -> AttentionGradients:
    """What `cotangent` on the output means for every input, from the derivative of the softmax by hand."""
    group = q.shape[1] // k.shape[1]
    out = AttentionGradients(np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros_like(bias))
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        weights = _weights(q, k, b, h, group, bias, seen, scale)
        to_weights = cotangent[b, h] @ v[b, h // group].T
        to_scores = weights * (to_weights - (to_weights * weights).sum(axis=-1, keepdims=True))
        out.q[b, h] += to_scores @ k[b, h // group] * scale
        out.k[b, h // group] += to_scores.T @ q[b, h] * scale
        out.v[b, h // group] += weights.T @ cotangent[b, h]
        out.bias[b, h] += to_scores
    return out
