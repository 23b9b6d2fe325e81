"""Self-Extend: near tokens as trained, far ones in groups. Jin et al. 2024, https://arxiv.org/abs/2401.01325."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from locant.arguments import whole
from locant.positions.base import EncodingInfo, ModelShape, build
from locant.positions.encodings.rotary import Rotary
from locant.positions.positions import Positions
from locant.positions.rotary_by_class import PairClass, RotaryByClass, near_and_far

__all__ = ["SelfExtend"]


class SelfExtend(RotaryByClass):
    r"""Keys near the query are rotated as trained; far ones by where their group of tokens stands.

    .. math:: \text{distance}(i, j) = \begin{cases} i - j & i - j < w \\
        \lfloor i / G \rfloor - \lfloor j / G \rfloor + w - \lfloor w / G \rfloor & \text{otherwise}\end{cases}

    with w `neighbours` and groups of G tokens. No distance is larger than the trained length L up to
    ``(L - w) * G + w`` tokens, so a model reads on without any training.

    Args:
        rotary: as the model was trained.
        group: tokens that share a position where they are far away.
        neighbours: the distance from which tokens are far; less than the trained length.

    Limits:
        Causal attention through `attend` alone, without a window of its own. Far tokens of one group cannot be told
        apart by their position. What `RotaryByClass` costs: two rotations, and behind a cache one of all its keys in
        every step.

    Tested against:
        Attention written out in NumPy with the distance of every pair, forward and by every gradient.

    >>> import locant, torch
    >>> encoding = SelfExtend(Rotary(16), group=4, neighbours=6)
    >>> q, k = torch.randn(1, 4, 20, 16), torch.randn(1, 2, 20, 16)
    >>> where = Positions.arange(20)
    >>> locant.attend(*encoding.rotate(q, k, where), k, encoding=encoding, positions=where).shape
    torch.Size([1, 4, 20, 16])
    """

    info = EncodingInfo(
        name="self_extend",
        aliases=("longlm",),
        kind="relative",
        parameters="none",
        cost_of_tokens="in every layer, twice what rotary costs",
        cost_of_pairs="nothing",
        extrapolation="without training, to the group size times the trained length, at coarser distances",
        used_by="LongLM, llama.cpp",
        paper="Jin 2024, arXiv 2401.01325",
    )

    def __init__(self, rotary: Rotary, group: int = 8, neighbours: int = 1024) -> None:
        super().__init__(rotary)
        self.group = whole("group", group, 1, remedy="group=8")
        self.neighbours = whole("neighbours", neighbours, 1, remedy="neighbours=1024, below the trained length")

    @classmethod
    def for_model(cls, shape: ModelShape, **options: Any) -> SelfExtend:
        """Half of the trained length are neighbours."""
        usual = {"rotary": Rotary(shape.head_dim), "neighbours": max(1, shape.max_seq_len // 2)}
        return build(cls, usual | options)

    def classes(self, positions: Positions, k_positions: Positions | None = None) -> Sequence[PairClass]:
        """The neighbours, and all tokens before them."""
        shift = self.neighbours - self.neighbours // self.group
        return near_and_far(
            positions,
            k_positions,
            self.neighbours,
            far=lambda index: index // self.group + shift,
            far_keys=lambda index: index // self.group,
        )

    def extra_repr(self) -> str:
        return f"{self.rotary}, group={self.group}, neighbours={self.neighbours}"
