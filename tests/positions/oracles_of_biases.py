"""Relative encodings in plain NumPy and float64, one pair of tokens at a time, transcribed from their papers.

Each takes the places of queries and keys as lists of numbers and answers ``heads query key`` (``batch heads query key``
where q and k matter). Nothing here is shared with the package. `numerical_gradients` gives every derivative of any of
them without knowing a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import mpmath
import numpy as np

Array = np.ndarray
Places = Sequence[int]


def alibi_slopes_of_the_paper(num_heads: int) -> list[mpmath.mpf]:
    """Section 3 of the paper, with fifty digits.

    "For n heads, our set of slopes is the geometric sequence that starts at 2^(-8/n) and uses that same value as its
    ratio"; and its footnote for other n: the slopes of the closest smaller power of two, then every other one of twice
    that many.
    """

    def geometric(n: int) -> list[mpmath.mpf]:
        first = mpmath.power(2, mpmath.mpf(-8) / n)
        slopes = [first]
        while len(slopes) < n:
            slopes.append(slopes[-1] * first)
        return slopes

    closest = 1
    while 2 * closest <= num_heads:
        closest *= 2
    return geometric(closest) + geometric(2 * closest)[0::2][: num_heads - closest]


def kerple(queries: Places, keys: Places, r1: Array, r2: Array, kind: str) -> Array:
    """Chi et al. 2022, equations 5 and 6: ``-r1 log(1 + r2 |m - n|)`` and ``-r1 |m - n|^r2``."""
    out = np.zeros((len(r1), len(queries), len(keys)))
    for h, m, n in np.ndindex(*out.shape):
        distance = abs(queries[m] - keys[n])
        value = math.log(1 + r2[h] * distance) if kind == "log" else float(distance) ** r2[h]
        out[h, m, n] = -r1[h] * value
    return out


def sandwich(queries: Places, keys: Places, num_heads: int, dim: int, base: float = 10_000.0) -> Array:
    """Chi et al. 2023, section 5: inner products of sinusoidal vectors, divided by 8 h / H for head h = 1 .. H.

    The product of a vector with itself, which softmax cannot see, is taken away.
    """

    def vector(p: int) -> Array:
        angles = [p / base ** (2 * i / dim) for i in range(dim // 2)]
        return np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])

    out = np.zeros((num_heads, len(queries), len(keys)))
    for h, m, n in np.ndindex(*out.shape):
        here, there = vector(queries[m]), vector(keys[n])
        out[h, m, n] = (here @ there - here @ here) / (8 * (h + 1) / num_heads)
    return out


def shaw(
    q: Array, k: Array, queries: Places, keys: Places, table: Array, before: int, after: int, scale: float, *,
    key_term: bool,
) -> Array:  # fmt: skip
    """Shaw et al. 2018, equations 4 and 5, the part with the positions; `key_term` as in BERT's relative_key_query."""
    batch, heads, group = q.shape[0], q.shape[1], q.shape[1] // k.shape[1]
    out = np.zeros((batch, heads, len(queries), len(keys)))
    for b, h, i, j in np.ndindex(*out.shape):
        a = table[min(max(keys[j] - queries[i], -before), after) + before]
        out[b, h, i, j] = scale * q[b, h, i] @ a
        if key_term:
            out[b, h, i, j] += scale * k[b, h // group, j] @ a
    return out


def transformer_xl(
    q: Array, k: Array, queries: Places, keys: Places, W: Array, u: Array, v: Array, scale: float,
    base: float = 10_000.0,
) -> Array:  # fmt: skip
    """Dai et al. 2019, section 3.3: terms (b), (c) and (d).

    W is ``heads head_dim d_model``, u and v are ``heads head_dim``.
    """
    d_model, group = W.shape[-1], q.shape[1] // k.shape[1]

    def R(distance: int) -> Array:
        angles = [distance / base ** (2 * i / d_model) for i in range(d_model // 2)]
        return np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])

    out = np.zeros((q.shape[0], q.shape[1], len(queries), len(keys)))
    for b, h, i, j in np.ndindex(*out.shape):
        r = W[h] @ R(queries[i] - keys[j])
        out[b, h, i, j] = scale * (q[b, h, i] @ r + u[h] @ k[b, h // group, j] + v[h] @ r)
    return out


def fire(
    queries: Places, keys: Places, c: Array, L: Array, w1: Array, b1: Array, w2: Array, b2: Array, eps: float = 1e-6
) -> Array:
    """Li et al. 2023, equations 7 to 9, for both directions: the later of the two places stands for i."""

    def psi(x: float) -> float:
        return math.log(abs(float(c)) * x + 1)

    out = np.zeros((len(b2), len(queries), len(keys)))
    for h, i, j in np.ndindex(*out.shape):
        reach = max(abs(float(L)), queries[i], keys[j])
        ratio = psi(abs(queries[i] - keys[j])) / (psi(reach) + eps)
        out[h, i, j] = w2[h] @ np.maximum(w1[:, 0] * ratio + b1, 0) + b2[h]
    return out


def cope(q: Array, k: Array, queries: Places, keys: Places, table: Array, scale: float) -> Array:
    """Golovneva et al. 2024, equations 3 to 5, one document; a later key is at position 0."""
    group = q.shape[1] // k.shape[1]
    out = np.zeros((q.shape[0], q.shape[1], len(queries), len(keys)))
    for b, h, i, j in np.ndindex(*out.shape):
        between = [t for t in range(len(keys)) if keys[j] <= keys[t] <= queries[i]]
        gates = [1 / (1 + math.exp(-scale * (q[b, h, i] @ k[b, h // group, t]))) for t in between]
        p = min(sum(gates), len(table) - 1)
        below, above = math.floor(p), math.ceil(p)
        out[b, h, i, j] = (p - below) * (q[b, h, i] @ table[above]) + (1 - p + below) * (q[b, h, i] @ table[below])
    return out


def numerical_gradients(
    function: Callable[..., Array], arguments: dict[str, Array], cotangent: Array, step: float = 1e-6
) -> dict[str, Array]:
    """The derivative of ``sum(cotangent * function(**arguments))`` by every entry of every argument."""
    gradients: dict[str, Array] = {}
    for name, argument in arguments.items():
        gradient = np.zeros_like(argument)
        for place in np.ndindex(*argument.shape):
            ends: list[float] = []
            for sign in (1, -1):
                moved = argument.copy()
                moved[place] += sign * step
                ends.append(float((cotangent * function(**{**arguments, name: moved})).sum()))
            gradient[place] = (ends[0] - ends[1]) / (2 * step)
        gradients[name] = gradient
    return gradients


def fox(queries: Places, keys: Places, x: Array, weight: Array, offset: Array) -> Array:
    """Lin et al. 2025, equation 3: the sum of the logarithms of the gates behind key j, up to that of query i.

    `x` holds the hidden states of the tokens 0, 1, 2, ... of one document. A later key is as far as an earlier one.
    """
    gates = -np.log1p(np.exp(-(x @ weight.T + offset)))
    out = np.zeros((len(weight), len(queries), len(keys)))
    for h, m, n in np.ndindex(*out.shape):
        first, last = sorted((queries[m], keys[n]))
        out[h, m, n] = sum(gates[place, h] for place in range(first + 1, last + 1))
    return out


def inkling(
    queries: Places, keys: Places, x: Array, weight: Array, curves: Array, floor: int | None, alpha: float
) -> Array:
    """As `transformers` 5 has it: the query's mixture of curves at the distance, times its temperature."""
    d_rel, extent = curves.shape
    out = np.zeros((len(weight) // d_rel, len(queries), len(keys)))
    for h, m, n in np.ndindex(*out.shape):
        distance = queries[m] - keys[n]
        if 0 <= distance < extent:
            mixture = weight[h * d_rel : (h + 1) * d_rel] @ x[queries[m]]
            grown = 1.0 if floor is None else 1.0 + alpha * math.log(max(1.0, (queries[m] + 1) / floor))
            out[h, m, n] = grown * (mixture @ curves[:, distance])
    return out
