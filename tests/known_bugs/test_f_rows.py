"""Entries about where tokens stand: rows that are padded, packed, cached in chunks or cut for several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise, product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from locant import KVCache, PositionEncoding, Positions, Rotary, attend
from locant.lab.decoder import Decoder
from tests.known_bugs.biased import BIASES, built
from tests.known_bugs.exhibit import exhibit
from tests.known_bugs.subjects import DISTINCT, EVERY, HEADS, WIDTH, Build, differences, queries, use
from tests.tolerances import DECODED, LOGITS

REAL = 5
"""Tokens of every row that are there."""

ALL: dict[str, Build] = {
    **EVERY,
    **{name: partial(built, name) for name in BIASES},
}
ENCODINGS = {name: ALL[name] for name in (*DISTINCT, *(name for name in ALL if name not in EVERY))}


def padded(pads: int, side: str) -> Tensor:
    """A mask of two rows: the first as full as can be, the second with so many pads fewer tokens."""
    mask = torch.ones(2, REAL + pads, dtype=torch.long)
    mask[1, slice(0, pads) if side == "left" else slice(REAL, None)] = 0
    return mask


def among(found: dict[str, Tensor], row: int, slots: Tensor) -> dict[str, Tensor]:
    """What came out for these tokens of one row; of a bias, what they have for one another."""
    picked = {}
    for door, value in found.items():
        one = value[min(row, len(value) - 1)][None]
        picked[door] = one[..., slots, :] if door != "bias" else one[..., slots, :][..., slots]
    return picked


Where = Callable[[Tensor], Positions]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ALL)
def test_72_a_padded_row_is_the_row_alone(name: str, side: str) -> None:
    """unslothai/unsloth#3699, huggingface/transformers#22161, #26137 and #48161, ndif-team/nnsight#673: short rows.

    In a left-padded batch all rows shared the positions of the longest, so that the first token of a short row did not
    stand at 0.
    """

    def check(where: Where) -> None:
        encoding = ALL[name]()
        alone = queries(encoding, REAL)
        expected = use(encoding, alone, Positions.arange(REAL))
        for pads in range(5):
            mask = padded(pads, side)
            x = torch.full((2, *alone.shape[1:2], REAL + pads, WIDTH), 1e4)
            x[1, :, mask[1].bool()] = alone[0]
            found = among(use(encoding, x, where(mask)), 1, mask[1].nonzero().flatten())
            moved = differences(expected, found)
            assert not moved, f"{pads} pads on the {side}: a short row moved by {moved}"

    def shared(mask: Tensor) -> Positions:
        """The same for all rows; counted from the end of the pads on the right, where it would happen to be right."""
        count = torch.arange(mask.shape[1])
        first = 0 if side == "left" else REAL - mask.shape[1]
        return Positions.of((count + first).clamp(min=0).expand(mask.shape), torch.where(mask.bool(), 0, -1))

    absolute = {"embed", "q"} & set(_moves_with_position(name))
    if absolute:
        exhibit(check, Positions.from_mask, twin=shared, because="[1-4] pads on the (left|right): a short row moved by")
    else:
        check(Positions.from_mask)


def _moves_with_position(name: str) -> list[str]:
    """The doors at which a token alone shows where it stands: a bias shows distances, which shared positions keep."""
    encoding = ALL[name]()
    x = queries(encoding, 2)
    return list(differences(use(encoding, x, Positions.arange(2)), use(encoding, x, Positions.after(1, 2))))


class Way(NamedTuple):
    """One cell of the matrix of entry 73."""

    padding: str
    cuts: Sequence[int]


PROMPT, NEW = 8, 3
PADDINGS = {"none": (0, 0), "left": (3, 0), "right": (0, 3), "both": (2, 1)}
CUTS = {"at once": (0, 8), "chunks": (0, 3, 4, 8), "one by one": tuple(range(9))}
WAYS = [Way(padding, cuts) for padding in PADDINGS for cuts in CUTS.values()]


def mask_of(padding: str) -> Tensor:
    left, right = PADDINGS[padding]
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, :left] = 0
    mask[1, PROMPT - right :] = 0
    return mask


Chunk = Callable[[Tensor, int, int], Positions]


def decoded(encoding: PositionEncoding, x: Tensor, way: Way, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """Keys and outputs of all slots: the prompt in chunks, then tokens one at a time, all through a cache."""
    mask = mask_of(way.padding)
    cache, outputs = KVCache(), []
    steps = [(cut, lambda a=a, b=b: chunk(mask, a, b)) for cut in pairwise(way.cuts) for a, b in [cut]]
    steps += [((slot, slot + 1), cache.next_positions) for slot in range(PROMPT, PROMPT + NEW)]
    keys = x
    for (begin, end), where in steps:
        some, positions = x[:, :, begin:end], where()
        q, k = encoding.rotate(some, some, positions)
        keys, values, k_positions = cache.append(k, some, positions)
        outputs.append(attend(q, keys, values, encoding=encoding, positions=positions, k_positions=k_positions))
    return keys, torch.cat(outputs, dim=2)


@pytest.mark.parametrize("name", ENCODINGS)
@torch.no_grad()
def test_73_padding_together_with_a_cache(name: str) -> None:
    """mosaicml/examples#257: right with padding and right with a cache, and wrong only with both.

    The mask was cut to the new tokens before it was added up, and the tokens already cached were added without asking
    which of them were padding.
    """
    encoding = ENCODINGS[name]()
    total = PROMPT + NEW
    x = queries(encoding, 2 * total).view(-1, 2, total, WIDTH).transpose(0, 1)

    def check_one(chunk: Chunk, way: Way) -> None:
        keys, outputs = decoded(encoding, x, way, chunk)
        real = torch.cat([mask_of(way.padding), torch.ones(2, NEW, dtype=torch.long)], dim=1).bool()
        for row in range(2):
            alone, where = x[row, :, real[row]][None], Positions.arange(int(real[row].sum()))
            q, k = encoding.rotate(alone, alone, where)
            what = f"padding {way.padding}, cut at {way.cuts}, row {row}"
            assert torch.equal(keys[row, :, real[row]], k[0]), f"{what}: keys are turned differently"
            y = attend(q, k, alone, encoding=encoding, positions=where)
            off = float((outputs[row, :, real[row]] - y[0]).abs().max())
            assert off <= DECODED, f"{what}: the output is off by {off:.2g}"

    def check(chunk: Chunk) -> None:
        for way in WAYS:
            check_one(chunk, way)

    def ours(mask: Tensor, begin: int, end: int) -> Positions:
        return Positions.from_mask(mask).slice(begin, end)

    def cut_first(mask: Tensor, begin: int, end: int) -> Positions:
        some = Positions.from_mask(mask[:, begin:end])
        return Positions.of(some.index + begin, some.document)

    for way in WAYS:
        if way.padding == "none" or len(way.cuts) == 2:
            check_one(cut_first, way)
    says_nothing_of_places = ("nope", "learned", "sinusoidal", "cope")  # in attention; CoPE counts what it reads
    if name not in says_nothing_of_places:
        exhibit(check, ours, twin=cut_first, because="padding (left|both), cut at")
    else:
        check(ours)


def counting_on(lengths: Sequence[int]) -> Positions:
    """The documents are known, and positions count on through all of them."""
    packed = Positions.packed(lengths)
    return Positions.of(torch.arange(packed.seq_len), packed.document[0])


@pytest.mark.parametrize("name", ENCODINGS)
def test_77_a_document_packed_twice_is_one_document(name: str) -> None:
    """allenai/OLMo-core#591 and #654, pytorch/torchtitan#2559 and #2560, huggingface/nanoVLM#201: packed documents.

    Positions went on counting across documents, or never arrived (`positions` was always None).
    """
    encoding = ALL[name]()
    alone = queries(encoding, REAL)
    twice = torch.cat([queries(encoding, 3), alone, alone], dim=2)
    slots = {"first": torch.arange(3, 3 + REAL), "second": torch.arange(3 + REAL, 3 + 2 * REAL)}

    def check(pack: Callable[[Sequence[int]], Positions]) -> None:
        expected = use(encoding, alone, Positions.arange(REAL))
        found = use(encoding, twice, pack([3, REAL, REAL]))
        for which, its in slots.items():
            moved = differences(expected, among(found, 0, its))
            assert not moved, f"the {which} copy moved by {moved}"

    if _moves_with_position(name):
        exhibit(check, Positions.packed, twin=counting_on, because="the first copy moved by")
    else:
        check(Positions.packed)


@pytest.mark.parametrize("name", ENCODINGS)
@torch.no_grad()
def test_77_a_model_cannot_tell_packed_documents_from_single_ones(name: str) -> None:
    """allenai/OLMo-core#591: the same from ids to logits, where attention could look into the other document."""
    torch.manual_seed(0)
    encoding = ENCODINGS[name]()
    d_model = getattr(encoding, "d_model", HEADS * WIDTH)
    model = Decoder(64, encoding, d_model=d_model, num_layers=2, num_heads=HEADS).eval()
    document, other = torch.randint(64, (1, REAL)), torch.randint(64, (1, 3))
    expected = model(document)

    def check(pack: Callable[[Sequence[int]], Positions]) -> None:
        logits = model(torch.cat([document, other, document], dim=1), pack([REAL, 3, REAL]))
        for which, its in {"first": logits[:, :REAL], "second": logits[:, -REAL:]}.items():
            off = float((its - expected).abs().max())
            assert off <= LOGITS, f"the {which} copy is off by {off:.2g}"

    def never_arrived(lengths: Sequence[int]) -> Positions:
        return Positions.arange(sum(lengths))

    exhibit(check, Positions.packed, twin=never_arrived, because="the second copy is off by")


