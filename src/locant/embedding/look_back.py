"""Look back from each token to earlier tokens of its document, in whole rows or in pieces.

`look_back` returns values that stand a number of tokens earlier. It does not cross a document, and padding is not a
token: it does not count and does not separate. So a row that is padded on either side or between its tokens, packed, or
read in pieces with a `TokenHistory` has what the same row alone has.

A document that another document interrupts begins again. Rows of a part of the sequence (`Positions.shard`) do not have
the tokens before them. Look back in the whole row, and take the slots of the part then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from locant.arguments import whole
from locant.errors import LocantError, RangeError, ShapeError
from locant.positions.cached_rows import check_lengths, require_rows
from locant.positions.documents import PADDING
from locant.positions.earlier_tokens import require_earlier_tokens
from locant.positions.positions import OptionalPositions, positions_or_default, require_positions
from locant.spelling import dtype_name

SHARD = "pass the whole row with its Positions, and take the rank's tokens then: [:, row.shard_slots(rank, world)]"
"""The remedy for a shard of a row."""
Values = Shaped[Tensor, "batch seq *width"]
Documents = Int[Tensor, "batch seq"]


class TokenHistory:
    """The values of the last tokens of every row, for decoding: one for each module that looks back.

    It holds only the real tokens that the module looks back to, and `spare` more, which `truncate` may remove. It is
    for inference: what it stores has no gradient.

    Args:
        spare: the largest number of tokens that `truncate` removes from a row, such as rejected draft tokens.

    >>> history, ids = TokenHistory(), torch.tensor([[5, 6, 7]])
    >>> look_back(ids, None, [1], history=history)[0][0].tolist()
    [[0, 5, 6]]
    >>> look_back(ids[:, :1], None, [1], history=history)[0][0].tolist(), len(history)
    ([[7]], 4)
    """

    def __init__(self, spare: int = 64) -> None:
        self.spare = whole("spare", spare, 0, remedy="spare=64")
        self.clear()

    def __len__(self) -> int:
        """Return the number of slots read so far, padding included."""
        return 0 if self._is_real is None else self._is_real.shape[1]

    def clear(self) -> None:
        """Forget all tokens."""
        self._values: Values | None = None
        self._document: Documents | None = None
        self._is_real: Bool[Tensor, "batch slots"] | None = None
        self._reach = 0

    @property
    def last_document(self) -> Int[Tensor, "batch 1"] | None:
        """The document of the last token of every row, -1 for a row without a token, or ``None`` before any token."""
        return None if self._document is None else self._document[:, -1:]

    def truncate(self, length: int | Int[Tensor, " batch"]) -> None:
        """Remove all tokens after the first `length` slots, padding included. `length` may differ between rows.

        As in `KVCache`, removed tokens of shorter rows become padding. The host waits for the numbers.

        >>> history = TokenHistory()
        >>> _ = look_back(torch.tensor([[5, 6, 7]]), None, [1], history=history)
        >>> history.truncate(2)
        >>> look_back(torch.tensor([[9]]), None, [1], history=history)[0][0].tolist()
        [[6]]
        """
        if self._values is None or self._document is None or self._is_real is None:
            whole("length", length, 0, 0, remedy="pass 0 for an empty history")
            return
        slots = len(self)
        lengths = check_lengths(length, slots, len(self._is_real), self._is_real.device)
        high = int(lengths.amax())
        is_kept = torch.arange(slots, device=lengths.device) < lengths[:, None]
        is_real = self._is_real & is_kept
        removed = self._is_real.sum(1) - is_real.sum(1)
        held, all_real = (self._document != PADDING).sum(1), self._is_real.sum(1)
        removable = torch.where(held >= all_real, all_real, held - self._reach)
        if (lacking := int((removed - removable).amax())) > 0:
            row = int((removed - removable).argmax())
            got = f"got {int(removed[row])} tokens to remove from row {row}, whose history holds {int(removable[row])}"
            remedy = f"use TokenHistory(spare={self.spare + lacking}), or clear() it and read the row again"
            raise RangeError(f"{got} tokens that it can remove", remedy)
        source = torch.arange(self._document.shape[1], device=removed.device) - removed[:, None]
        self._document = self._document.gather(1, source.clamp(min=0)).masked_fill(source < 0, PADDING)
        self._values = _take(self._values, source.clamp(min=0))
        self._is_real = is_real[:, :high]

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these rows, in this order, for beam search. Rows may be repeated."""
        if self._values is None or self._document is None or self._is_real is None:
            raise LocantError("got rows to reorder in an empty history", "read the prompt first")
        require_rows(rows, len(self._document), self._document.device)
        self._values, self._document, self._is_real = (
            each.index_select(0, rows) for each in (self._values, self._document, self._is_real)
        )

    def extend(
        self, values: Values, document: Documents | None, reach: int
    ) -> tuple[Shaped[Tensor, "batch slots *width"], Int[Tensor, "batch slots"]]:
        """Return stored and new values, and their documents. Without documents, each row continues its last one."""
        batch, size = len(values), max(reach + self.spare, 1)
        if self._values is None or self._document is None:
            self._reach = reach
            self._values = values.new_zeros(batch, size, *values.shape[2:])
            self._document = torch.full((batch, size), PADDING, dtype=torch.int64, device=values.device)
        past = self._values
        layout = (batch, *values.shape[2:], values.dtype, values.device, reach)
        if layout != (len(past), *past.shape[2:], past.dtype, past.device, self._reach):
            got = f"got {tuple(values.shape)} {dtype_name(values.dtype)} on {values.device} to look back {reach} tokens"
            expected = f"{tuple(past.shape)} {dtype_name(past.dtype)} on {past.device} for {self._reach}"
            raise ShapeError(f"{got}, the history holds {expected}", "use one TokenHistory() per module and batch")
        if document is None:
            document = self._document[:, -1:].clamp(min=0).expand(values.shape[:2])
        is_real = document != PADDING
        self._is_real = is_real if self._is_real is None else torch.cat([self._is_real, is_real], 1)
        return torch.cat([past, values], 1), torch.cat([self._document, document], 1)

    def keep(self, values: Values, document: Documents) -> None:
        """Store the last tokens of rows in which padding comes first."""
        size = max(self._reach + self.spare, 1)
        self._values, self._document = (
            values[:, values.shape[1] - size :].detach(),
            document[:, document.shape[1] - size :],
        )


