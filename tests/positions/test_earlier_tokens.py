"""Everything that depends on earlier tokens refuses a part of a row without them, instead of beginning again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from locant import LocantError, NGramEmbedding, Positions
from locant.embedding import NGramGate, NGramHash, TokenHistory
from locant.positions.encodings.path import PaTH
from locant.positions.encodings.selective_rope import SelectiveRoPE
from tests.refusal import refuses
from tests.tolerances import assert_close

HASHING = NGramHash.of(orders=(2, 3), heads=2, size=20, vocab_size=50)
SELECTIVE, PATH = SelectiveRoPE(4, 2, 8, rank=2), PaTH(2, 4, 8, rank=2)
TABLE, GATE = NGramEmbedding(HASHING, 3), NGramGate(5, 6)


def ids(n: int) -> torch.Tensor:
    return torch.arange(n)[None] % 50


def hidden(at: Positions, width: int) -> torch.Tensor:
    return torch.randn(at.batch, at.seq_len, width)


OWNERS: dict[str, tuple[Callable[[Positions], object], str]] = {
    "SelectiveRoPE": (lambda at: SELECTIVE.read(hidden(at, 8), at), "past=cache.positions"),
    "convolution of PaTH": (lambda at: PATH.read(hidden(at, 8), at), "past=cache.positions"),
    "NGramEmbedding": (lambda at: TABLE(ids(at.seq_len).expand(at.batch, -1), at), "history="),
    "convolution of NGramGate": (lambda at: GATE(hidden(at, 6), hidden(at, 5), at), "history="),
}
PACKED = Positions.packed([8, 4])
SHARDS = {
    "zigzag, first rank": Positions.arange(8).shard(0, 2),
    "contiguous, first rank": Positions.arange(8).shard(0, 2, zigzag=False),
    "contiguous, last rank": Positions.arange(8).shard(1, 2, zigzag=False),
    "packed, which has every number": Positions.packed([4, 2]).shard(0, 2, zigzag=False),
}
PARTS = {
    "after": (Positions.after(4, 3), "from position 4 on"),
    "each row after its own cache": (Positions.after(torch.tensor([4]), 3), "from position 4 on"),
    "one of the rows": (Positions.of([[0, 1, 2], [6, 7, 8]]), "a row of tokens from position 6 on"),
    "a gap": (Positions.of([[0, 1, 5]]), "positions 1 and 5 without the tokens between"),
    "the end of a document": (PACKED.slice(3, 8), "from position 3 on"),
}
WHOLE = {
    "two documents": PACKED,
    "padding": Positions.from_mask(torch.tensor([[0, 1, 1, 0, 1]])),
    "documents that count on": Positions.of(torch.arange(6), [0, 0, 1, 1, -1, 1]),
    "one rank": PACKED.shard(0, 1),
    "another first number": Positions.of([[7, 8, 12]], order=torch.arange(3)),
    "no token": Positions.after(4, 0),
}


@pytest.mark.parametrize(("call", "past"), OWNERS.values(), ids=OWNERS)
@pytest.mark.parametrize("shard", SHARDS.values(), ids=SHARDS)
def test_a_shard_is_refused_on_every_rank(call: Callable[[Positions], object], past: str, shard: Positions) -> None:
    owner = next(name for name, each in OWNERS.items() if each[0] is call)
    with refuses(LocantError, "a shard of a row", owner, "other ranks hold"):
        call(shard)


def test_a_shard_is_known_where_the_host_cannot_read_its_numbers() -> None:
    """Also after a slice, in a batch of several rows and on another device."""
    shard = Positions.arange(8).shard(1, 2).to("meta").slice(0, 3).expand(2)
    path = PaTH(2, 4, 8, rank=2).to("meta")
    with refuses(LocantError, "a shard of a row"):
        path.read(torch.randn(2, 3, 8, device="meta"), shard)


@pytest.mark.parametrize(("call", "past"), OWNERS.values(), ids=OWNERS)
@pytest.mark.parametrize(("part", "words"), PARTS.values(), ids=PARTS)
def test_missing_tokens_are_refused(
    call: Callable[[Positions], object], past: str, part: Positions, words: str
) -> None:
    with refuses(LocantError, words, past, "order="):
        call(part)


@pytest.mark.parametrize(("call", "past"), OWNERS.values(), ids=OWNERS)
@pytest.mark.parametrize("rows", WHOLE.values(), ids=WHOLE)
def test_whole_rows_are_accepted(call: Callable[[Positions], object], past: str, rows: Positions) -> None:
    call(rows)


def test_tokens_after_a_cache_are_accepted() -> None:
    """Also a single one, and a part of a packed row."""
    x = torch.randn(1, 12, 8)
    for encoding in (SELECTIVE, PATH):
        whole = encoding.read(x, PACKED).read.of_key
        assert whole is not None
        past = encoding.read(x[:, :5], PACKED.slice(0, 5))
        later = encoding.read(x[:, 5:], PACKED.slice(5, 12), past).read.of_key
        assert later is not None
        assert_close(later, whole[:, 5:])
    history = TokenHistory()
    TABLE(ids(5), PACKED.slice(0, 5), history=history)
    assert torch.equal(TABLE(ids(12)[:, 5:], PACKED.slice(5, 12), history=history), TABLE(ids(12), PACKED)[:, 5:])


def test_without_neighbours_a_shard_is_like_a_row() -> None:
    shard = Positions.arange(8).shard(1, 2)
    PaTH(2, 4, 8, rank=2, convolution=False).read(torch.randn(1, 4, 8), shard)
    NGramEmbedding(NGramHash.of(orders=(1,), heads=1, size=9, vocab_size=50), 3)(ids(4), shard)


@pytest.mark.parametrize("encoding", [SELECTIVE, PATH], ids=["SelectiveRoPE", "PaTH"])
def test_hidden_states_without_positions_are_refused(encoding: Any) -> None:
    with refuses(LocantError, "NoneType", "expected Positions"):
        encoding.read(torch.randn(1, 3, 8), None)


def test_a_history_of_another_type_is_refused() -> None:
    with refuses(LocantError, "list", "TokenHistory"):
        TABLE(ids(3), history=[])
