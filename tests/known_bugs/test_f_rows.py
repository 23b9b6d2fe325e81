"""Entries about where tokens stand: rows that are padded, packed, cached in chunks or cut for several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from locant import ALiBi, KVCache, PositionEncoding, Positions, Rotary, attend
from tests.known_bugs.exhibit import exhibit, same_alone
from tests.known_bugs.subjects import HEADS, WIDTH, queries
from tests.positions import test_same_alone as rows
from tests.positions.test_same_alone import CountsSlots
from tests.tolerances import DECODED

OURS = (
    Rotary(rows.HEAD_DIM),
    Rotary(rows.HEAD_DIM, sections=(2, 2, 3)),
    Rotary(rows.HEAD_DIM, sections=(2, 2, 3), axial=True),
    ALiBi(rows.HEADS),
)


def test_72_a_padded_row_is_the_row_alone() -> None:
    """unslothai/unsloth#3699, huggingface/transformers#22161, #26137 and #48161, ndif-team/nnsight#673: short rows.

    In a left-padded batch all rows shared the positions of the longest, so that the first token of a short row did not
    stand at 0. On the right that happens to be right.
    """
    twin = CountsSlots(rows.HEAD_DIM)
    exhibit(same_alone("padded left"), *OURS, twin=twin, because="q is not what the row alone gets")
    for encoding in (*OURS, twin):
        same_alone("padded right")(encoding)


class Way(NamedTuple):
    """How the second of two rows is padded, and where the prompt is cut."""

    left: int
    right: int
    cuts: Sequence[int]


PROMPT, NEW = 8, 3
PADDINGS = ((0, 0), (3, 0), (0, 3), (2, 1))
CUTS = ((0, 8), (0, 3, 4, 8), range(9))
WAYS = [Way(*padding, cuts) for padding, cuts in product(PADDINGS, CUTS)]
Chunk = Callable[[Tensor, int, int], Positions]


def decoded(encoding: PositionEncoding, x: Tensor, mask: Tensor, way: Way, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """Keys and outputs of all slots: the prompt in chunks, then tokens one at a time, all through a cache."""
    cache, outputs, keys = KVCache(), [], x
    for begin, end in (*pairwise(way.cuts), *((slot, slot + 1) for slot in range(PROMPT, PROMPT + NEW))):
        positions = chunk(mask, begin, end) if end <= PROMPT else cache.next_positions()
        some = x[:, :, begin:end]
        q, k = encoding.rotate(some, some, positions)
        keys, values, k_positions = cache.append(k, some, positions)
        outputs.append(attend(q, keys, values, encoding=encoding, positions=positions, k_positions=k_positions))
    return keys, torch.cat(outputs, dim=2)


@pytest.mark.parametrize("encoding", [Rotary(WIDTH), ALiBi(HEADS)], ids=["rotary", "alibi"])
@torch.no_grad()
def test_73_padding_together_with_a_cache(encoding: PositionEncoding) -> None:
    """mosaicml/examples#257: right with padding and right with a cache, and wrong only with both.

    The mask was cut to the new tokens before it was added up, and the tokens already cached were added without asking
    which of them were padding.
    """
    x = queries(encoding, 2 * (PROMPT + NEW)).view(HEADS, 2, PROMPT + NEW, WIDTH).transpose(0, 1)

    def check_one(chunk: Chunk, way: Way) -> None:
        mask = torch.ones(2, PROMPT, dtype=torch.long)
        mask[1, : way.left] = mask[1, PROMPT - way.right :] = 0
        keys, outputs = decoded(encoding, x, mask, way, chunk)
        real = torch.cat([mask, torch.ones(2, NEW, dtype=torch.long)], dim=1).bool()
        for row in range(2):
            alone, where = x[row, :, real[row]][None], Positions.arange(int(real[row].sum()))
            q, k = encoding.rotate(alone, alone, where)
            assert torch.equal(keys[row, :, real[row]], k[0]), f"{way}: keys are rotated differently"
            y = attend(q, k, alone, encoding=encoding, positions=where)
            off = float((outputs[row, :, real[row]] - y[0]).abs().max())
            assert off <= DECODED, f"{way}: the output is off by {off:.2g}"

    def check(chunk: Chunk) -> None:
        for way in WAYS:
            check_one(chunk, way)

    def ours(mask: Tensor, begin: int, end: int) -> Positions:
        return Positions.from_mask(mask).slice(begin, end)

    def cut_first(mask: Tensor, begin: int, end: int) -> Positions:
        some = Positions.from_mask(mask[:, begin:end])
        return Positions.of(some.index + begin, some.document)

    exhibit(check, ours, twin=cut_first, because=r"Way\(left=[23], .*: ")
    for way in WAYS:
        if not way.left + way.right or len(way.cuts) == 2:
            check_one(cut_first, way)  # with one of the two, the bug does not show


def test_77_a_document_packed_with_others_is_the_document_alone() -> None:
    """allenai/OLMo-core#591 and #654, pytorch/torchtitan#2559 and #2560, huggingface/nanoVLM#201: packed documents.

    Positions went on counting across documents, or never arrived (`positions` was always None). That a whole model
    cannot tell is in `tests/lab/test_decoder.py`.
    """
    twin = CountsSlots(rows.HEAD_DIM)
    exhibit(same_alone("packed"), *OURS, twin=twin, because="q is not what the row alone gets")


def test_78_documents_of_one_token_stay_apart() -> None:
    """modelscope/ms-swift#9904: neighbouring documents of one token became one.

    A boundary was seen where the position is smaller than the one before, and after 0 comes 0.
    """

    def check(boundaries: Callable[[Positions], Tensor]) -> None:
        for lengths in ([3, 1], [1, 1], [0, 1, 0, 1, 3], [1, 3, 1, 1, 1]):
            real = [n for n in lengths if n]
            expected = [sum(real[:i]) for i in range(len(real) + 1)]
            found = boundaries(Positions.packed(lengths)).tolist()
            assert found == expected, f"documents of {lengths} begin at {found}, not {expected}"

    def where_it_decreases(positions: Positions) -> Tensor:
        index = positions.index[0]
        starts = (index[1:] < index[:-1]).nonzero().flatten() + 1
        return torch.cat([torch.tensor([0]), starts, torch.tensor([len(index)])])

    exhibit(check, Positions.cu_seqlens, twin=where_it_decreases, because=r"documents of \[1, 1\] begin at \[0, 2\]")


def test_79_every_document_is_cut_for_itself() -> None:
    """NVIDIA/Megatron-LM#5243: under context parallelism a rank had positions of the first sequence only.

    The whole row was cut as if it were one sequence. Documents of 4 and 4 on two ranks: the first has 0, 3, 4 and 7.
    """

    def check(cut: Callable[[Positions, int, int], Tensor]) -> None:
        slots = [cut(Positions.packed([4, 4]), rank, 2).tolist() for rank in range(2)]
        assert slots == [[0, 3, 4, 7], [1, 2, 5, 6]], f"rank 0 has {slots[0]}"

    def as_one_sequence(positions: Positions, rank: int, world: int) -> Tensor:
        return Positions.arange(positions.seq_len).shard_slots(rank, world)

    exhibit(check, Positions.shard_slots, twin=as_one_sequence, because=r"rank 0 has \[0, 1, 6, 7\]")


def test_79_shards_put_together_are_the_whole() -> None:
    """NVIDIA/Megatron-LM#5243, NVIDIA-NeMo/Automodel#1482 and #2377: three ways for a rank to stand elsewhere.

    Positions of the wrong sequence; coordinates of images cut along their axes; a fused path that counted from 0.
    """
    arrangement = "sharded zigzag over 4"
    twin = CountsSlots(rows.HEAD_DIM)
    exhibit(same_alone(arrangement), *OURS, twin=twin, because="q is not what the row alone gets")
    rotary, grid, x = Rotary(WIDTH, sections=(2, 3, 3)), Positions.grid(2, 4, 4), torch.randn(1, HEADS, 32, WIDTH)
    for rank in range(2):
        slots = grid.shard_slots(rank, 2)
        mine = rotary.rotate(x[:, :, slots], x[:, :, slots], grid.shard(rank, 2))[0]
        assert torch.equal(mine, rotary.rotate(x, x, grid)[0][:, :, slots])
