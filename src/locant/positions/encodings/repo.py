"""RePo: context re-positioning. Li et al. 2025, https://arxiv.org/abs/2512.14391."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, whole
from locant.errors import LocantError
from locant.positions.base import Embeddings, EncodingInfo, Output, require_embeddings
from locant.positions.constant import Constant
from locant.positions.encodings.rotary_by_head import RotaryOfHeads
from locant.positions.fields import Read
from locant.positions.frequencies import inverse_frequencies
from locant.positions.hidden_bias import REMEDY, project
from locant.positions.positions import Positions, Where


class RePo(RotaryOfHeads):
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
        super().__init__(head_dim, num_heads, base)
        self.d_model = whole("d_model", d_model, 1, MAX_WIDTH, remedy="the width of the hidden states")
        eighth = max(self.d_model // 8, 1)
        self.width = eighth if width is None else whole("width", width, 1, MAX_WIDTH, remedy=f"width={eighth}")
        frequencies = [*map(float, inverse_frequencies(self.head_dim, self.base))]
        self._frequencies = Constant(torch.tensor(frequencies, dtype=torch.float64, device="cpu"))
        self.gate = nn.Parameter(torch.empty(self.width, self.d_model))
        self.content = nn.Parameter(torch.empty(self.width, self.d_model))
        self.weight = nn.Parameter(torch.empty(self.num_heads, self.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def read(self, x: Embeddings, positions: Positions, past: Positions | None = None) -> Positions:
        """The positions of `x`, with where every head has its token."""
        require_embeddings(self, x, positions, self.d_model)
        gate, content = (project(x, weight, torch.float64) for weight in (self.gate, self.content))
        places = project(F.silu(gate) * content, self.weight, torch.float64)
        return dataclasses.replace(positions.expand(x.shape[0]), read=Read(of_query=places))

    def unrotate(self, y: Output, positions: Where = None) -> Output:
        """The inverse rotation, of values that were rotated as the keys are."""
        return self._rotated("y", y, positions, inverse=True)

    def cos_sin_of_heads(self, positions: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        places = positions.read.of_query
        if places is None:
            raise LocantError("got positions without what RePo reads of hidden states", REMEDY)
        angle = places.mT[..., None] * self._frequencies.on(places.device)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def extra_repr(self) -> str:
        sizes = f"head_dim={self.head_dim}, num_heads={self.num_heads}, d_model={self.d_model}, width={self.width}"
        return f"{sizes}, base={self.base:g}"
