"""ReRoPE: no distance beyond a window. Su 2023, https://kexue.fm/archives/9708."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from locant.arguments import whole
from locant.positions.base import EncodingInfo, ModelShape, build
from locant.positions.encodings.rotary import Rotary
from locant.positions.positions import Positions
from locant.positions.rotary_by_class import PairClass, RotaryByClass, near_and_far

__all__ = ["ReRoPE"]


class ReRoPE(RotaryByClass):
    r"""Keys near the query are rotated as trained; all others as if they stood at the end of a window.

    .. math:: \text{distance}(i, j) = \min(i - j, w)

    No distance is larger than `window`, so a model reads texts of any length without training. Its author multiplies
    queries beyond the trained length L by ``log(n + 1) / log L``, too; that is left to who calls.

    Args:
        rotary: as the model was trained.
        window: the largest distance; less than the trained length.

    Limits:
        Causal attention through `attend` alone, without a window of its own. Tokens beyond the window cannot be told
        apart by their position. What `RotaryByClass` costs, as `SelfExtend`.

    Tested against:
        Attention written out in NumPy with the distance of every pair, forward and by every gradient.

    >>> import locant, torch
    >>> encoding = ReRoPE(Rotary(16), window=6)
    >>> q, k = torch.randn(1, 4, 20, 16), torch.randn(1, 2, 20, 16)
    >>> where = Positions.arange(20)
    >>> locant.attend(*encoding.rotate(q, k, where), k, encoding=encoding, positions=where).shape
    torch.Size([1, 4, 20, 16])
    """

    info = EncodingInfo(
        name="rerope",
        aliases=("rectified_rope",),
        kind="relative",
        parameters="none",
        cost_of_tokens="in every layer, twice what rotary costs",
        cost_of_pairs="nothing",
        extrapolation="without training, to any length; beyond the window all distances are one",
        used_by="rerope",
        paper="Su 2023, https://kexue.fm/archives/9708",
    )

    def __init__(self, rotary: Rotary, window: int = 512) -> None:
        super().__init__(rotary)
        self.window = whole("window", window, 1, remedy="window=512, below the trained length")

    @classmethod
    def for_model(cls, shape: ModelShape, **options: Any) -> ReRoPE:
        """The window is half of the trained length."""
        return build(cls, {"rotary": Rotary(shape.head_dim), "window": max(1, shape.max_seq_len // 2)} | options)

    def classes(self, positions: Positions, k_positions: Positions | None = None) -> Sequence[PairClass]:
        """The keys within the window, and all tokens before them."""
        return near_and_far(
            positions,
            k_positions,
            self.window,
            far=lambda index: index * 0 + self.window,
            far_keys=lambda index: index * 0,
        )

    def extra_repr(self) -> str:
        return f"{self.rotary}, window={self.window}"
