"""Every encoding with a bias, every arrangement of tokens, and attention in NumPy for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from locant import (
    ALiBi,
    Cope,
    Deberta,
    Fire,
    Kerple,
    PositionEncoding,
    Positions,
    Sandwich,
    Shaw,
    T5Bias,
    TransformerXL,
    attend,
)
from locant.positions import ContinuousGridBias, ModelShape
from locant.positions.registry import encodings
from tests import oracles
from tests.tolerances import assert_close

BATCH, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 6, 3, 4, 7

ENCODINGS: dict[str, Callable[[], PositionEncoding | None]] = {
    "none": lambda: None,
    "alibi": lambda: ALiBi(HEADS),
    "alibi, learned": lambda: ALiBi(HEADS, learned=True),
    "t5": lambda: T5Bias(HEADS, num_buckets=8, max_distance=11),
    "t5, both ways": lambda: T5Bias(HEADS, num_buckets=8, max_distance=11, bidirectional=True),
    "kerple": lambda: Kerple(HEADS),
    "kerple, power": lambda: Kerple(HEADS, "power"),
    "fire": lambda: Fire(HEADS, hidden=5, threshold=4.0),
    "sandwich": lambda: Sandwich(HEADS, dim=6),
    "cope": lambda: Cope(HEAD_DIM, 5),
    "shaw": lambda: Shaw(HEAD_DIM, 3, key_term=True),
    "transformer_xl": lambda: TransformerXL(HEADS, 10, head_dim=HEAD_DIM),
    "deberta": lambda: Deberta(HEADS, HEAD_DIM, num_buckets=6, max_distance=9),
    "continuous_grid_bias": lambda: ContinuousGridBias(HEADS, 1, 64, hidden=5, largest=4.0),
}
SHAPE = ModelShape(d_model=HEADS * HEAD_DIM, num_heads=HEADS, max_seq_len=64)
ENCODINGS |= {
    name: partial(kind.for_model, SHAPE)
    for name, kind in encodings().items()
    if "bias" in kind.methods() and name not in ENCODINGS
}


@dataclass(frozen=True)
class Arrangement:
    """The positions of queries and keys, and the mask."""

    positions: Positions
    k_positions: Positions | None = None
    causal: bool = True
    window: int | None = None

    @property
    def keys(self) -> Positions:
        return self.positions if self.k_positions is None else self.k_positions

    def seen(self) -> np.ndarray:
        wide, keys = self.positions.expand(BATCH), self.keys.expand(BATCH)
        places = (wide.index.numpy(), wide.document.numpy(), keys.index.numpy(), keys.document.numpy())
        return oracles.is_allowed(*places, causal=self.causal, window=self.window)

    def blind(self) -> Tensor:
        """Which queries see nothing, ``batch heads query``."""
        return ~torch.from_numpy(self.seen()).any(2)[:, None].expand(BATCH, HEADS, -1)


LEFT = torch.tensor([[0] * 6 + [1] * 13, [0] * 2 + [1] * 17])
ARRANGEMENTS: dict[str, Arrangement] = {
    "causal": Arrangement(Positions.arange(19)),
    "both ways": Arrangement(Positions.arange(19), causal=False),
    "window": Arrangement(Positions.arange(19), window=4),
    "window both ways": Arrangement(Positions.arange(19), window=4, causal=False),
    "packed": Arrangement(Positions.packed([[5, 0, 1, 9, 3], [2, 13]], length=19)),
    "packed window both ways": Arrangement(Positions.packed([[5, 0, 1, 9, 3], [2, 13]]), window=3, causal=False),
    "left padding": Arrangement(Positions.from_mask(LEFT)),
    "holes": Arrangement(Positions.from_mask(torch.tensor([[1, 0, 1, 1, 0] * 3, [0] * 15]))),
    "chunk behind a cache": Arrangement(Positions.after(11, 7), Positions.arange(18)),
    "chunk with a window": Arrangement(Positions.after(11, 7), Positions.arange(18), window=5),
    "one query": Arrangement(Positions.after(17, 1), Positions.arange(18)),
    "behind caches of two lengths": Arrangement(Positions.after([2, 9], 7), Positions.arange(16)),
    "queries that see nothing": Arrangement(Positions.arange(11), Positions.after(5, 8)),
    "nothing to see for anyone": Arrangement(Positions.arange(7), Positions.after(7, 8)),
    "keys out of reach": Arrangement(Positions.after(20, 7), Positions.arange(18), window=5),
    "keys all later": Arrangement(Positions.arange(5), Positions.after(8, 9), causal=False),
    "keys all before": Arrangement(Positions.after(12, 5), Positions.arange(9), causal=False),
    "cross attention": Arrangement(Positions.arange(9), Positions.arange(14), causal=False),
    "backwards": Arrangement(Positions.of(list(range(12, -1, -1)))),
    "one token": Arrangement(Positions.arange(1)),
    "packed both ways": Arrangement(Positions.packed([[3, 0, 1, 4], [6, 1]], length=9), causal=False),
    "left padding both ways": Arrangement(Positions.from_mask(LEFT), causal=False),
    "nothing but padding": Arrangement(Positions.from_mask(torch.tensor([[0, 0, 0, 0], [1, 1, 0, 1]]))),
    "fewer keys than queries": Arrangement(Positions.arange(5), Positions.arange(3)),
    "more keys than queries": Arrangement(Positions.arange(3), Positions.arange(5)),
    "keys that come later": Arrangement(Positions.arange(3), Positions.after(2, 5)),
    "cross attention to padded keys": Arrangement(Positions.after(3, 2), Positions.from_mask(LEFT), causal=False),
}


@dataclass(frozen=True)
class Inputs:
    """Tensors of an arrangement, and what attention in NumPy makes of them."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def draw(cls, arrangement: Arrangement, dtype: torch.dtype = torch.float64, kv_heads: int = KV_HEADS) -> Inputs:
        def random(heads: int, seq_len: int, width: int) -> Tensor:
            return torch.randn(BATCH, heads, seq_len, width, dtype=torch.float64).to(dtype).requires_grad_()

        keys = arrangement.keys.seq_len
        queries = random(HEADS, arrangement.positions.seq_len, HEAD_DIM)
        return cls(queries, random(kv_heads, keys, HEAD_DIM), random(kv_heads, keys, VALUE_DIM))

    def through(
        self, arrangement: Arrangement, encoding: PositionEncoding | None, backend: str, **options: object
    ) -> Tensor:
        return attend(
            self.q, self.k, self.v, encoding=encoding, **self.read(arrangement, encoding), causal=arrangement.causal,
            window=arrangement.window, backend=backend, **options,
        )  # fmt: skip

    def read(self, arrangement: Arrangement, encoding: PositionEncoding | None) -> dict[str, Any]:
        """The positions, with what an encoding reads of hidden states: of keys, and of queries behind them."""
        keys = None if arrangement.k_positions is None else read(encoding, arrangement.k_positions, self.k)
        return {"positions": read(encoding, arrangement.positions, self.q, keys), "k_positions": keys}

    def expected(
        self,
        arrangement: Arrangement,
        encoding: PositionEncoding | None,
        cotangent: Tensor,
        scale: float = HEAD_DIM**-0.5,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The output in float64, and the gradients of q, k, v and every parameter.

        Attention and its derivative are NumPy's. The bias as a matrix, and its derivative, are the encoding's own,
        which the tests of the encodings hold against their papers.
        """
        q, k, bias = self._bias(arrangement, encoding)
        given = self._given(arrangement, bias, scale)
        y, _ = oracles.attention(*given)
        found = oracles.attention_gradients(*given, cotangent.double().numpy())
        gradients = {name: torch.from_numpy(getattr(found, name)) for name in ("q", "k", "v")}
        if bias is not None and bias.requires_grad:
            leaves = {"q": q, "k": k, **parameters_of(encoding)}
            onto_bias = torch.from_numpy(found.bias).to(bias.dtype).sum_to_size(bias.shape)
            parts = torch.autograd.grad(bias, list(leaves.values()), onto_bias, allow_unused=True)
            for name, part in zip(leaves, parts, strict=True):
                if part is not None:
                    gradients[name] = gradients.get(name, 0) + part
        return torch.from_numpy(y), gradients

    def require_numpys(self, arrangement: Arrangement, encoding: PositionEncoding | None, backend: str) -> Tensor:
        """The output, which is NumPy's, as every gradient is for a random cotangent; zeros of what sees nothing."""
        y = self.through(arrangement, encoding, backend)
        cotangent = torch.randn_like(y)
        expected, gradients = self.expected(arrangement, encoding, cotangent)
        assert_close(y, expected)
        leaves = {"q": self.q, "k": self.k, "v": self.v, **parameters_of(encoding)}
        found = torch.autograd.grad(y, [leaves[name] for name in gradients], cotangent, retain_graph=True)
        for gradient, wanted in zip(found, gradients.values(), strict=True):
            assert_close(gradient, wanted)
        assert not y[arrangement.blind()].any()
        return y

    def terms_of_gradients(
        self, arrangement: Arrangement, encoding: PositionEncoding, cotangent: Tensor, scale: float = HEAD_DIM**-0.5
    ) -> dict[str, Tensor]:
        """The sizes, added up, of what a parameter's gradient is a sum of: they bound its roundings.

        The gradient of a score is ``P dP - P delta``, with ``delta`` the dot product of output and cotangent. Where one
        key has nearly all the weight, these two nearly cancel. For encodings whose bias has in a parameter a derivative
        of one sign.
        """
        _, _, bias = self._bias(arrangement, encoding)
        given = self._given(arrangement, bias, scale)
        weights = torch.from_numpy(oracles.attention(*given)[1])
        to_weights = cotangent.double() @ self.v.detach().double().repeat_interleave(HEADS // self.v.shape[1], 1).mT
        delta = (weights * to_weights).sum(-1, keepdim=True)
        sizes = (weights * (to_weights.abs() + delta.abs())).to(bias.dtype).sum_to_size(bias.shape)
        leaves = parameters_of(encoding)
        parts = torch.autograd.grad(bias, list(leaves.values()), sizes)
        return {name: part.abs() for name, part in zip(leaves, parts, strict=True)}

    def _bias(
        self, arrangement: Arrangement, encoding: PositionEncoding | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries and keys in float64, and the bias that an encoding makes of them."""
        q, k = (x.detach().double().requires_grad_() for x in (self.q, self.k))
        return q, k, None if encoding is None else encoding.bias(q, k, **self.read(arrangement, encoding))

    def _given(self, arrangement: Arrangement, bias: Tensor | None, scale: float) -> tuple[Any, ...]:
        """What the oracles of attention take."""
        seen = arrangement.seen()
        full = np.zeros((BATCH, HEADS, *seen.shape[1:]))
        matrix = full if bias is None else full + bias.detach().double().numpy()
        return (*(x.detach().double().numpy() for x in (self.q, self.k, self.v)), matrix, seen, scale)


def read(
    encoding: PositionEncoding | None, positions: Positions, x: Tensor, past: Positions | None = None
) -> Positions:
    """The positions, with what an encoding reads of these heads side by side, as hidden states."""
    hidden = x.detach().repeat_interleave(HEADS // x.shape[1], 1).transpose(1, 2).flatten(2)
    return positions if encoding is None else encoding.read(hidden, positions, past)


def _has_score_function(encoding: PositionEncoding | None) -> bool:
    x = torch.zeros(1, HEADS, 2, HEAD_DIM)
    return encoding is None or encoding.score_mod(x, x, read(encoding, Positions.arange(2), x)) is not None


ONLY_A_MATRIX = [name for name, build in ENCODINGS.items() if not _has_score_function(build())]
"""Encodings without a score function, which FlexAttention would need."""


def parameters_of(encoding: PositionEncoding | None) -> dict[str, Tensor]:
    """By names that q, k and v do not have."""
    return {} if encoding is None else {f"its {name}": each for name, each in encoding.named_parameters()}


def shaken(name: str, dtype: torch.dtype = torch.float64) -> PositionEncoding | None:
    """The encoding with parameters that are no longer what they start with."""
    encoding = ENCODINGS[name]()
    if encoding is None:
        return None
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return encoding.to(dtype)