def resolve_documents(
    x: Shaped[Tensor, "batch seq *width"],
    positions: OptionalPositions,
    history: TokenHistory | None,
    what: str,
    owner: str,
    *,
    matter: bool = True,
) -> Documents | None:
    """Return the document of each token of `x`, or ``None`` if each row is one document, or continues the history.

    Raise `LocantError` if the tokens before these ones matter for `owner` and are known to be missing.
    """
    if history is not None and not isinstance(history, TokenHistory):
        got = f"got history of type {type(history).__name__}, expected a TokenHistory"
        raise LocantError(got, "history=locant.embedding.TokenHistory(), one for each module")
    is_first = history is None or not len(history)
    if positions is None and not is_first:
        return None
    positions = positions_or_default(positions, x.shape[1], x.device, matter=is_first and matter)
    require_positions(positions)
    positions.require_fits(x.shape[0], x.shape[1], x.device, what)
    if is_first and matter:
        cache = "history=locant.embedding.TokenHistory(), the same one for the prompt"
        require_earlier_tokens(positions, owner, of_cache=cache, of_shard=SHARD)
    return None if is_first and positions.document_or_none is None else positions.document.expand(x.shape[:2])


def look_back(
    values: Values,
    document: Documents | None,
    shifts: Sequence[int],
    *,
    end: int | None = None,
    history: TokenHistory | None = None,
) -> tuple[list[Values], list[Bool[Tensor, "batch seq"]]]:
    """For each shift, return the values of the tokens that many places earlier, and whether these tokens exist.

    The values of missing tokens are arbitrary. Padding has no earlier tokens.

    Args:
        values: ids, or vectors.
        document: the document of each token, -1 for padding, or ``None`` for rows of one document.
        shifts: the distances, each 1 or more.
        end: the value of a token that ends a text. Later tokens do not look back to it. Only for ids.
        history: the tokens before these ones. The new ones are added.
    """
    batch, seq_len = values.shape[:2]
    document = None if document is None else document.expand(batch, seq_len)
    may_have_padding, order = document is not None, None
    if history is not None:
        values, document = history.extend(values, document, max(shifts, default=0))
    if may_have_padding and document is not None:  # real tokens move to the end of the row and keep their order
        order = (document != PADDING).to(torch.uint8).argsort(dim=1, stable=True)
        values, document = _take(values, order), document.gather(1, order)
    if history is not None and document is not None:
        history.keep(values, document)
    part = _count_parts(values, document, end)
    is_real = torch.ones_like(part, dtype=torch.bool) if document is None else document != PADDING
    slot = torch.arange(values.shape[1], device=values.device)
    seen = [_shift(values, shift) for shift in shifts]
    exists = [is_real & (slot >= shift) & (_shift(part, shift) == part) for shift in shifts]
    if order is not None:
        slots = order.argsort(dim=1)
        seen, exists = [_take(each, slots) for each in seen], [each.gather(1, slots) for each in exists]
    first = values.shape[1] - seq_len
    return [each[:, first:] for each in seen], [each[:, first:] for each in exists]


def _count_parts(values: Values, documents: Documents | None, end: int | None) -> Int[Tensor, "batch seq"]:
    """Number the texts of each row: a text begins with a document, or after a token that ends one."""
    begins = torch.zeros(values.shape[:2], dtype=torch.bool, device=values.device)
    if documents is not None:
        begins = begins | (documents != _shift(documents, 1))
    if end is not None:
        begins = begins | (_shift(values, 1) == end)
    return begins.cumsum(1)


def _shift(values: Values, by: int) -> Values:
    """Move values to later slots. The first ones repeat the first value."""
    by = min(by, values.shape[1])
    return torch.cat([values[:, :1].expand(-1, by, *values.shape[2:]), values[:, : values.shape[1] - by]], 1)


def _take(values: Values, slots: Int[Tensor, "batch slots"]) -> Values:
    """Return the values at these slots of every row."""
    index = slots.view(*slots.shape, *[1] * (values.ndim - 2)).expand(*slots.shape, *values.shape[2:])
    return values.gather(1, index)
