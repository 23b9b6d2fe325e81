"""Sinusoidal positions: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.5."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from locant.arguments import Real, one_of, real, whole
from locant.kernels.rotary import Layout
from locant.positions.angles import Angles
from locant.positions.base import Embeddings, EncodingInfo, PositionEncoding, require_embeddings
from locant.positions.frequencies import check_base, check_width, inverse_frequencies
from locant.positions.positions import OptionalPositions, Positions, positions_or_length
from locant.spelling import literal
from locant.tensors import as_dtype

First = Literal["sine", "cosine"]


class Sinusoidal(PositionEncoding):
    r"""Adds a fixed pattern of sines and cosines, one wavelength for each pair of dimensions.

    .. math:: \mathrm{PE}(p, 2i) = \sin \frac{p}{\text{base}^{2i/d}}, \qquad
        \mathrm{PE}(p, 2i + 1) = \cos \frac{p}{\text{base}^{2i/d}}

    It has no parameters and no maximal length, and it is exact at every position. An odd `d_model` has one more sine
    than cosines.

    Some published models order the dimensions differently, or count positions from another number:

    - the paper, XLM: ``Sinusoidal(512)``
    - CTRL, Marian, Pegasus: ``Sinusoidal(512, layout="half")``
    - M2M100, XGLM, FSMT: ``Sinusoidal(512, base=10_000 ** (256 / 255), layout="half", offset=2)``. Their last
      wavelength is exactly 2 pi times 10 000.
    - MusicGen: ``Sinusoidal(512, base=10_000 ** (256 / 255), layout="half", first="cosine")``

    Args:
        d_model: the width of the token embeddings.
        base: the longest wavelength is about 2 pi times this number.
        layout: ``"interleaved"``, in which sines and cosines alternate, or ``"half"``, in which one kind comes first.
        first: the kind that comes first.
        offset: the number that is added to every position.
        scale: a factor of the vectors.

    Limits:
        Vectors exist at every position, but a model has not learned the vectors that it has never seen.

    Tested against:
        The paper's formula in NumPy, 50-digit arithmetic (mpmath) up to position 2^31 - 1, and the vectors that 16
        models of `transformers` add.

    >>> Sinusoidal(256).vectors(2)[0, 1, :2]
    tensor([0.8415, 0.5403])
    """

    info = EncodingInfo(
        name="sinusoidal",
        aliases=("sin", "sinusoid", "sincos", "fixed"),
        kind="absolute",
        parameters="none",
        cost_of_tokens="d_model sines and cosines, d_model additions",
        cost_of_pairs="nothing",
        extrapolation="defined everywhere, but models do not understand positions that they never saw",
        used_by="the original Transformer, Marian, Pegasus, M2M100, XGLM, Whisper's encoder",
        paper="Vaswani 2017, arXiv 1706.03762",
    )

    def __init__(
        self,
        d_model: int,
        *,
        base: Real = 10_000.0,
        layout: Layout = "interleaved",
        first: First = "sine",
        offset: int = 0,
        scale: Real = 1.0,
    ) -> None:
        super().__init__()
        self.d_model = check_width("d_model", d_model, 1, even=False, remedy="pass the width of the token embeddings")
        self.base = check_base(base)
        one_of("layout", layout, get_args(Layout))
        one_of("first", first, get_args(First))
        self.layout: Layout = layout
        self.first: First = first
        self.offset = whole("offset", offset, 0, remedy="offset=0, or 2 for M2M100")
        self.scale = real("scale", scale, remedy="scale=1.0")
        self.angles = Angles(inverse_frequencies(self.d_model, self.base))

    def vectors(
        self, positions: Positions | int, dtype: torch.dtype | str = torch.float32
    ) -> Float[Tensor, "batch seq d_model"]:
        """Return the position vectors, in float32 or float64. For a number n, use the positions 0 to n - 1."""
        positions = positions_or_length(positions)
        positions.require_single_axis("Sinusoidal")
        low, high = (None if end is None else end + self.offset for end in (positions.min_index, positions.max_index))
        dtype = as_dtype(dtype) if isinstance(dtype, str) else dtype
        cos, sin = self.angles.cos_sin(positions.index + self.offset, high, low, dtype)
        parts = [sin, cos] if self.first == "sine" else [cos, sin]
        if self.layout == "interleaved":
            vectors = torch.stack(parts, dim=-1).flatten(-2)[..., : self.d_model]
        else:
            vectors = torch.cat(parts, dim=-1)[..., : self.d_model]
        return vectors if self.scale == 1 else vectors * self.scale

    @property
    def inv_freq(self) -> Float[Tensor, " pairs"]:
        """The radians per position of each pair of dimensions, in float64 on the CPU.

        >>> Sinusoidal(8).inv_freq.tolist()
        [1.0, 0.1, 0.01, 0.001]
        """
        return self.angles.inv_freq

    def embed(self, x: Embeddings, positions: OptionalPositions = None) -> Embeddings:
        """Add the position vectors in float32 and round once to the dtype of `x`."""
        positions = require_embeddings(self, x, positions, self.d_model)
        dtype = torch.promote_types(x.dtype, torch.float32)
        return (x.to(dtype) + self.vectors(positions, dtype)).to(x.dtype)

    def extra_repr(self) -> str:
        options = {"layout": (self.layout, "interleaved"), "first": (self.first, "sine"), "offset": (self.offset, 0)}
        changed = [f", {name}={value!r}" for name, (value, usual) in options.items() if value != usual]
        scale = "" if self.scale == 1 else f", scale={literal(self.scale)}"
        return f"d_model={self.d_model}, base={literal(self.base)}{''.join(changed)}{scale}"
