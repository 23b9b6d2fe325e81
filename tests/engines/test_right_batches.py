"""Forty right batches, as the collators and models of `transformers` make them: nothing is found in any.

A batch is right if the model gives what it gives for each document alone. One random change makes it wrong, and is
found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import DataCollatorWithFlattening, DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerFast
from transformers.masking_utils import create_causal_mask

from locant.engines.batches import check_batch, pack_documents
from locant.swapping.forward_arguments import CACHE, named_argument
from tests.engines.test_batch_images import Part, batch_of, require_seconds
from tests.engines.tiny_models import LONGEST, Place, off_by, tiny
from tests.tolerances import LOGITS

TEXT = ("llama", "gpt2")
IMAGES = ("qwen2_vl", "qwen2_5_vl")
PAD = "<pad>"
LEAST = {name: torch.finfo(getattr(torch, name)).min for name in ("float32", "bfloat16")}


class Right(NamedTuple):
    """A right batch, where the documents are in it, and the documents as the model takes each alone."""

    batch: dict[str, Any]
    places: list[Place]
    documents: list[dict[str, Tensor]]


@cache
def model_of(kind: str, attention: str | None = None) -> PreTrainedModel:
    return tiny(kind, attention)


def _texts(lengths: Sequence[int]) -> list[Tensor]:
    return [torch.randint(3, 80, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]


def _packed_places(lengths: Sequence[int]) -> list[Place]:
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return [(0, slice(first, last)) for first, last in itertools.pairwise(ends)]


def _documents(texts: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    return [{"input_ids": ids[None]} for ids in texts]


def flattened(lengths: Sequence[int], **options: Any) -> Right:
    texts = _texts(lengths)
    collate = DataCollatorWithFlattening(return_tensors="pt", **options)
    return Right(
        dict(collate([{"input_ids": ids.tolist()} for ids in texts])), _packed_places(lengths), _documents(texts)
    )


def padded(lengths: Sequence[int], side: str, *, ids: bool) -> Right:
    words = Tokenizer(WordLevel({PAD: 0, "a": 1}, unk_token=PAD))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD)
    tokenizer.padding_side = side
    texts = _texts(lengths)
    batch = dict(DataCollatorWithPadding(tokenizer)([{"input_ids": text.tolist()} for text in texts]))
    if ids:  # as `generate` of transformers counts them
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
    width = max(lengths)
    places = [(row, slice(width - n, width) if side == "left" else slice(0, n)) for row, n in enumerate(lengths)]
    return Right(batch, places, _documents(texts))


def in_blocks(lengths: Sequence[int], mask_of: Callable[[Tensor], Tensor], *, ids: bool = True) -> Right:
    texts = _texts(lengths)
    seen = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()[None, None]
    batch: dict[str, Any] = {"input_ids": torch.cat(texts)[None], "attention_mask": mask_of(seen)}
    if ids:
        batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    return Right(batch, _packed_places(lengths), _documents(texts))


def added(seen: Tensor, least: float = LEAST["float32"]) -> Tensor:
    return torch.where(seen, 0.0, least)


def as_made_by_transformers(kind: str, lengths: Sequence[int]) -> Right:
    """A padded batch with the mask of four axes that the library itself makes from the one of two."""
    right = padded(lengths, "left", ids=True)
    ids = right.batch["input_ids"]
    name = named_argument(create_causal_mask, "the cache", *CACHE)
    mask = create_causal_mask(
        model_of(kind).config, torch.zeros(*ids.shape, 32), right.batch["attention_mask"], **{name: None}
    )
    return right._replace(batch={**right.batch, "attention_mask": mask})


def images(kind: str, rows: list[list[Part]], left: bool = False, mask: str | None = "2-D") -> Right:
    """Rows with images, whose ids the model computes."""
    if kind == "qwen2_5_vl":
        require_seconds()
    model = model_of(kind).model
    one = [batch_of(kind, [row]) for row in rows]
    together = batch_of(kind, rows, left)
    index, _ = model.get_rope_index(**{name: value.clone() for name, value in together.items()})
    together["position_ids"] = index
    real = together["attention_mask"].bool()
    for row, each in enumerate(one):  # the tokens of the row, whose random ones depend on its length
        each["input_ids"] = together["input_ids"][row, real[row]][None]
        each["position_ids"], _ = model.get_rope_index(**{name: value.clone() for name, value in each.items()})
    if mask is None:
        del together["attention_mask"]
    elif mask != "2-D":
        seen = real[:, None, None, :] & torch.ones(real.shape[1], real.shape[1]).tril().bool()
        together["attention_mask"] = seen if mask == "bool" else added(seen, LEAST[mask])
    places = [(row, slice(int(one.nonzero()[0]), int(one.nonzero()[-1]) + 1)) for row, one in enumerate(real)]
    return Right(together, places, one)


def packed_images(kind: str, rows: list[list[Part]], mask: str | None = None) -> Right:
    """Return documents with images in one row, each with its own ids, and ids of text before the ids of the axes."""
    alone_in_rows = [images(kind, [row]).documents[0] for row in rows]
    lengths = [one["input_ids"].shape[1] for one in alone_in_rows]
    batch = {name: torch.cat([one[name] for one in alone_in_rows], -1) for name in ("input_ids", "mm_token_type_ids")}
    index = torch.cat([one["position_ids"] for one in alone_in_rows], -1)
    text = torch.cat([torch.arange(n) for n in lengths])[None, None]
    batch["position_ids"] = torch.cat([text, index])
    for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts"):
        if grids := [one[name] for one in alone_in_rows if name in one]:
            batch[name] = torch.cat(grids)
    if mask is not None:
        seen = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()[None, None]
        batch["attention_mask"] = seen if mask == "bool" else added(seen, LEAST[mask])
    return Right(batch, _packed_places(lengths), alone_in_rows)


MIXED: list[list[Part]] = [[3, (1, (1, 8, 8)), 2, (1, (1, 4, 8)), 5], [7, (1, (1, 4, 4)), 1]]
FILMS: list[list[Part]] = [[2, (2, (3, 4, 8)), 4, (1, (1, 4, 4)), 1], [4, (2, (2, 8, 4)), 3], [9]]
BATCHES: dict[str, tuple[str, Callable[[], Right]]] = {
    f"{kind}, {name}": (kind, make)
    for kind in TEXT
    for name, make in {
        "flattened": partial(flattened, (5, 4, 3)),
        "flattened with lengths": partial(flattened, (5, 1, 9, 3), return_flash_attn_kwargs=True),
        "flattened with numbers": partial(flattened, (2, 7), return_seq_idx=True),
        "one document": partial(flattened, (6,), return_flash_attn_kwargs=True),
        "padded right": partial(padded, (5, 3, 4), "right", ids=kind == "llama"),
        "padded left": partial(padded, (5, 3, 4), "left", ids=True),
        "blocks of bool": partial(in_blocks, (5, 4, 1), lambda seen: seen),
        "blocks of float32": partial(in_blocks, (3, 6), added),
        "blocks of bfloat16": partial(in_blocks, (4, 4), partial(added, least=LEAST["bfloat16"])),
        "padded left, four axes": partial(as_made_by_transformers, kind, (5, 2)),
    }.items()
} | {
    f"{kind}, {name}": (kind, make)
    for kind in IMAGES
    for name, make in {
        "images": partial(images, kind, MIXED[:1]),
        "images padded right": partial(images, kind, MIXED),
        "images padded left": partial(images, kind, MIXED, left=True),
        "videos": partial(images, kind, FILMS[:1], mask=None),
        "videos padded left": partial(images, kind, FILMS, left=True),
        "images, bool": partial(images, kind, MIXED, mask="bool"),
        "videos, bfloat16": partial(images, kind, FILMS, mask="bfloat16"),
        "packed": partial(packed_images, kind, MIXED + FILMS),
        "packed, bool": partial(packed_images, kind, FILMS, mask="bool"),
        "packed, float32": partial(packed_images, kind, MIXED, mask="float32"),
    }.items()
}


def test_there_are_forty() -> None:
    assert len(BATCHES) == 40


@pytest.mark.parametrize("name", BATCHES)
def test_nothing_is_found_in_a_right_batch(name: str) -> None:
    kind, make = BATCHES[name]
    right, model = make(), model_of(kind)
    keys = ("input_ids", "position_ids")
    one = [{key: value for key, value in each.items() if key in keys} for each in right.documents]
    expected = torch.cat([model(**each, use_cache=False).logits[0] for each in one])
    batch = {key: value for key, value in right.batch.items() if key in (*keys, "attention_mask")}
    assert off_by(model, batch, right.places, expected) <= LOGITS * float(expected.abs().max())
    axes = {"axes": 3 if kind in IMAGES else 1}
    asked: list[dict[str, Any]] = [{"model": model}, {"model": model.config}, {}, axes]
    for options in asked:
        assert check_batch(right.batch, **options) == (), options
    assert check_batch({**right.batch, "use_cache": False}, model=model).unchecked == ()


LENGTHS = st.lists(st.integers(2, 6), min_size=2, max_size=4)


def _swap(ids: Tensor, draw: Any) -> Tensor:
    """Two ids of a row that do not follow each other exchanged."""
    first = draw(st.integers(0, ids.shape[-1] - 3))
    second = draw(st.integers(first + 2, ids.shape[-1] - 1).filter(lambda at: bool(ids[0, first] != ids[0, at])))
    swapped = ids.clone()
    swapped[0, [first, second]] = ids[0, [second, first]]
    return swapped


def _packed_changes(lengths: list[int], batch: dict[str, Any], draw: Any) -> dict[str, dict[str, Any]]:
    tokens, ids = sum(lengths), batch["position_ids"]
    at = draw(st.integers(0, tokens - 1))
    start = draw(st.sampled_from(torch.tensor(lengths).cumsum(0).tolist()[:-1]))
    only = torch.arange(tokens)[None] == at
    ends = batch["cu_seq_lens_q"].clone()
    ends[draw(st.integers(1, len(lengths) - 1))] += draw(st.sampled_from([-1, 1]))
    causal = torch.ones(1, 1, tokens, tokens).tril()
    return {
        "a causal mask": {"attention_mask": causal.bool()},
        "an added causal mask": {"attention_mask": (1 - causal) * LEAST["float32"]},
        "a mask of ones": {"attention_mask": torch.ones(1, tokens, dtype=torch.int64)},
        "ids that go on": {"position_ids": torch.arange(tokens)[None]},
        "ids of zeros": {"position_ids": torch.zeros_like(ids)},
        "a negative id": {"position_ids": torch.where(only, -1 - draw(st.integers(0, 9)), ids)},
        "an id past all": {"position_ids": torch.where(only, 2**24 + draw(st.integers(0, 2**40)), ids)},
        "falling ids": {"position_ids": ids.flip(1)},
        "exchanged ids": {"position_ids": _swap(ids, draw)},
        "other lengths": {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends},
        "other lengths of keys": {"cu_seq_lens_k": ends},
        "lengths of others": dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), batch["cu_seq_lens_q"] * 2),
        "no lengths of keys": {"cu_seq_lens_k": None},
        "a longest of NaN": {draw(st.sampled_from(["max_length_q", "max_length_k"])): float("nan")},
        "a longest that is shorter": {"max_length_q": max(lengths) - draw(st.integers(1, 9))},
        "a target across documents": {"labels": torch.where(torch.arange(tokens)[None] == start, 7, batch["labels"])},
    }  # fmt: skip


@pytest.mark.slow
@hypothesis.given(st.data())
def test_one_change_of_a_packed_batch_is_found(data: st.DataObject) -> None:
    lengths = data.draw(LENGTHS)
    batch = pack_documents([{"input_ids": ids} for ids in _texts(lengths)])
    assert check_batch(batch) == ()
    for name, change in _packed_changes(lengths, batch, data.draw).items():
        assert check_batch({**batch, **change}), name
    one = torch.arange(sum(lengths))[None]
    gap = one + (one >= lengths[0]) * data.draw(st.integers(1, 99))
    assert check_batch({"input_ids": batch["input_ids"], "position_ids": one}) == ()
    assert "attention_mask of ones" in check_batch({"input_ids": batch["input_ids"], "position_ids": gap})[0]


@pytest.mark.slow
@hypothesis.given(st.data())
def test_one_change_of_a_padded_batch_is_found(data: st.DataObject) -> None:
    lengths = data.draw(LENGTHS.filter(lambda lengths: len({*lengths}) > 1))
    side = data.draw(st.sampled_from(["left", "right"]))
    batch, model = padded(lengths, side, ids=True).batch, model_of("gpt2")
    assert check_batch(batch, model=model) == ()
    ids, mask = batch["position_ids"], batch["attention_mask"]
    pads = (mask == 0).nonzero()
    row, at = pads[data.draw(st.integers(0, len(pads) - 1))].tolist()
    other = mask.float()
    other[row, at] = data.draw(
        st.sampled_from([-1.0, -1e9, float("nan"), 0.5, -0.25, 2.5, torch.finfo(torch.bfloat16).min])
    )
    label = batch["labels"].clone()
    label[row, at] = 5
    changes: dict[str, dict[str, Any]] = {
        "another number": {"attention_mask": other},
        "an added mask": {"attention_mask": (1 - mask) * LEAST["float32"]},
        "a target at padding": {"labels": label},
        "ids of zeros": {"position_ids": torch.zeros_like(ids)},
        "falling ids": {"position_ids": ids.flip(1) if side == "right" else ids.amax() - ids},
        "ids past the table": {"position_ids": ids + LONGEST},
        "a row more": {"position_ids": torch.cat([ids, ids[:1]])},
        "a token less": {"position_ids": ids[:, 1:]},
    }
    if side == "left":
        changes["padding counted"] = {"position_ids": torch.arange(ids.shape[1]).expand_as(ids)}
        changes["no ids"] = {"position_ids": None}
    for name, change in changes.items():
        assert check_batch({**batch, **change}, model=model), name


PARTS = st.one_of(
    st.integers(1, 4),
    st.tuples(st.just(1), st.tuples(st.just(1), st.sampled_from([4, 6, 8]), st.sampled_from([2, 4, 10]))),
    st.tuples(st.just(2), st.tuples(st.integers(2, 3), st.sampled_from([4, 6]), st.sampled_from([2, 8]))),
)  # fmt: skip


@st.composite
def rows_of_images(draw: Any) -> list[Part]:
    """Texts and grids in turn, with text before, between and behind, as processors mark where grids begin and end."""
    grids = draw(st.lists(PARTS.filter(lambda part: not isinstance(part, int)), min_size=1, max_size=3))
    row: list[Part] = [draw(st.integers(1, 4))]
    for grid in grids:
        row += [grid, draw(st.integers(1, 4))]
    return row


@pytest.mark.slow
@hypothesis.given(st.data(), rows_of_images(), st.sampled_from(["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]))
def test_one_change_of_ids_of_images_is_found(data: st.DataObject, row: list[Part], kind: str) -> None:
    model = model_of(kind)
    batch = batch_of(kind, [row])
    ids = model.model.get_rope_index(**{name: value.clone() for name, value in batch.items()})[0]
    batch["position_ids"] = ids
    assert check_batch(batch, model=model) == ()
    assert check_batch(batch, axes=3) == ()
    tokens = ids.shape[2]
    of_grids = batch["mm_token_type_ids"][0] != 0
    at, axis = data.draw(st.integers(1, tokens - 1)), data.draw(st.integers(0, 2))
    one = ids.clone()
    one[axis, 0, at] += data.draw(st.sampled_from([-1, 1, 7]))
    last = int(of_grids.nonzero()[-1])
    after = torch.arange(tokens) - last
    behind = ids + (after > 0) * data.draw(st.integers(1, 9))
    from_largest = torch.where(after > 0, int(ids[:, 0, : last + 1].max()) + after, ids)  # as some releases count
    changes = {
        "one id": one,
        "flattened": torch.arange(tokens).expand_as(ids),
        "exchanged": ids[[0, 2, 1]],
        "rows of zeros": torch.where(of_grids & (torch.arange(3)[:, None, None] == 1), 0, ids),
        "text behind": behind,
        "time scaled": torch.where(of_grids & (torch.arange(3)[:, None, None] == 0), ids * 3, ids),
    }
    for name, changed in changes.items():
        if not torch.equal(changed, ids) and not torch.equal(changed, from_largest):
            assert check_batch({**batch, "position_ids": changed}, model=model), name
