"""RePo: context re-positioning. Li et al. 2025, https://arxiv.org/abs/2512.14391."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, shape_error, whole
from locant.errors import LocantError
from locant.kernels.rotary import rotate_pairs
from locant.positions.base import (
    EncodingInfo,
    Keys,
    Output,
    PositionEncoding,
    Queries,
    require_embeddings,
    require_heads,
)
from locant.positions.constant import Constant
from locant.positions.fields import Read
from locant.positions.frequencies import base_of, inverse_frequencies, width_of
from locant.positions.hidden_bias import REMEDY, projected
from locant.positions.positions import Positions

__all__ = ["RePo"]


class RePo(PositionEncoding):
    r"""RoPE at positions that are no numbers of tokens: every head reads, of its hidden state, where a token stands.

    .. math:: r_i = \mathrm{silu}(W_g x_i) \odot W_c x_i, \qquad z_{h,i} = w_h \cdot r_i, \qquad
        \text{angle}_{h,i,p} = z_{h,i} \, \text{base}^{-2p/d}

    The positions z are real numbers, and nothing orders them: what came first is for the causal mask to tell, and in
    the paper for the layers below, which have plain RoPE. A model calls `read` in every layer, with what queries and
    keys are made from, and gives `rotate` the positions that come back; a cache needs nothing beside the rotated keys.
    Queries of one key/value head share its positions. Angles are formed in float64.

    In the paper every layer has positions of its own: an encoding for each layer.

    Args:
        head_dim: dimensions per head.
        num_heads: of keys and values; query heads are a multiple.
        d_model: the width of the hidden states.
        width: of r; default: an eighth of `d_model`, as in the paper.
        base: of the frequencies.

    Limits:
        It looks at no index: tokens with equal hidden states stand at one place, wherever they are. Cached keys cannot
        be moved. `locant.swap` has no hidden states for it.

    Tested against:
        The paper's formula in NumPy, forward and every gradient; `Rotary`, where what is read is the index.

    >>> repo, x, q = RePo(64, 8, 512), torch.randn(2, 5, 512), torch.randn(2, 8, 5, 64)
    >>> positions = repo.read(x, Positions.arange(5))
    >>> repo.rotate(q, q, positions)[0].shape
    torch.Size([2, 8, 5, 64])
    """

    info = EncodingInfo(
        name="repo",
        aliases=("re_positioning",),
        kind="relative",
        parameters="2 width x d_model + num_heads x width",
        cost_of_tokens="in every layer, 2 width products, one per head, and cosines and sines for each head",
        cost_of_pairs="nothing",
        extrapolation="better than rotary in its paper: positions need not grow with the length",
        used_by="its paper's models",
        paper="Li 2025, arXiv 2512.14391",
    )

    def __init__(
        self, head_dim: int, num_heads: int, d_model: int, *, width: int | None = None, base: float = 10_000.0
    ) -> None:
        super().__init__()
        self.head_dim = width_of("head_dim", head_dim, remedy="head_dim=64, an even width")
        self.num_heads = whole("num_heads", num_heads, 1, MAX_WIDTH, remedy="num_heads=8")
        self.d_model = whole("d_model", d_model, 1, MAX_WIDTH, remedy="the width of the hidden states")
        eighth = max(self.d_model // 8, 1)
        self.width = eighth if width is None else whole("width", width, 1, MAX_WIDTH, remedy=f"width={eighth}")
        self.base = base_of(base)
        frequencies = [*map(float, inverse_frequencies(self.head_dim, self.base))]
        self._frequencies = Constant(torch.tensor(frequencies, dtype=torch.float64, device="cpu"))
        self.gate = nn.Parameter(torch.empty(self.width, self.d_model))
        self.content = nn.Parameter(torch.empty(self.width, self.d_model))
        self.weight = nn.Parameter(torch.empty(self.num_heads, self.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def read(
        self, x: Float[Tensor, "batch seq d_model"], positions: Positions, past: Positions | None = None
    ) -> Positions:
        """The positions of `x`, with where every head has its token."""
        require_embeddings(self, x, positions, self.d_model)
        gate, content = (projected(x, weight, torch.float64) for weight in (self.gate, self.content))
        places = projected(F.silu(gate) * content, self.weight, torch.float64)
        return dataclasses.replace(positions.expand(x.shape[0]), read=Read(of_query=places))

    def rotate(
        self, q: Queries, k: Keys, positions: Positions, k_positions: Positions | None = None, *, inplace: bool = False
    ) -> tuple[Queries, Keys]:
        """Both, in the dtype they came in; the arithmetic is float32 at least."""
        keys = positions if k_positions is None else k_positions
        rotated = self._turned("q", q, positions, 1), self._turned("k", k, keys, 1)
        return (q.copy_(rotated[0]), k.copy_(rotated[1])) if inplace else rotated

    def unrotate(self, y: Output, positions: Positions) -> Output:
        """The inverse rotation, of values that were rotated as the keys are."""
        return self._turned("y", y, positions, -1)

    def _turned(self, name: str, x: Tensor, positions: Positions, direction: int) -> Tensor:
        require_heads(name, x, positions, self.head_dim)
        places = positions.read.of_query
        if places is None:
            raise LocantError("got positions without what RePo reads of hidden states", REMEDY)
        if x.shape[1] % self.num_heads:
            raise shape_error(name, x, f"a multiple of {self.num_heads} heads", f"num_heads={x.shape[1]}")
        angle = places.expand(len(x), -1, -1).mT[..., None] * self._frequencies.on(x.device)
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (each.to(dtype).flatten(0, 1) for each in (angle.cos(), angle.sin() * direction))
        rows = x.reshape(x.shape[0] * self.num_heads, x.shape[1] // self.num_heads, *x.shape[2:])
        return rotate_pairs(rows, cos, sin, "half").view(x.shape)

    def extra_repr(self) -> str:
        sizes = f"head_dim={self.head_dim}, num_heads={self.num_heads}, d_model={self.d_model}, width={self.width}"
        return f"{sizes}, base={self.base:g}"