LENGTHS = [
    [int(n) for n in lengths] for count in range(1, 6) for lengths in product((0, 1, 3), repeat=count) if sum(lengths)
]


def test_78_documents_of_one_token_stay_apart() -> None:
    """modelscope/ms-swift#9904: neighbouring documents of one token became one.

    A boundary was seen where the position is smaller than the one before, and after 0 comes 0.
    """

    def check(boundaries: Callable[[Positions], Tensor]) -> None:
        for lengths in LENGTHS:
            real = [n for n in lengths if n]
            expected = [sum(real[:i]) for i in range(len(real) + 1)]
            found = boundaries(Positions.packed(lengths)).tolist()
            assert found == expected, f"documents of {lengths} begin at {found}, not {expected}"

    def where_it_decreases(positions: Positions) -> Tensor:
        index = positions.index[0]
        starts = (index[1:] < index[:-1]).nonzero().flatten() + 1
        return torch.cat([torch.tensor([0]), starts, torch.tensor([len(index)])])

    exhibit(check, Positions.cu_seqlens, twin=where_it_decreases, because=r"documents of \[1, 1\] begin at \[0, 2\]")


def test_78_a_token_alone_sees_itself() -> None:
    """modelscope/ms-swift#9904: the same as a mask, with padding behind."""

    def check(mask: Callable[[Positions], Tensor]) -> None:
        for lengths in LENGTHS:
            expected = torch.block_diag(*[torch.ones(n, n).tril() for n in lengths if n], torch.zeros(2, 2)).bool()
            found = mask(Positions.packed(lengths, length=sum(lengths) + 2))[0, 0]
            assert torch.equal(found, expected), f"documents of {lengths} see what they must not, or not themselves"

    def merged(positions: Positions) -> Tensor:
        index = positions.index[0]
        run = torch.cat([torch.tensor([0]), (index[1:] < index[:-1]).cumsum(0)])
        return Positions.of(index, run.where(positions.document[0] >= 0, -1), order=torch.arange(len(index))).mask()

    exhibit(check, Positions.mask, twin=merged, because=r"documents of \[1, 1\] see what they must not")


