"""The main rule: a padded, packed, cached, chunked or sharded row gets the same result as alone, bit for bit.

Each arrangement maps tokens of rows to slots, for queries and for keys. `check` puts the tokens there, calls `embed`,
`rotate` and `bias` of the encoding, and compares every entry with the result of the row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from locant import ALiBi, Learned, PositionEncoding, Positions, Rotary, Sinusoidal, T5Bias

HEADS, KV_HEADS, HEAD_DIM, D_MODEL = 6, 2, 14, 11
LENGTHS = [8, 1, 16]
"""The lengths of the three rows. Lengths that are split over four ranks are multiples of 8."""


@dataclass(frozen=True)
class Piece:
    """Tokens `places` of row `row` are in slots `slots` of batch row `batch`."""

    batch: int
    slots: Tensor
    row: int
    places: Tensor


@dataclass(frozen=True)
class Side:
    positions: Positions
    pieces: list[Piece]


@dataclass(frozen=True)
class Tokens:
    """The embeddings, queries and keys of the three rows."""

    x: list[Tensor]
    q: list[Tensor]
    k: list[Tensor]


def whole(row: int, batch: int = 0, first: int = 0) -> Piece:
    places = torch.arange(LENGTHS[row])
    return Piece(batch, places + first, row, places)


def alone(row: int) -> Side:
    return Side(Positions.arange(LENGTHS[row]), [whole(row)])


def padded(side: str) -> Iterator[tuple[Side, Side]]:
    width = max(LENGTHS) + 3
    firsts = [width - n if side == "left" else 0 for n in LENGTHS]
    mask = torch.zeros(len(LENGTHS), width)
    for row, (n, first) in enumerate(zip(LENGTHS, firsts, strict=True)):
        mask[row, first : first + n] = 1
    both = Side(Positions.from_mask(mask), [whole(row, row, firsts[row]) for row in range(len(LENGTHS))])
    yield both, both


def packed() -> Iterator[tuple[Side, Side]]:
    n = LENGTHS
    both = Side(
        Positions.packed([[n[1], 0, n[2]], [n[0], n[1], n[1]]], length=n[2] + 5),
        [whole(1), whole(2, 0, n[1]), whole(0, 1), whole(1, 1, n[0]), whole(1, 1, n[0] + n[1])],
    )
    yield both, both


def cached() -> Iterator[tuple[Side, Side]]:
    """One query after another, with all keys so far."""
    for row, n in enumerate(LENGTHS):
        for p in range(n):
            seen = torch.arange(p + 1)
            query = Side(Positions.after(p, 1), [Piece(0, torch.tensor([0]), row, torch.tensor([p]))])
            yield query, Side(Positions.arange(p + 1), [Piece(0, seen, row, seen)])


def cached_together() -> Iterator[tuple[Side, Side]]:
    """Rows 0 and 2 in one batch, with caches of different lengths."""
    for step in range(0, LENGTHS[0], 3):
        starts = [step, step + LENGTHS[2] - LENGTHS[0]]
        pieces = [Piece(b, torch.tensor([0]), row, torch.tensor([starts[b]])) for b, row in enumerate((0, 2))]
        side = Side(Positions.after(torch.tensor(starts), 1), pieces)
        yield side, side


def chunked() -> Iterator[tuple[Side, Side]]:
    for row, n in enumerate(LENGTHS):
        for first in range(0, n, 5):
            places = torch.arange(first, min(first + 5, n))
            chunk = Side(
                Positions.arange(n).slice(first, first + 5), [Piece(0, torch.arange(len(places)), row, places)]
            )
            yield chunk, alone(row)
            yield alone(row), chunk


def sharded() -> Iterator[tuple[Side, Side]]:
    for row in (0, 2):
        for rank in range(4):
            slots = Positions.arange(LENGTHS[row]).shard_slots(rank, 4)
            part = Side(Positions.arange(LENGTHS[row]).shard(rank, 4), [Piece(0, torch.arange(len(slots)), row, slots)])
            yield part, part
            yield part, alone(row)


ARRANGEMENTS: dict[str, Callable[[], Iterator[tuple[Side, Side]]]] = {
    "padded left": lambda: padded("left"),
    "padded right": lambda: padded("right"),
    "packed": packed,
    "cached one by one": cached,
    "cached together": cached_together,
    "chunked": chunked,
    "sharded zigzag over 4": sharded,
}


def encodings_of(heads: int, head_dim: int, d_model: int, rows: int) -> dict[str, Callable[[], PositionEncoding]]:
    """One encoding of each kind, for these sizes. A learned table has `rows` rows."""
    return {
        "nope": PositionEncoding,
        "learned": lambda: Learned(rows, d_model),
        "sinusoidal": lambda: Sinusoidal(d_model),
        "rotary": lambda: Rotary(head_dim),
        "rotary interleaved": lambda: Rotary(head_dim, layout="interleaved"),
        "rotary partial": lambda: Rotary(head_dim, rotary_dim=4),
        "rotary float32": lambda: Rotary(head_dim, angles="float32"),
        "alibi": lambda: ALiBi(heads),
        "t5": lambda: T5Bias(heads),
        "t5 both ways": lambda: T5Bias(heads, bidirectional=True),
    }


ENCODINGS = encodings_of(HEADS, HEAD_DIM, D_MODEL, max(LENGTHS))


def laid_out(tokens: list[Tensor], side: Side, axis: int) -> Tensor:
    """The tokens of all pieces in their slots; noise everywhere else."""
    one = tokens[0]
    shape = [side.positions.batch, *one.shape[1:]]
    shape[axis] = side.positions.seq_len
    out = torch.randn(shape).to(one.dtype)
    for piece in side.pieces:
        target = out[piece.batch].movedim(axis - 1, 0)
        target[piece.slots] = tokens[piece.row][0].movedim(axis - 1, 0)[piece.places]
    return out


def require_same(name: str, actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected), f"{name} is not what the row alone gets"


def expected_of(encoding: PositionEncoding, tokens: Tokens) -> dict[str, list[Tensor]]:
    rows = range(len(LENGTHS))
    rotated = [encoding.rotate(tokens.q[r], tokens.k[r], Positions.arange(LENGTHS[r])) for r in rows]
    biases = [encoding.bias(tokens.q[r], tokens.k[r], Positions.arange(LENGTHS[r])) for r in rows]
    return {
        "embed": [encoding.embed(tokens.x[r], Positions.arange(LENGTHS[r])) for r in rows],
        "q": [q for q, _ in rotated],
        "k": [k for _, k in rotated],
        "bias": [b for b in biases if b is not None],
    }


def check(
    encoding: PositionEncoding, queries: Side, keys: Side, tokens: Tokens, expected: dict[str, list[Tensor]]
) -> None:
    x = encoding.embed(laid_out(tokens.x, queries, 1), queries.positions)
    q, k = laid_out(tokens.q, queries, 2), laid_out(tokens.k, keys, 2)
    k_positions = None if keys is queries else keys.positions
    rotated_q, rotated_k = encoding.rotate(q, k, queries.positions, k_positions)
    for piece in queries.pieces:
        require_same("embed", x[piece.batch, piece.slots], expected["embed"][piece.row][0, piece.places])
        require_same("q", rotated_q[piece.batch][:, piece.slots], expected["q"][piece.row][0][:, piece.places])
    for piece in keys.pieces:
        require_same("k", rotated_k[piece.batch][:, piece.slots], expected["k"][piece.row][0][:, piece.places])
    bias = encoding.bias(q, k, queries.positions, k_positions)
    assert (bias is None) == (not expected["bias"])
    if bias is None:
        return
    bias = bias.expand(queries.positions.batch, *bias.shape[1:])
    compared = 0
    for a in queries.pieces:
        for b in keys.pieces:
            if a.batch == b.batch and a.row == b.row and (a is b or keys is not queries):
                wanted = expected["bias"][a.row][0][:, a.places][:, :, b.places]
                require_same("bias", bias[a.batch][:, a.slots][:, :, b.slots], wanted)
                compared += 1
    assert compared


@torch.no_grad()
def require_same_alone(encoding: PositionEncoding, arrangement: str, tokens: Tokens) -> None:
    expected = expected_of(encoding, tokens)
    for queries, keys in ARRANGEMENTS[arrangement]():
        check(encoding, queries, keys, tokens, expected)


def three_rows(dtype: torch.dtype) -> Tokens:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    return Tokens(
        [draw(1, n, D_MODEL) for n in LENGTHS],
        [draw(1, HEADS, n, HEAD_DIM) for n in LENGTHS],
        [draw(1, KV_HEADS, n, HEAD_DIM) for n in LENGTHS],
    )


class CountsSlots(Rotary):
    """A wrong encoding that, like much code, takes positions from the shape of the tensor."""

    def rotate(self, q, k, positions, k_positions=None, *, inplace=False):
        keys = positions if k_positions is None else k_positions
        return super().rotate(q, k, Positions.arange(positions.seq_len), Positions.arange(keys.seq_len))
