"""A small decoder-only transformer that knows nothing about positions except the three doors."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.attention import attend
from locant.embedding import InputEmbedding
from locant.errors import RangeError
from locant.positions import PositionEncoding, Positions

__all__ = ["Decoder"]


class Decoder(nn.Module):
    """Pre-norm blocks of attention and MLP over an `InputEmbedding`, with the token table as its head.

    One encoding serves the embedding and all layers, so any encoding can take the place of any other.

    >>> import torch
    >>> model = Decoder(256, PositionEncoding(), d_model=32, num_layers=2, num_heads=4)
    >>> model(torch.zeros(3, 7, dtype=torch.long)).shape
    torch.Size([3, 7, 256])
    """

    def __init__(
        self, vocab_size: int, encoding: PositionEncoding, *, d_model: int, num_layers: int, num_heads: int
    ) -> None:
        super().__init__()
        if d_model % num_heads:
            raise RangeError(
                f"got d_model={d_model} for num_heads={num_heads}, expected a multiple",
                f"d_model={d_model // num_heads * num_heads or num_heads}",
            )
        self.embedding = InputEmbedding(vocab_size, d_model, encoding=encoding, scale="sqrt_d_model", norm="layer_norm")
        self.blocks = nn.ModuleList(Block(d_model, num_heads, num_layers) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model)

    def forward(
        self, ids: Int[Tensor, "batch seq"], positions: Positions | None = None
    ) -> Float[Tensor, "batch seq vocab_size"]:
        """Scores for the token after each token."""
        positions = Positions.arange(ids.shape[1], device=ids.device) if positions is None else positions
        x = self.embedding(ids, positions)
        for block in self.blocks:
            x = block(x, self.embedding.encoding, positions)
        return self.embedding.token.logits(self.norm(x))


class Block(nn.Module):
    """Causal attention, then an MLP, each on the normed stream and added to it."""

    def __init__(self, d_model: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.mlp_norm = nn.LayerNorm(d_model)
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)
        for into_stream in (self.out, self.down):  # keeps the stream's variance from growing with depth (GPT-2)
            nn.init.normal_(into_stream.weight, std=0.02 / (2 * num_layers) ** 0.5)

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], encoding: PositionEncoding, positions: Positions
    ) -> Float[Tensor, "batch seq d_model"]:
        x = x + self._attend(self.attention_norm(x), encoding, positions)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def _attend(self, x: Tensor, encoding: PositionEncoding, positions: Positions) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        q, k = encoding.rotate(q, k, positions)
        y = attend(q, k, v, encoding=encoding, positions=positions)
        return self.out(y.transpose(1, 2).flatten(-2))
