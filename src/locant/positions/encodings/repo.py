"""RePo: context re-positioning. Li et al. 2025, https://arxiv.org/abs/2512.14391."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, Real, whole
from locant.errors import LocantError
from locant.positions.base import Embeddings, EncodingInfo, Output, require_embeddings
from locant.positions.constant import Constant
from locant.positions.encodings.rotary_by_head import PerHeadRotation
from locant.positions.fields import TokenFeatures
from locant.positions.frequencies import inverse_frequencies
from locant.positions.hidden_bias import REMEDY, project
from locant.positions.positions import OptionalPositions, Positions, require_positions
from locant.spelling import literal


class RePo(PerHeadRotation):
    r"""RoPE with learned positions: every head computes a token's position from its hidden state.

    .. math:: r_i = \mathrm{silu}(W_g x_i) \odot W_c x_i, \qquad z_{h,i} = w_h \cdot r_i, \qquad
        \text{angle}_{h,i,p} = z_{h,i} \, \text{base}^{-2p/d}

    The positions z are real numbers in any order. The order of tokens comes from the causal mask and, in the paper,
    from the lower layers, which have plain RoPE. A model calls `read` in every layer, with the hidden states from which
    queries and keys are projected, and passes the returned positions to `rotate`. A cache needs only the rotated keys.
    Query heads share the positions of their key/value head. Angles are computed in float64.

    In the paper every layer has its own positions, so build an encoding for each layer.

    Args:
        head_dim: dimensions per head.
        num_heads: the number of key/value heads. The number of query heads is a multiple.
        d_model: the width of the hidden states.
        width: the width of r. Default: an eighth of `d_model`, as in the paper.
        base: the base of the frequencies.

    Limits:
        It ignores the index: tokens with equal hidden states have the same position. Cached keys cannot be moved.
        `locant.swap` does not support it, because no hidden states are available there.

    Tested against:
        The paper's formula in NumPy, forward and every gradient, and `Rotary` at positions equal to the index.

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
        self, head_dim: int, num_heads: int, d_model: int, *, width: int | None = None, base: Real = 10_000.0
    ) -> None:
        super().__init__(head_dim, num_heads, base)
        self.d_model = whole("d_model", d_model, 1, MAX_WIDTH, remedy="pass the width of the hidden states")
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
        """Return `positions` with the learned position of each token in every head."""
        require_positions(positions)
        require_embeddings(self, x, positions, self.d_model)
        gate, content = (project(x, weight, torch.float64) for weight in (self.gate, self.content))
        places = project(F.silu(gate) * content, self.weight, torch.float64)
        return dataclasses.replace(positions.expand(x.shape[0]), read=TokenFeatures(of_query=places))

    def unrotate(self, y: Output, positions: OptionalPositions = None) -> Output:
        """Undo the rotation, for values with the same rotation as the keys."""
        return self._rotate_tensor("y", y, positions, inverse=True)

    def cos_sin_per_head(self, positions: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        places = positions.read.of_query
        if places is None:
            raise LocantError("got positions without the features that RePo reads from hidden states", REMEDY)
        angle = places.mT[..., None] * self._frequencies.on(places.device)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def extra_repr(self) -> str:
        sizes = f"head_dim={self.head_dim}, num_heads={self.num_heads}, d_model={self.d_model}, width={self.width}"
        return f"{sizes}, base={literal(self.base)}"
