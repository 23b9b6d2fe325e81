"""Learned absolute positions: one trained vector per position, as in GPT-2 and BERT (Devlin et al. 2019)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from locant.arguments import MAX_WIDTH, one_of, real, whole
from locant.kernels.input_embedding import look_up
from locant.positions.base import EncodingInfo, PositionEncoding, require_embeddings
from locant.positions.positions import Positions

__all__ = ["Learned", "ResizeMethod"]

ResizeMethod = Literal["extend", "interpolate"]

INIT_STD = 0.02  # GPT-2 and BERT


class Learned(PositionEncoding):
    r"""Adds row p of a trained table to the token at position p.

    .. math:: x_p \leftarrow x_p + W_{p + \text{offset}}

    Args:
        max_seq_len: how many positions there are.
        d_model: the width of the token embeddings.
        offset: rows before position 0, which some checkpoints have (RoBERTa and OPT: 2).
        init_std: rows start as N(0, init_std**2); default 0.02, as in GPT-2 and BERT. Rows much smaller than the token
            rows they are added to are learned slowly.

    Limits:
        There is no row past the end of the table: a position there is refused. Rows that no training text
        reached mean nothing. `resize` makes a table longer.

    Tested against:
        `transformers`' OPT, and rows looked up by hand.

    >>> Learned(512, 256).embed(torch.zeros(8, 4, 256), Positions.arange(4)).shape
    torch.Size([8, 4, 256])
    """

    info = EncodingInfo(
        name="learned",
        aliases=("absolute", "learned_absolute", "position_embedding"),
        kind="absolute",
        parameters="max_seq_len x d_model",
        cost_of_tokens="one row looked up, d_model additions",
        cost_of_pairs="nothing",
        extrapolation="none: there is no row past the table, and rows never trained mean nothing",
        used_by="BERT, GPT-2, GPT-3, OPT, RoBERTa",
        paper="Devlin 2018, arXiv 1810.04805",
    )

    def __init__(self, max_seq_len: int, d_model: int, *, offset: int = 0, init_std: float = INIT_STD) -> None:
        super().__init__()
        self.max_seq_len = whole("max_seq_len", max_seq_len, 1, remedy="the number of positions")
        width = whole("d_model", d_model, 1, MAX_WIDTH, remedy="the width of the token embeddings")
        self.offset = whole("offset", offset, 0, remedy="offset=0, or 2 for tables of RoBERTa and OPT")
        self.init_std = real("init_std", init_std, low=0, remedy="init_std=0.02")
        self.weight = nn.Parameter(torch.empty(self.max_seq_len + self.offset, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)

    @property
    def d_model(self) -> int:
        return self.weight.shape[1]

    def embed(self, x: Float[Tensor, "batch seq d_model"], positions: Positions) -> Float[Tensor, "batch seq d_model"]:
        """`x` with each token's row added; a `RangeError` names the first position that has no row."""
        require_embeddings(self, x, positions, self.d_model)
        self.require_rows(positions)
        return x + look_up(self.row_of(positions), self.weight)

    def added_rows(
        self, positions: Positions, num_tokens: int, dtype: torch.dtype
    ) -> tuple[Int[Tensor, "#batch seq"], Float[Tensor, "rows d_model"]]:
        """The table itself, as it is."""
        positions.require_single_axis("Learned")
        self.require_rows(positions)
        return self.row_of(positions), self.weight

    def require_rows(self, positions: Positions) -> None:
        """Raise unless every position has a row; see `Positions.require_within`."""
        name, remedy = f"Learned(max_seq_len={self.max_seq_len})", "shorter windows, or a larger max_seq_len"
        positions.require_within(0, self.max_seq_len - 1, name, remedy)

    def row_of(self, positions: Positions) -> Int[Tensor, "batch seq"]:
        """Which row of the table each position has; in a graph, one before 0 may come, and gets -1, which has none."""
        if not self.offset:
            return positions.index
        rows = positions.index + self.offset
        bounds_known = positions.min_index is not None and positions.max_index is not None
        return rows if bounds_known else rows.masked_fill(positions.index < 0, -1)  # not one of those before the offset

    def resize(self, max_seq_len: int, *, method: ResizeMethod = "extend") -> None:
        """Grow the table in place to `max_seq_len` positions; it never shrinks, and offset rows are kept as they are.

        The weight is a new parameter afterwards: build the optimizer after resizing.

        Args:
            max_seq_len: how many positions there shall be.
            method: ``"extend"`` keeps every old row byte for byte and starts the new ones like fresh ones.
                ``"interpolate"`` stretches the table: row p is interpolated at ``p (old - 1) / (new - 1)``.

        >>> learned = Learned(2, 1)
        >>> _ = learned.weight.data.copy_(torch.tensor([[0.0], [1.0]]))
        >>> learned.resize(5, method="interpolate")
        >>> learned.weight.flatten().tolist()
        [0.0, 0.25, 0.5, 0.75, 1.0]
        """
        one_of("method", method, get_args(ResizeMethod))
        has = self.max_seq_len
        max_seq_len = whole("max_seq_len", max_seq_len, has, remedy=f"resize({has}) or more; rows are never dropped")
        if max_seq_len == has:
            return
        with torch.no_grad():
            if method == "interpolate":
                parts = [self.weight[: self.offset], _stretched(self.weight[self.offset :], max_seq_len)]
            else:
                fresh = self.weight.new_empty(max_seq_len - has, self.d_model).normal_(std=self.init_std)
                parts = [self.weight, fresh]
            self.weight = nn.Parameter(torch.cat(parts), requires_grad=self.weight.requires_grad)
        self.max_seq_len = max_seq_len

    def extra_repr(self) -> str:
        offset = f", offset={self.offset}" if self.offset else ""
        return f"max_seq_len={self.max_seq_len}, d_model={self.d_model}{offset}"


def _stretched(rows: Float[Tensor, "old d_model"], new: int) -> Float[Tensor, "new d_model"]:
    """Linear interpolation with both ends kept; in float64, rounded once. Whole-number places copy their row."""
    place = torch.arange(new, dtype=torch.float64, device=rows.device) * (len(rows) - 1) / (new - 1)
    below = place.floor().long()
    above = (below + 1).clamp(max=len(rows) - 1)
    share = (place - below)[:, None]
    exact = rows.double()
    return (exact[below] * (1 - share) + exact[above] * share).to(rows.dtype)
