"""Positions by convolution, as in wav2vec 2 (Baevski et al. 2020, after Mohamed et al. 2019)."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, flag, one_of, whole
from locant.errors import LocantError, RangeError
from locant.positions.base import Embeddings, EncodingInfo, PositionEncoding, require_embeddings
from locant.positions.documents import PADDING
from locant.positions.positions import OptionalPositions, Positions
from locant.tensors import has_values

Norm = Literal["weight", "layer"]


class Convolutional(PositionEncoding):
    r"""Adds the output of a wide grouped convolution over its neighbours to every token.

    .. math:: x \leftarrow x + \mathrm{GELU}(W * x + b), \qquad
        W_{\cdot \cdot j} = g_j \, \frac{V_{\cdot \cdot j}}{\lVert V_{\cdot \cdot j} \rVert}

    There are no indices. A token's position follows from its neighbours, and from the zeros beyond both ends of its
    document. The result of a document is the same if it is packed, padded or alone. (Published code convolves whole
    rows, so packed documents would leak into each other. data2vec's code includes padding from its second layer on.)

    - wav2vec 2, HuBERT, WavLM, UniSpeech: ``Convolutional(768)``
    - data2vec-audio: ``Convolutional(768, kernel_size=19, depth=5, norm="layer")``

    Args:
        d_model: the width of the token embeddings.
        kernel_size: the number of tokens in the kernel, which is centred on the token. An even kernel covers one more
            token before it than after it.
        groups: the number of groups of channels. Default: the greatest common divisor of `d_model` and 16.
        depth: the number of convolutions, one after another.
        norm: ``"weight"`` learns the size of each tap of the kernel separately. ``"layer"`` normalises each token after
            each convolution, without parameters.
        causal: whether to hide later tokens.

    Limits:
        Documents have to be complete, so tokens after a cache, shards and slices raise an error. The first tokens of a
        document do not raise an error, because they look like a shorter document. In a graph, padded or packed rows
        raise an error, because the host has to read where their documents begin.

    Tested against:
        `transformers`' wav2vec 2 and data2vec-audio, a row alone, forward and every gradient.

    >>> Convolutional(64, kernel_size=15).embed(torch.zeros(2, 9, 64), Positions.arange(9)).shape
    torch.Size([2, 9, 64])
    """

    info = EncodingInfo(
        name="convolutional",
        aliases=("conv", "convolution", "wav2vec2"),
        kind="relative",
        parameters="kernel_size x d_model x d_model / groups, for each convolution",
        cost_of_tokens="kernel_size x d_model / groups multiplications for each dimension",
        cost_of_pairs="nothing",
        extrapolation="good: a token sees only its neighbourhood at every length",
        used_by="wav2vec 2, HuBERT, WavLM, data2vec-audio",
        paper="Baevski 2020, arXiv 2006.11477",
    )

    def __init__(
        self,
        d_model: int,
        *,
        kernel_size: int = 128,
        groups: int | None = None,
        depth: int = 1,
        norm: Norm = "weight",
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.d_model = whole("d_model", d_model, 1, MAX_WIDTH, remedy="pass the width of the token embeddings")
        self.kernel_size = whole("kernel_size", kernel_size, 1, remedy="kernel_size=128")
        usual = math.gcd(self.d_model, 16)
        self.groups = usual if groups is None else whole("groups", groups, 1, remedy=f"groups={usual}")
        if self.d_model % self.groups:
            got = f"got d_model={self.d_model} for groups={self.groups}, expected a multiple"
            raise RangeError(got, f"groups={usual}")
        self.depth = whole("depth", depth, 1, remedy="depth=1")
        one_of("norm", norm, get_args(Norm))
        self.norm: Norm = norm
        self.causal = flag("causal", causal)
        shape = (self.depth, self.d_model, self.d_model // self.groups, self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape))
        self.gain = nn.Parameter(torch.empty(self.depth, self.kernel_size)) if norm == "weight" else None
        self.shift = nn.Parameter(torch.empty(self.depth, self.d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as in wav2vec 2."""
        nn.init.normal_(self.weight, std=2 * (self.kernel_size * self.d_model) ** -0.5)
        nn.init.zeros_(self.shift)
        if self.gain is not None:
            with torch.no_grad():
                self.gain.copy_(self.weight.norm(dim=(1, 2)))

    @property
    def reach(self) -> int:
        """The distance to a token's farthest earlier neighbour."""
        return self.kernel_size - 1 if self.causal else self.kernel_size // 2

    def embed(self, x: Embeddings, positions: OptionalPositions = None) -> Embeddings:
        """Add the convolution over its neighbours to each token of `x`. Padding does not change."""
        positions = require_embeddings(self, x, positions, self.d_model)
        if positions.document_or_none is None and positions.start == 0:
            return x + self._convolve(x)
        slots, places = self._lay_out(positions.expand(len(x)))
        if not len(slots):
            return x
        row = x.new_zeros(int(places[-1]) + 1, self.d_model).index_copy(0, places, x.flatten(0, 1)[slots])
        inside = row.new_zeros(len(row), 1).index_fill(0, places, 1)
        added = self._convolve(row[None], inside)[0, places]
        return x + added.new_zeros(x.flatten(0, 1).shape).index_copy(0, slots, added).view_as(x)

    def _convolve(
        self, x: Float[Tensor, "batch seq d_model"], inside: Float[Tensor, "seq 1"] | None = None
    ) -> Float[Tensor, "batch seq d_model"]:
        """Convolve rows of documents. Reset tokens that are not `inside` a document to zero after each convolution."""
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        x, seq_len = x.to(dtype), x.shape[1]
        if not seq_len:
            return x
        for number, weight in enumerate(self._kernels().to(dtype)):
            shift = self.shift[number].to(dtype)
            y = F.conv1d(x.mT, weight, shift, padding=self.reach, groups=self.groups)[..., :seq_len].mT
            y = F.layer_norm(y, (self.d_model,)) if self.norm == "layer" else y
            x = F.gelu(y)
            x = x if inside is None else x * inside.to(dtype)
        return x

    def _kernels(self) -> Float[Tensor, "depth d_model channels taps"]:
        if self.gain is None:
            return self.weight
        return self.weight * (self.gain / self.weight.norm(dim=(1, 2)))[:, None, None]

    def _lay_out(self, positions: Positions) -> tuple[Int[Tensor, " tokens"], Int[Tensor, " tokens"]]:
        """Return the slots of all tokens, and their places in one long row with gaps between documents.

        The gaps are as long as the kernel reaches. This reads the documents from the device, and raises `LocantError`
        unless they are complete.
        """
        name = type(self).__name__
        if not has_values(positions.index):
            got = f"got packed or padded positions in a graph, {name} reads their documents"
            raise LocantError(got, "call encoding.embed(x, positions) outside of the compiled code")
        document, order = positions.document.flatten(), positions.order.flatten()
        slots = (document != PADDING).nonzero()[:, 0]
        rows, document, order = slots // max(positions.seq_len, 1), document[slots], order[slots]
        begins = torch.ones_like(slots, dtype=torch.bool)
        begins[1:] = (rows.diff() != 0) | (document.diff() != 0)
        places = torch.arange(len(slots), device=slots.device)
        expected = places - torch.where(begins, places, 0).cummax(0).values
        if wrong := (order != expected).nonzero()[:1].flatten().tolist():
            number, slot = (int(each[wrong[0]]) for each in (order, expected))
            got = f"got a document whose token {slot} has the order {number}, {name} needs whole documents"
            raise LocantError(got, "pass all tokens at once, without a cache, Positions.slice or Positions.shard")
        return slots, places + (begins.cumsum(0) - 1) * self.reach

    def extra_repr(self) -> str:
        options = {"depth": self.depth if self.depth > 1 else 0, "causal": self.causal}
        changed = "".join(f", {name}={value}" for name, value in options.items() if value)
        return f"{self.d_model}, kernel_size={self.kernel_size}, groups={self.groups}, norm={self.norm!r}{changed}"