Cut = Callable[[Positions, int, int], Tensor]


def test_79_every_document_is_cut_for_itself() -> None:
    """NVIDIA/Megatron-LM#5243: under context parallelism a rank had positions of the first sequence only.

    The whole row was cut as if it were one sequence. Documents of 4 and 4 on two ranks: the first has 0, 3, 4 and 7.
    """

    def check(cut: Cut) -> None:
        positions = Positions.packed([4, 4])
        assert positions.cu_seqlens().tolist() == [0, 4, 8]
        slots = [cut(positions, rank, 2).tolist() for rank in range(2)]
        assert slots == [[0, 3, 4, 7], [1, 2, 5, 6]], f"rank 0 has {slots[0]}"

    def as_one_sequence(positions: Positions, rank: int, world: int) -> Tensor:
        return Positions.arange(positions.seq_len).shard_slots(rank, world)

    exhibit(check, Positions.shard_slots, twin=as_one_sequence, because=r"rank 0 has \[0, 1, 6, 7\]")


ON_A_GRID = "rotary sections on a grid"


def _sharded(short: bool) -> Iterator[tuple[str, Positions, int]]:
    yield "packed", Positions.packed([8, 16, 8]), 2
    yield "packed over 4", Positions.packed([8, 16, 8]), 4
    yield "one sequence", Positions.arange(32), 4
    yield "behind a cache", Positions.after(900 if short else 70_000, 32), 2


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("name", [*(name for name in ENCODINGS if name != "cope"), ON_A_GRID])
def test_79_shards_put_together_are_the_whole(name: str, zigzag: bool) -> None:
    """NVIDIA/Megatron-LM#5243, NVIDIA-NeMo/Automodel#1482 and #2377: three ways for a rank to stand elsewhere.

    Positions of the wrong sequence; coordinates of images cut along their axes; a fused path that counted from 0.
    CoPE counts the keys in between, so it needs all keys, as in the next test.
    """
    encoding = Rotary(WIDTH, sections=(2, 3, 3)) if name == ON_A_GRID else ENCODINGS[name]()
    rows = [("grid", Positions.grid(2, 4, 4), 2)] if name == ON_A_GRID else list(_sharded(name in ("learned", "xpos")))

    def check(part: Callable[[Positions, int, int, bool], Positions]) -> None:
        for what, positions, world in rows:
            x = queries(encoding, 32)
            whole = use(encoding, x, positions)
            for rank in range(world):
                slots = positions.shard_slots(rank, world, zigzag)
                found = use(encoding, x[:, :, slots], part(positions, rank, world, zigzag))
                moved = differences(among(whole, 0, slots), found)
                assert not moved, f"{what}: rank {rank} of {world} moved by {moved}"

    def counts_from_0(positions: Positions, rank: int, world: int, zigzag: bool) -> Positions:
        mine = Positions.arange(positions.seq_len // world)
        return mine if positions.axes == 1 else Positions.of(mine.index[..., None].expand(1, -1, positions.axes))

    if name == "nope":
        check(Positions.shard)
    else:
        exhibit(check, Positions.shard, twin=counts_from_0, because="rank [01] of [24] moved by")


@pytest.mark.parametrize("name", ENCODINGS)
@torch.no_grad()
def test_79_a_rank_that_has_all_keys_gets_the_outputs_of_the_whole(name: str) -> None:
    """NVIDIA/Megatron-LM#5243: queries of one rank against the keys of all, as attention over ranks needs them."""
    encoding = ENCODINGS[name]()
    positions = Positions.packed([8, 16])
    x = queries(encoding, 24)
    q, k = encoding.rotate(x, x, positions)
    whole = attend(q, k, x, encoding=encoding, positions=positions)

    def check(part: Callable[[Positions, int, int], Positions]) -> None:
        for rank in range(4):
            slots = positions.shard_slots(rank, 4)
            where = part(positions, rank, 4)
            mine = encoding.rotate(x[:, :, slots], x[:, :, slots], where)[0]
            y = attend(mine, k, x, encoding=encoding, positions=where, k_positions=positions)
            off = float((y - whole[:, :, slots]).abs().max())
            assert off <= DECODED, f"rank {rank}: the output is off by {off:.2g}"

    def of_the_first_sequence(positions: Positions, rank: int, world: int) -> Positions:
        return Positions.arange(positions.seq_len // world)

    exhibit(check, Positions.shard, twin=of_the_first_sequence, because="the output is off by")
