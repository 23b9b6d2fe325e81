"""A small decoder-only transformer that uses positions only through the methods of an encoding."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.attention import KVCache, attend
from locant.deprecation import Renamed
from locant.embedding import InputEmbedding
from locant.errors import RangeError, Remedy
from locant.kernels.norm_rotary import HeadNorm
from locant.positions import PositionEncoding, Positions

NORM_EPS = 1e-6
"""The number that the norm of queries and keys adds to the mean of the squares."""


class Decoder(nn.Module):
    """A decoder with an `InputEmbedding`, pre-norm blocks of attention and MLP, and the token table as its head.

    One encoding serves the embedding and all layers, so any encoding can replace any other.

    Args:
        keys_are_values: whether each layer has one projection for keys and values. Then its rotated keys are also its
            values, and the output of attention goes through ``encoding.unrotate`` (DeepSeek-V4).
        qk_norm: whether each head of the queries and keys is normed before the rotation (Qwen3).

    >>> model = Decoder(256, PositionEncoding(), d_model=32, num_layers=2, num_heads=4)
    >>> model(torch.zeros(3, 7, dtype=torch.long)).shape
    torch.Size([3, 7, 256])
    """

    train_length: int | None = None
    """The number of tokens per window in training, if known."""

    def __init__(
        self,
        vocab_size: int,
        encoding: PositionEncoding,
        *,
        d_model: int,
        num_layers: int,
        num_heads: int,
        keys_are_values: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        if d_model % num_heads:
            nearest = d_model // num_heads * num_heads or num_heads
            raise RangeError(
                f"got d_model={d_model} for num_heads={num_heads}, expected a multiple", Remedy(d_model=nearest)
            )
        self.num_heads = num_heads
        self.embedding = InputEmbedding(vocab_size, d_model, scale="sqrt_d_model", norm="layer_norm")
        # Any encoding is stored here, so that parameters have the same names in saved folders and the same order.
        self.embedding.encoding = encoding
        attended = _attention_width(encoding, num_heads, d_model // num_heads, keys_are_values)
        self.blocks = nn.ModuleList(
            Block(d_model, num_heads, num_layers, attended, keys_are_values, qk_norm) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model)

    @contextmanager
    def use_encoding(self, encoding: PositionEncoding) -> Generator[Decoder]:
        """Use another encoding with the same weights until the block ends."""
        own_encoding = self.embedding.encoding
        self.embedding.encoding = encoding
        try:
            yield self
        finally:
            self.embedding.encoding = own_encoding

    reading_with = Renamed("use_encoding")

    def forward(
        self,
        ids: Int[Tensor, "batch seq"],
        positions: Positions | None = None,
        caches: Sequence[KVCache] | None = None,
    ) -> Float[Tensor, "batch seq vocab_size"]:
        """Return scores for the next token after each token.

        Args:
            positions: the positions of the tokens. By default, they follow the cached tokens, or start at 0.
            caches: one `KVCache` per layer. The keys and values of these tokens are added to it without gradients.
        """
        if positions is None:
            positions = Positions.after(len(caches[0]) if caches else 0, ids.shape[1], device=ids.device)
        x = self.embedding(ids, positions)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, self.encoding, positions, cache)
        return self.embedding.token.logits(self.norm(x))

    @property
    def encoding(self) -> PositionEncoding:
        """The encoding of the embedding and of all layers."""
        return self.embedding.encoding

    def losses(
        self, ids: Int[Tensor, "batch seq"], targets: Int[Tensor, "batch seq"], positions: Positions
    ) -> Float[Tensor, "batch seq"]:
        """Return the loss of each target in nats, on the model's device. It is zero for a target of -100."""
        scores = self.scores(ids, positions)
        return F.cross_entropy(scores.transpose(1, 2), targets.to(scores.device), reduction="none")

    def scores(self, ids: Int[Tensor, "batch seq"], positions: Positions) -> Float[Tensor, "batch seq vocab_size"]:
        """Call `forward` with tensors on any device, in bfloat16 on CUDA. Return its scores in float32."""
        device = self.norm.weight.device
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            return self(ids.to(device), positions.to(device)).float()


class Block(nn.Module):
    """Causal attention and an MLP. Each of the two reads the normalised residual stream and adds to it."""

    def __init__(
        self, d_model: int, num_heads: int, num_layers: int, attended: int, keys_are_values: bool, qk_norm: bool
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.keys_are_values = keys_are_values
        self.attention_norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, (2 if keys_are_values else 3) * d_model, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(d_model // num_heads, NORM_EPS) if qk_norm else None for _ in range(2))
        self.out = nn.Linear(attended, d_model, bias=False)
        self.mlp_norm = nn.LayerNorm(d_model)
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)
        for output in (self.out, self.down):  # so that the variance does not grow with depth (GPT-2)
            nn.init.normal_(output.weight, std=0.02 / (2 * num_layers) ** 0.5)

    @property
    def head_norm(self) -> HeadNorm | None:
        """The norm of queries and keys, or ``None`` without one."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorm(self.q_norm.weight, self.k_norm.weight, NORM_EPS)

    def forward(self, x: Tensor, encoding: PositionEncoding, positions: Positions, cache: KVCache | None) -> Tensor:
        width = x.shape[-1] // self.num_heads
        hidden = self.attention_norm(x)
        positions = encoding.read(hidden, positions, None if cache is None else cache.positions)
        heads = self.qkv(hidden).unflatten(-1, (-1, self.num_heads, width))
        q, k, *own_values = heads.permute(2, 0, 3, 1, 4)
        q, k = encoding.norm_and_rotate(q, k, positions, self.head_norm)
        v = k if self.keys_are_values else own_values[0]
        k_positions = None
        if cache is not None:
            k, v, k_positions = cache.append(k, v, positions)
        y = attend(q, k, v, encoding=encoding, positions=positions, k_positions=k_positions)
        if self.keys_are_values:
            y = encoding.unrotate(y, positions)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


@torch.no_grad()
def _attention_width(encoding: PositionEncoding, num_heads: int, width: int, keys_are_values: bool) -> int:
    """Return the output width of attention. An encoding may add query heads (RoPE++) or widen keys (PoPE)."""
    nothing = torch.empty(1, num_heads, 0, width, device=next(encoding.parameters(), torch.empty(0)).device)
    hidden = nothing.transpose(1, 2).flatten(2)
    q, k = encoding.rotate(nothing, nothing, encoding.read(hidden, Positions.arange(0, device=nothing.device)))
    return q.shape[1] * (k.shape[-1] if keys_are_values else width)
