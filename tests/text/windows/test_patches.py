"""`BytePatches`: the patch lengths of `transformers` for every row alone, and of the published rule for spaces."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locant import Positions, Tokenizer, Windows
from locant.errors import RangeError, ShapeError
from locant.text import BytePatches
from tests.refusal import refuses

OFFSET = 4
"""The id of byte 0 in BLT's vocabulary."""
THRESHOLD = 1.335442066192627
NEAR_THE_RULE = b"aZ09 ,.\n\xc3\xa9\xe2\x80\x99[`@{/:"

seeds, lengths = st.integers(0, 2**31), st.integers(1, 40)
max_lengths = st.none() | st.integers(1, 9)


def entropies_of(seed: int, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2.5


def lengths_of_transformers(entropies: Tensor, max_length: int | None) -> list[int]:
    """The patch lengths of one row, which is alone in its batch."""
    blt = pytest.importorskip("transformers.models.blt.modeling_blt")
    found = blt.BltPatcher.patch_lengths_from_entropies(
        entropies[None], len(entropies), patch_size=4, threshold=THRESHOLD
    )
    return blt.process_patch_lengths(found, max_length)[0].tolist()


def lengths_by_spaces(text: bytes, max_length: int | None) -> list[int]:
    """The published rule, written with a regular expression: a patch ends after the first of several spaces."""
    ends = {0} | {found.start() for found in re.finditer(rb"(?<![^0-9A-Za-z\x80-\xbf])[^0-9A-Za-z\x80-\xbf]", text)}
    bounds = [0, *(end + 1 for end in sorted(ends)), len(text)]
    found = [high - low for low, high in itertools.pairwise(bounds)]
    if max_length is None:
        return found
    cut = [[max_length] * (each // max_length) + [each % max_length] for each in found]
    return [each for parts in cut for each in parts if each]


def of_row(patches: BytePatches, row: int, document: int = 0) -> list[int]:
    """The patch lengths of one document."""
    return patches.lengths[row][patches.positions.document.expand_as(patches.lengths)[row] == document].tolist()


@given(seeds, st.integers(1, 4), lengths, max_lengths)
def test_every_row_has_the_patch_lengths_of_transformers(
    seed: int, rows: int, length: int, max_length: int | None
) -> None:
    entropies = entropies_of(seed, rows, length)
    patches = BytePatches.from_entropies(entropies, THRESHOLD, max_length=max_length)
    for row, each in enumerate(entropies):
        assert of_row(patches, row) == lengths_of_transformers(each, max_length)
    assert patches.lengths.sum(1).tolist() == [length] * rows


@given(seeds, st.lists(lengths, min_size=1, max_size=4), st.integers(0, 5), st.integers(0, 5), max_lengths)
def test_documents_of_a_packed_and_padded_row_have_the_patches_that_they_have_alone(
    seed: int, sizes: list[int], left: int, between: int, max_length: int | None
) -> None:
    parts = [entropies_of(seed + number, size) for number, size in enumerate(sizes)]
    documents = [torch.full((size,), number) for number, size in enumerate(sizes)]
    cut = sizes[0] // 2  # padding stands within the first document, too
    row = torch.cat([torch.full((left,), 9.0), parts[0][:cut], torch.full((between,), 9.0), parts[0][cut:], *parts[1:]])
    padding = [torch.full((count,), -1) for count in (left, between)]
    document = torch.cat([padding[0], documents[0][:cut], padding[1], documents[0][cut:], *documents[1:]])
    positions = Positions.of(torch.zeros_like(document)[None], document[None])
    patches = BytePatches.from_entropies(row[None], THRESHOLD, positions, max_length=max_length)
    for number, part in enumerate(parts):
        alone = lengths_of_transformers(part, max_length)
        assert of_row(patches, 0, number) == alone
        index = patches.positions.index[patches.positions.document == number]
        assert index.tolist() == [*range(len(alone))]
    assert torch.equal(patches.ids[0] == -1, document == -1)
    real = patches.ids[patches.ids >= 0]
    assert torch.equal(real.bincount(minlength=patches.lengths.shape[1]), patches.lengths[0])
    assert bool((real.diff() >= 0).all())


@given(seeds, lengths)
def test_bytes_have_the_patch_ids_of_transformers(seed: int, length: int) -> None:
    blt = pytest.importorskip("transformers.models.blt.modeling_blt")
    patches = BytePatches.from_entropies(entropies_of(seed, 3, length), THRESHOLD)
    assert torch.equal(patches.ids, blt.BltModel._patch_ids_from_lengths(None, patches.lengths, length))


@given(
    st.lists(st.sampled_from([*b"aZ09 ,.\n\xc3\xa9\xe2\x80\x99[`@{/:"]) | st.integers(0, 255), min_size=1), max_lengths
)
def test_patches_begin_after_spaces(text: list[int], max_length: int | None) -> None:
    expected = lengths_by_spaces(bytes(text), max_length)
    for first_byte in (0, OFFSET):
        ids = torch.tensor([text]) + first_byte
        patches = BytePatches.from_spaces(ids, first_byte=first_byte, max_length=max_length)
        assert patches.lengths[0].tolist() == expected


@given(st.lists(st.sampled_from(NEAR_THE_RULE), min_size=1), st.data(), max_lengths)
def test_padding_between_bytes_does_not_change_patches(
    text: list[int], data: st.DataObject, maximum: int | None
) -> None:
    """Whatever number padding has: a space there is not a space of the text, and a letter does not separate spaces."""
    padding = data.draw(st.lists(st.lists(st.sampled_from(b" a"), max_size=2), min_size=len(text), max_size=len(text)))
    row = [each for filler, byte in zip(padding, text, strict=True) for each in (*filler, byte)]
    real = [each for filler in padding for each in (*[False] * len(filler), True)]
    patches = BytePatches.from_spaces(
        torch.tensor([row]), Positions.from_mask(torch.tensor([real])), max_length=maximum
    )
    assert of_row(patches, 0) == lengths_by_spaces(bytes(text), maximum)


def test_a_patch_begins_after_every_special_token() -> None:
    ids = torch.tensor([[0, 1, *(each + OFFSET for each in b"ab"), 2, 2, *(each + OFFSET for each in b" c")]])
    assert BytePatches.from_spaces(ids, first_byte=OFFSET).lengths[0].tolist() == [1, 1, 3, 1, 2]
    assert BytePatches.from_spaces(torch.tensor([[256, *b"ab", 256, *b"c"]])).lengths[0].tolist() == [1, 3, 1]


@pytest.mark.parametrize("mode", ["document", "packed"])
def test_patches_of_windows_do_not_cross_documents(mode: str) -> None:
    texts = [b"to be, or not", b"to be", b"that is the question"]
    ids = [each for text in texts for each in Tokenizer.bytes().encode(text.decode()).tolist()]
    windows = Windows(ids, 16, mode=mode, documents=[0, 13, 18, 38])  # type: ignore[arg-type]
    for batch in windows.loader(2, shuffle=False):
        patches = BytePatches.from_spaces(batch["ids"], batch["positions"])
        document = batch["positions"].document.expand_as(batch["ids"])
        for row, numbers in enumerate(document):
            for number in numbers[numbers >= 0].unique().tolist():
                text = bytes(batch["ids"][row][numbers == number].tolist())
                assert of_row(patches, row, number) == lengths_by_spaces(text, None)


@pytest.mark.slow
def test_blt_of_transformers_computes_the_same_from_these_patches() -> None:
    blt = pytest.importorskip("transformers.models.blt.modeling_blt")
    small = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    config = blt.BltConfig(
        patcher_config=small, encoder_config=small, decoder_config={**small, "hidden_size_global": 64},
        global_config={**small, "hidden_size": 64}, encoder_hash_byte_group_vocab=50, use_cache=False,
    )  # fmt: skip
    model = blt.BltModel(config).eval()
    ids = torch.randint(260, (1, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        entropies, _, _ = model.patcher(ids)
        config.patching_threshold = float(entropies.median())
        patches = BytePatches.from_entropies(entropies, config.patching_threshold)
        expected = model(ids).last_hidden_state
        assert torch.equal(model(ids, patch_lengths=patches.lengths).last_hidden_state, expected)
        others = model(ids, patch_lengths=torch.tensor([[1, 25, 24]])).last_hidden_state
        assert not torch.equal(others, expected)


def test_what_are_no_rows_is_refused() -> None:
    with refuses(ShapeError, "entropies", "Categorical"):
        BytePatches.from_entropies(torch.zeros(3), 1.0)
    with refuses(ShapeError, "int64", "Categorical"):
        BytePatches.from_entropies(torch.zeros(1, 3, dtype=torch.int64), 1.0)
    with refuses(ShapeError, "float32", "Windows"):
        BytePatches.from_spaces(torch.zeros(1, 3))
    for text in (b"to be", [[1, 2]], Tokenizer.bytes().encode("to be")[None]):
        with refuses(ShapeError, type(text).__name__, "expected a tensor"):
            BytePatches.from_spaces(text)  # type: ignore[arg-type]
    with refuses(ShapeError, "list", "expected a tensor"):
        BytePatches.from_entropies([[1.0]], 1.0)  # type: ignore[arg-type]
    with refuses(RangeError, "max_length", "16"):
        BytePatches.from_entropies(torch.zeros(1, 3), 1.0, max_length=0)
    with refuses(ShapeError, "4 tokens", "arange"):
        BytePatches.from_entropies(torch.zeros(1, 3), 1.0, Positions.arange(4))
