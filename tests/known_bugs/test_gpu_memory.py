"""Entries about what any GPU kernel can do to memory, through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from locant import InputEmbedding, LocantError, PositionEncoding, Positions, Rotary, TokenEmbedding
from tests.kernels.interpreted import Access, Place, interpreted, sparse, watched, without_copying_back
from tests.kernels.rotary.rotating import KERNEL, launch, tables
from tests.known_bugs.exhibit import exhibit

pytest.importorskip("triton", reason="there is no Triton for this platform")

LAYOUTS = ["half", "interleaved"]
Rotate = Callable[[Tensor], Tensor]


def rotating(place: Place, layout: str = "half") -> Rotate:
    """Our kernel on queries alone, every token at position 3; what it does not write stays as it was allocated."""
    module = place.load(KERNEL)

    def rotate(x: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        index = torch.full((1, x.shape[2]), 3, device=x.device)
        of = tables(x.shape[3] // 4 * 2, place.device)
        module.rotate_(x, None, out, None, index, of, layout, False)
        return out

    return rotate


def test_61_elements_past_2_31_are_found() -> None:
    """Offsets overflow 32 bits in a kernel.

    fla-org/flash-linear-attention#1080 and #1082, databricks/megablocks#185, sgl-project/sglang#20389 and #35571,
    state-spaces/mamba#1015, triton-lang/triton#832: Past 2³¹ elements, results were silently wrong or memory accesses
    were illegal. An index times a stride, both of 32 bits, is a product of 32 bits.

    Check: Search your kernels for strides that are not cast to int64.

    Test: small tensors with strides past 2^31, interpreted; 4 GB on a GPU in `tests/kernels/rotary`.
    """
    # Three heads of one token, the last one 2^31 elements behind the first, in the middle of the memory.
    x = sparse(2**32 + 64).as_strided((1, 3, 1, 8), (8, 2**30, 8, 1), 2**31)
    x.copy_(torch.arange(1, 25).view(1, 3, 1, 8))

    def check(rotate: Rotate) -> None:
        found, expected = rotate(x), rotate(x.contiguous())
        for head in range(3):
            assert torch.equal(found[0, head], expected[0, head]), f"head {head} was read from somewhere else"

    ours = [rotating(Place("cpu"), layout) for layout in LAYOUTS]
    twin = interpreted("tests.known_bugs.careless_kernels").copy_heads
    with without_copying_back():
        exhibit(check, *ours, twin=twin, because="head 2 was read from somewhere else")


def test_62_a_launch_covers_2_31_elements() -> None:
    """A launch of 2³¹ elements writes nothing.

    pytorch/pytorch#130806: Nothing was written of an output of exactly 2³¹ elements. The number of elements was kept in
    a 32-bit integer on the way to the number of programs.

    Check: `torch.nn.functional.embedding(ids, weight)` with an output of 2³¹ elements on your GPU.

    Test: what a launch for 2^31 elements covers; the embeddings themselves on a GPU. Here the tensors repeat one
    element, so they take no memory; what is looked at is how much the programs would cover.
    """

    def covered(elements: int) -> int:
        x = torch.zeros(1, dtype=torch.bfloat16).expand(1, 4, elements // 512, 128)
        of = launch(x, x[:, :0])
        sizes = ("programs", "num_tokens", "seq", "shares", "q_heads", "q_share")
        assert all(of[name] < 2**31 for name in sizes), "an argument of 32 bits overflows"
        return of["programs"] // of["shares"] * of["BLOCK_T"] * min(4, of["shares"] * of["q_share"]) * 128

    def check(covers: Callable[[int], int]) -> None:
        for elements in (2**20, 2**31 - 512, 2**31, 2**31 + 512):
            assert covers(elements) >= elements, f"the programs cover {covers(elements)} of {elements} elements"

    def in_32_bits(elements: int) -> int:
        return -(-int(np.array(elements).astype(np.int32)) // 1024) * 1024

    exhibit(check, covered, twin=in_32_bits, because="cover -2147483648 of 2147483648")


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is full of NaN: what torch does where results are to be repeatable."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(2).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


PADDED = Positions.from_mask(torch.tensor([[0, 0, 0, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]))


def by_encoding(encoding: PositionEncoding, where: Positions) -> Rotate:
    return lambda x: encoding.rotate(x, x, where)[0]


OPTIONS = [{}, {"layout": "interleaved"}, {"rotary_dim": 8}, {"rotary_dim": 8, "layout": "interleaved"}]


def test_63_padded_rows_are_written_too() -> None:
    """Padded rows keep uninitialised memory.

    fla-org/flash-linear-attention#967: Batches with padding on the left had NaN. The result came from `empty_like`, and
    the kernel skipped padded tokens.

    Check: Under `torch.use_deterministic_algorithms(True)` fresh memory is NaN: look for NaN in the output.

    Test: padded rows of q and k with fresh memory full of NaN, on both kernels.
    """

    def check(rotate: Rotate) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(3, 2, 5, 24).to(dtype)
            with poisoned():
                out = rotate(x)
            holes = out.isnan().any(-1).any(1).nonzero().tolist()
            assert not holes, f"row and token {holes[0]} were never written"

    def skips_padding(x: Tensor) -> Tensor:
        out, real = torch.empty_like(x), PADDED.document >= 0
        rotated = by_encoding(Rotary(24), PADDED)(x)
        out.transpose(1, 2)[real] = rotated.transpose(1, 2)[real]
        return out

    ours = [by_encoding(Rotary(24, **options), PADDED) for options in OPTIONS]
    kernels = [rotating(Place("cpu"), layout) for layout in LAYOUTS]
    exhibit(check, *ours, *kernels, twin=skips_padding, because="were never written")


def extent(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes() - x.storage_offset() * x.element_size()


def test_69_lanes_past_the_last_pair_touch_nothing() -> None:
    """Lanes behind the last pair read other memory.

    Dao-AILab/flash-attention#1195, ModelTC/LightLLM#1459: A kernel raised an illegal access at 72 dimensions, and read
    past the cosines at 96. Lanes come in powers of two, and pairs do not.

    Check: `compute-sanitizer python your_test.py` with a head of 72.

    Test: every address of every lane, five head sizes, two layouts; compute-sanitizer on a GPU.
    """

    def kernel(dim: int, layout: str) -> None:
        x, of = torch.randn(1, 2, 3, dim), tables(dim)
        index, out = torch.arange(3)[None], torch.empty(1, 2, 3, dim)
        with watched() as seen:
            interpreted(KERNEL).rotate_(x, None, out, None, index, of, layout, False)
        require_inside([x, of.table, index, out])(seen)

    def careless(dim: int, layout: str) -> None:
        x, cos, sin = torch.randn(6, dim), torch.ones(dim // 2), torch.zeros(dim // 2)
        with watched() as seen, np.errstate(all="ignore"):  # past the end lies whatever was there before
            interpreted("tests.known_bugs.careless_kernels").rotate_lanes(x, cos, sin)
        require_inside([x, cos, sin])(seen)

    def require_inside(tensors: list[Tensor]) -> Callable[..., None]:
        def inside(seen: list[Access]) -> None:
            for access in seen:
                allowed = np.zeros(access.addresses.shape, dtype=bool)
                for first, end in map(extent, tensors):
                    allowed |= (access.addresses >= first) & (access.addresses < end)
                assert allowed.all(), f"{(~allowed).sum()} lanes reach past the end"

        return inside

    def check(rotates: Callable[[int, str], None]) -> None:
        for dim in (72, 80, 96, 2, 6):
            for layout in LAYOUTS:
                rotates(dim, layout)

    exhibit(check, kernel, twin=careless, because="28 lanes reach past the end")


BAD_IDS = (-1, 8, 2**31, 2**63 - 1)
Embed = Callable[[Tensor], Tensor]


def require_complaint(embed: Embed) -> None:
    for bad in BAD_IDS:
        with suppress(LocantError, IndexError, RuntimeError):
            raise AssertionError(f"id {bad} of 8 rows gave {embed(torch.tensor([[0, bad, 7]]))}")


def garbage(ids: Tensor) -> Tensor:
    """A table of 8 rows of 4 in the middle of other memory, and addresses that are never compared with anything."""
    memory = torch.arange(1024.0)
    place = (512 + (ids[..., None] * 4 + torch.arange(4))) % 1024
    return memory[place]


EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {
    "tokens alone": lambda: TokenEmbedding(8, 4),
    "an input": lambda: InputEmbedding(8, 4, norm="layer_norm"),
}


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_70_an_id_without_a_row_is_refused(embedding: str) -> None:
    """A compiled look-up returns garbage for an id without a row.

    pytorch/pytorch#93538, pytorch/torchdynamo#1657, flagos-ai/FlagGems#6021: A compiled embedding returned garbage for
    an id without a row, and raised no error. It had no check, or the check was an assertion that is compiled only for
    debugging.

    Check: `torch.compile(embedding)(torch.tensor([vocab_size]))` must raise an error.

    Test: ids -1, V, 2^31 and the largest: eager and compiled raise; on a GPU that it still works.
    """
    exhibit(require_complaint, EMBEDDINGS[embedding](), twin=garbage, because="id -1 of 8 rows gave")


@pytest.mark.unchecked
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's compiler, about itself
@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_70_an_id_without_a_row_is_refused_where_compiled(embedding: str) -> None:
    """pytorch/pytorch#93538: the generated code compares, or the kernel that it calls does."""
    require_complaint(torch.compile(EMBEDDINGS[embedding](), dynamic=True))
