"""Refuse parts of rows without the tokens before them, for everything that depends on earlier tokens.

Running sums, convolutions and n-grams of a part of a row would silently begin again at its first token.
"""

from __future__ import annotations

from locant.errors import LocantError
from locant.positions.positions import Positions
from locant.tensors import host_can_read

COUNT = "If no token is missing, use Positions.of(index, order=...) with an order that counts the existing tokens"


def require_earlier_tokens(positions: Positions, owner: str, *, of_cache: str, of_shard: str) -> None:
    """Raise `LocantError` if tokens before or between these tokens are known to be missing.

    The host knows this for shards (`Positions.shard`) and for positions that begin after 0. On a CPU it also finds a
    number that is missing in a row. Positions with an order of their own are accepted, unless they are a shard.

    Args:
        owner: the name of what needs the tokens.
        of_cache: the argument with the tokens before these ones.
        of_shard: what to call with a shard.
    """
    if positions.is_shard:
        got = f"got a shard of a row, and {owner} needs the tokens before each token, which other ranks hold"
        raise LocantError(got, of_shard)
    if positions.order_or_none is None and (missing := _missing_tokens(positions)) is not None:
        raise LocantError(f"got {missing}, which {owner} needs", f"pass {of_cache}. {COUNT}")


def _missing_tokens(positions: Positions) -> str | None:
    """Return a description of tokens without the tokens before them, or ``None``."""
    if not positions.seq_len:
        return None
    if first := positions.start or max(positions.min_index or 0, 0):
        return f"tokens from position {first} on without the tokens before them"
    if positions.start is not None or positions.axes > 1 or not host_can_read(positions.index):
        return None
    index = positions.index.sort(dim=1).values  # documents may count on, so only the whole row has every number
    if len(late := index[:, 0][index[:, 0] > 0]):
        return f"a row of tokens from position {int(late[0])} on without the tokens before them"
    steps = index.clamp(min=-1).diff(dim=1) > 1
    if not bool(steps.any()):
        return None
    row, slot = steps.nonzero()[0].tolist()
    low, high = index[row, slot : slot + 2].tolist()
    return f"tokens at positions {low} and {high} without the tokens between them"
