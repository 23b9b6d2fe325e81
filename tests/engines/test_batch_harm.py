"""Every mistake that `check_batch` finds does harm: a real model gives other outputs than for the documents alone.

Each wrong batch stands beside the right one, from which it differs in one thing. Of that the model gives what it gives
for the documents alone, and nothing is found.
"""

from __future__ import annotations

import copy
import pickle
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from locant import InputError, LocantError, Positions
from locant.engines.batches import check_batch
from tests.engines.tiny_models import Place, alone, off_by, tiny
from tests.refusal import refuses
from tests.tolerances import DIFFERENT, LOGITS

LENGTHS = (5, 4)
TOKENS = sum(LENGTHS)
DOCUMENTS = [torch.randint(3, 80, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
PACKED_PLACES: list[Place] = [(0, slice(0, 5)), (0, slice(5, 9))]
PADDED_PLACES: list[Place] = [(0, slice(0, 5)), (1, slice(1, 5))]
IDS = torch.cat(DOCUMENTS)[None]
RESTART = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
CAUSAL = torch.ones(TOKENS, TOKENS).tril()[None, None]
BLOCKS = torch.block_diag(torch.ones(5, 5), torch.ones(4, 4)).tril()[None, None]
LEAST = torch.finfo(torch.float32).min
PADDED = torch.stack([DOCUMENTS[0], torch.nn.functional.pad(DOCUMENTS[1], (1, 0))])
REAL = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
COUNTED = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 1, 2, 3]])
ENDS = torch.tensor([0, 5, 9], dtype=torch.int32)

APART_PLACES: list[Place] = [(0, slice(0, 5)), (0, slice(7, 11))]
APART_REAL = torch.tensor([[1] * 5 + [0, 0] + [1] * 4])
APART_RESTART = torch.tensor([[0, 1, 2, 3, 4, 0, 0, 0, 1, 2, 3]])
APART = {
    "input_ids": torch.cat([DOCUMENTS[0], torch.tensor([0, 0]), DOCUMENTS[1]])[None],
    "position_ids": APART_RESTART,
}
APART_BLOCKS = torch.block_diag(torch.ones(5, 5), torch.zeros(2, 2), torch.ones(4, 4)).tril().bool()[None, None]

LENGTHS_OF_ROW = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 5, "max_length_k": 5}
PACKED = {"input_ids": IDS, "position_ids": RESTART}
IN_BLOCKS = {**PACKED, "attention_mask": BLOCKS.bool()}
LEFT = {"input_ids": PADDED, "attention_mask": REAL}
ONE = {"input_ids": IDS, "position_ids": torch.arange(TOKENS)[None]}
ONE_PLACES: list[Place] = [(0, slice(0, TOKENS))]


class Case(NamedTuple):
    """A right batch, the change that makes it wrong, and the expected finding."""

    kind: str
    right: dict[str, Any]
    change: dict[str, Any]
    check: str
    place: tuple[int | None, int | None]
    places: list[Place]
    documents: list[Tensor] = DOCUMENTS
    attention: str | None = None


def _packed(kind: str, right: dict[str, Any], change: dict[str, Any], check: str, row: Any, token: Any) -> Case:
    return Case(kind, right, change, check, (row, token), PACKED_PLACES)


def _padded(kind: str, right: dict[str, Any], change: dict[str, Any], check: str, row: Any, token: Any) -> Case:
    return Case(kind, right, change, check, (row, token), PADDED_PLACES)


def _one(kind: str, right: dict[str, Any], change: dict[str, Any], check: str, row: Any, token: Any) -> Case:
    return Case(kind, right, change, check, (row, token), ONE_PLACES, [IDS[0]])


NAN = float("nan")
CASES: dict[str, Case] = {
    "a causal mask over the whole row": _packed(
        "llama", IN_BLOCKS, {"attention_mask": CAUSAL.bool()}, "documents", 0, 5
    ),
    "one that is added": _packed("llama", IN_BLOCKS, {"attention_mask": (1 - CAUSAL) * LEAST}, "documents", 0, 5),
    "one of another head": _packed(
        "llama", IN_BLOCKS, {"attention_mask": torch.cat([BLOCKS, CAUSAL, BLOCKS, BLOCKS], 1).bool()}, "documents", 0, 5
    ),
    "a mask of ones": _packed("llama", PACKED, {"attention_mask": torch.ones(1, TOKENS)}, "documents", 0, 5),
    "a mask that numbers documents": _packed(
        "llama", PACKED, {"attention_mask": torch.tensor([[1] * 5 + [2] * 4]), "position_ids": None}, "documents", 0, 5
    ),
    "a cache": _packed("llama", PACKED, {"use_cache": True}, "documents", 0, 5),
    "a model that looks for no documents": _packed(
        "opt", IN_BLOCKS, {"attention_mask": None}, "documents", 0, 5
    ),
    "documents apart by padding": Case(
        "llama", {**APART, "attention_mask": APART_BLOCKS}, {"attention_mask": APART_REAL}, "documents", (0, 7),
        APART_PLACES,
    ),
    "documents apart by padding whose ids go on": Case(
        "llama", {**APART, "attention_mask": APART_BLOCKS},
        {"attention_mask": APART_REAL, "position_ids": APART_RESTART + torch.tensor([[0] * 5 + [4, 4] + [0] * 4])},
        "documents", (0, 7), APART_PLACES,
    ),
    "documents apart by padding beside a causal mask": Case(
        "llama", {**APART, "attention_mask": APART_BLOCKS},
        {"attention_mask": torch.ones(11, 11).tril().bool()[None, None] & (APART_REAL > 0)}, "documents", (0, 7),
        APART_PLACES,
    ),
    "an inverted mask": _packed("llama", IN_BLOCKS, {"attention_mask": ~BLOCKS.bool()}, "mask", 0, 1),
    "an inverted mask that is added": _packed(
        "llama", IN_BLOCKS, {"attention_mask": BLOCKS * LEAST}, "mask", 0, 1
    ),
    "an inverted causal mask": _one(
        "llama", {**ONE, "attention_mask": CAUSAL.bool()}, {"attention_mask": ~CAUSAL.bool()}, "mask", 0, 1
    ),
    "a mask that shows all": _one(
        "llama", {**ONE, "attention_mask": CAUSAL.bool()}, {"attention_mask": CAUSAL.bool() | True}, "future", 0, 0
    ),
    "blocks that show what comes": _packed(
        "llama", IN_BLOCKS, {"attention_mask": (BLOCKS + BLOCKS.mT).bool()}, "future", 0, 0
    ),
    "lengths that sdpa does not read": _packed(
        "llama", {**PACKED, **LENGTHS_OF_ROW}, {"position_ids": None}, "documents", 0, 5
    ),
    "0 and 1 that are added": _packed("llama", IN_BLOCKS, {"attention_mask": BLOCKS}, "mask", 0, 0),
    "-1 that is added": _packed("llama", IN_BLOCKS, {"attention_mask": BLOCKS - 1}, "mask", 0, 0),
    "a mask of integers": _packed("llama", IN_BLOCKS, {"attention_mask": BLOCKS.long()}, "mask", None, None),
    "NaN in a mask of four axes": _packed(
        "llama", IN_BLOCKS, {"attention_mask": torch.where(BLOCKS > 0, 0, NAN)}, "mask", 0, 1
    ),
    "bool beside eager attention": _packed("llama", {**PACKED, "attention_mask": (1 - BLOCKS) * LEAST},
                                           {"attention_mask": BLOCKS.bool()}, "mask", None, None)._replace(
        attention="eager"),
    "a mask of three axes": _packed("llama", IN_BLOCKS, {"attention_mask": BLOCKS[0].bool()}, "shape", None, None),
    "NaN for padding": _padded("llama", LEFT, {"attention_mask": torch.where(REAL > 0, 1, NAN)}, "mask", 1, 0),
    "-1 for padding": _padded("llama", LEFT, {"attention_mask": torch.where(REAL > 0, 1, -1)}, "mask", 1, 0),
    "-1e9 for padding": _padded("llama", LEFT, {"attention_mask": (1 - REAL) * -1e9}, "mask", 1, 0),
    "-inf for padding": _padded(
        "llama", LEFT, {"attention_mask": torch.where(REAL > 0, 0, -torch.inf)}, "mask", 1, 0
    ),
    "0.5 for padding": _padded("llama", LEFT, {"attention_mask": REAL.clamp(min=0.5)}, "mask", 1, 0),
    "no mask beside padding": _padded("llama", LEFT, {"attention_mask": None}, "padding", 1, 0),
    "a gap": _one("llama", ONE, {"position_ids": torch.arange(9)[None] + 20 * (torch.arange(9) > 3)}, "gap", 0, 4),
    "all 0": _one("llama", ONE, {"position_ids": torch.zeros(1, 9, dtype=torch.int64)}, "ids", 0, 0),
    "all 0 beside a mask": _one(
        "llama", {**ONE, "attention_mask": torch.ones(1, 9)}, {"position_ids": torch.zeros(1, 9, dtype=torch.int64)},
        "ids", 0, 0,
    ),
    "all 3": _one("llama", ONE, {"position_ids": torch.full((1, 9), 3)}, "ids", 0, 0),
    "falling": _one("llama", ONE, {"position_ids": torch.arange(9).flip(0)[None]}, "ids", 0, 1),
    "falling beside a mask": _one(
        "llama", {**ONE, "attention_mask": torch.ones(1, 9)}, {"position_ids": torch.arange(9).flip(0)[None]},
        "ids", 0, 1,
    ),
    "a number twice": _one("llama", ONE, {"position_ids": torch.tensor([[0, 1, 2, 2, 3, 4, 5, 6, 7]])}, "ids", 0, 3),
    "past float32": _one("llama", ONE, {"position_ids": torch.arange(9)[None] + 2**28 + 1}, "ids", 0, 0),
    "past the table": _one("gpt2", ONE, {"position_ids": torch.arange(9)[None] + 60}, "ids", 0, 4),
    "negative": _one("gpt2", ONE, {"position_ids": torch.arange(9)[None] - 3}, "ids", 0, 0),
    "negative at padding": _padded("gpt2", {**LEFT, "position_ids": COUNTED},
                                   {"position_ids": REAL.cumsum(1) - 1}, "ids", 1, 0),
    "padding that is counted": _padded(
        "gpt2", {**LEFT, "position_ids": COUNTED}, {"position_ids": torch.arange(5).expand(2, 5)}, "padding", 1, 1
    ),
    "padding that the model counts": _padded(
        "gpt2", {**LEFT, "position_ids": COUNTED}, {"position_ids": None}, "padding", 1, 1
    ),
    "padding that OPT is told to count": _padded(
        "opt", LEFT, {"position_ids": torch.arange(5).expand(2, 5)}, "padding", 1, 1
    ),
    "ids that go on beside blocks": _packed(
        "gpt2", IN_BLOCKS, {"position_ids": torch.arange(9)[None]}, "documents", 0, 5
    ),
    "no ids beside blocks": _packed("gpt2", IN_BLOCKS, {"position_ids": None}, "documents", 0, 5),
}  # fmt: skip


@cache
def model_of(kind: str, attention: str | None) -> PreTrainedModel:
    return tiny(kind, attention)


@cache
def _expected(kind: str, attention: str | None, one: bool) -> Tensor:
    return alone(model_of(kind, attention), [IDS[0]] if one else DOCUMENTS)


@pytest.mark.parametrize("name", CASES)
def test_every_finding_does_harm(name: str) -> None:
    case = CASES[name]
    model = model_of(case.kind, case.attention)
    expected = _expected(case.kind, case.attention, len(case.documents) == 1)
    size = float(expected.abs().max())
    assert off_by(model, case.right, case.places, expected) <= LOGITS * size
    assert check_batch(case.right, model=model) == ()
    wrong = {key: value for key, value in {**case.right, **case.change}.items() if value is not None}
    assert off_by(model, wrong, case.places, expected) > DIFFERENT
    found = check_batch(wrong, model=model)
    assert (case.check, *case.place) in [(each.check, each.row, each.token) for each in found], found


HARMLESS: dict[str, tuple[str, dict[str, Any], list[Place]]] = {
    "padding without ids": ("llama", LEFT, PADDED_PLACES),
    "padding that is counted": ("llama", {**LEFT, "position_ids": torch.arange(5).expand(2, 5)}, PADDED_PLACES),
    "padding with ALiBi": ("bloom", LEFT, PADDED_PLACES),
    "padding that the model leaves out": ("opt", LEFT, PADDED_PLACES),
    "negative at padding": ("llama", {**LEFT, "position_ids": REAL.cumsum(1) - 1}, PADDED_PLACES),
    "ids that go on beside blocks": ("llama", {**IN_BLOCKS, "position_ids": torch.arange(9)[None]}, PACKED_PLACES),
    "no ids beside blocks": ("llama", {"input_ids": IDS, "attention_mask": BLOCKS.bool()}, PACKED_PLACES),
    "-1e9 that is added": ("llama", {**PACKED, "attention_mask": (1 - BLOCKS) * -1e9}, PACKED_PLACES),
    "one mask per kind of layer": (
        "llama", {**LEFT, "position_ids": COUNTED, "attention_mask": REAL.bool()}, PADDED_PLACES
    ),
    "documents from 1": ("llama", {"input_ids": IDS, "position_ids": RESTART + 1}, PACKED_PLACES),
    "documents in two rows": (
        "llama", {"input_ids": IDS.repeat(2, 1), "position_ids": RESTART.repeat(2, 1)}, PACKED_PLACES
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_batches_have_no_findings(name: str) -> None:
    kind, batch, places = HARMLESS[name]
    model = model_of(kind, None)
    expected = _expected(kind, None, False)
    assert off_by(model, batch, places, expected) <= LOGITS * float(expected.abs().max())
    assert check_batch(batch, model=model) == ()


def test_visible_tokens_depend_on_the_model() -> None:
    """Without one, labels tell a causal model, whose own target a token must not see."""
    every = {"input_ids": IDS, "attention_mask": torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)}
    assert "give the model" in check_batch(every).unchecked[0]
    assert [each.check for each in check_batch({**every, "labels": IDS})] == ["future"]
    masked = {**every, "labels": torch.where(torch.arange(TOKENS) == 3, 7, -100)[None]}
    assert (check_batch(masked), check_batch(masked, model="bert-base").unchecked) == ((), ())
    prefix = torch.arange(TOKENS) < 4
    after = {**every, "attention_mask": CAUSAL.bool() | prefix, "labels": torch.where(prefix, -100, IDS)}
    assert check_batch(after, model=model_of("llama", None)) == ()
    image = {
        **every,
        "attention_mask": CAUSAL.bool() | (prefix[:, None] & prefix),
        "token_type_ids": prefix[None].long(),
    }
    assert check_batch({**image, "labels": IDS}) == ()
    padded = torch.arange(TOKENS) > 5  # rows of padding that see everything, as kernels demand of them
    rows = {**every, "attention_mask": (CAUSAL.bool() & ~padded) | padded[:, None]}
    for known in (every, rows):
        assert check_batch(known, model="t5-base") == ()
    assert check_batch(rows, model=model_of("llama", None)) == ()
    gemma = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    assert check_batch({**image, "token_type_ids": None}, model=gemma) == ()


def test_a_default_cache_is_named() -> None:
    model = model_of("llama", None)
    expected = _expected("llama", None, False)
    assert off_by(model, {**PACKED, "use_cache": model.config.use_cache}, PACKED_PLACES, expected) > DIFFERENT
    for options in ({}, {"model": model}):
        assert "use_cache=False" in check_batch(PACKED, **options).unchecked[-1]
        for batch in ({**PACKED, "use_cache": False}, ONE, IN_BLOCKS):
            assert check_batch(batch, **options).unchecked == ()
    without = {**model.config.to_dict(), "use_cache": False}
    assert check_batch(PACKED, model=without).unchecked == ()


def test_unchecked_names_what_depends_on_the_model() -> None:
    for batch in (LEFT, {**LEFT, "position_ids": torch.arange(5).expand(2, 5)}):
        found = check_batch(batch)
        assert (found, len(found.unchecked)) == ((), 1)
        assert "GPT-2" in found.unchecked[0]
        assert check_batch(batch, model="gpt2")[0].check == "padding"
        for known in ("llama-3.1-8b", model_of("llama", None), model_of("llama", None).config):
            assert (check_batch(batch, model=known), check_batch(batch, model=known).unchecked) == ((), ())
    assert "positions and documents agree\nnot checked: padding" in str(check_batch(LEFT))
    unknown = check_batch(LEFT, model={"model_type": "nobody-knows"})
    assert "nobody-knows" in unknown.unchecked[0]
    refused: list[tuple[Any, type[LocantError], str]] = [
        (5, LocantError, "got 5 for model"), ({}, LocantError, "got {} for model"), ("no-such", InputError, "no-such"),
    ]  # fmt: skip
    for source, error, words in refused:
        with refuses(error, words):
            check_batch(LEFT, model=source)


def test_targets_across_documents_change_the_loss() -> None:
    model = model_of("llama", None)
    labels = IDS.clone()
    labels[0, [0, 5]] = -100
    expected = [float(model(input_ids=ids[None], labels=ids[None]).loss) * (len(ids) - 1) for ids in DOCUMENTS]
    for batch in (PACKED, IN_BLOCKS):
        right, wrong = {**batch, "labels": labels}, {**batch, "labels": IDS}
        assert abs(float(model(**right, use_cache=False).loss) * (TOKENS - 2) - sum(expected)) <= LOGITS * TOKENS
        assert abs(float(model(**wrong, use_cache=False).loss) * (TOKENS - 1) - sum(expected)) > DIFFERENT
        assert check_batch(right, model=model) == ()
        assert [(each.check, each.row, each.token) for each in check_batch(wrong, model=model)] == [("labels", 0, 5)]


NONSENSE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "max_length is NaN": ({**PACKED, **LENGTHS_OF_ROW, "max_length_q": NAN}, {}, "max_length_q is nan"),
    "max_length is infinite": ({**PACKED, **LENGTHS_OF_ROW, "max_length_k": torch.inf}, {}, "max_length_k is inf"),
    "max_length is a fraction": ({**PACKED, **LENGTHS_OF_ROW, "max_length_k": 5.5}, {}, "max_length_k is 5.5"),
    "max_length alone": ({**PACKED, "max_length_q": 5}, {}, "cu_seq_lens_q is missing"),
    "lengths across rows": (
        {"input_ids": IDS.repeat(2, 1), **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 18]))},
        {}, "one document is in two rows",
    ),
    "lengths of three times the tokens": (
        {**ONE, **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 9, 18, 27]))}, {}, "end with 27",
    ),
    "other documents in seq_idx": (
        {**PACKED, "seq_idx": torch.tensor([[0] * 4 + [1] * 5])}, {}, "seq_idx and position_ids have different",
    ),
    "ids past the last": (
        {**ONE, "position_ids": torch.arange(9)[None] + 2**24}, {}, "float32 counts up to 2**24",
    ),
    "ids past those of the model": (
        {**ONE, "position_ids": torch.arange(9)[None] + 131072}, {"model": "llama-3.1-8b"}, "ids up to 131071",
    ),
    "a row longer than a table": ({"input_ids": torch.ones(1, 1025)}, {"model": "gpt2"}, "1,025 tokens"),
    "ids of RoBERTa from 0": (ONE, {"model": "roberta-base"}, "the first id of roberta is 2"),
    "types past a table": (
        {**ONE, "token_type_ids": torch.full((1, 9), 2)}, {"model": "bert-base"}, "bert has 2 types",
    ),
    "three axes for a model of text": (
        {"input_ids": IDS, "position_ids": torch.arange(9).expand(3, 1, 9)}, {"model": "llama-3.1-8b"},
        "3 axes, and llama has 1",
    ),
    "documents in axes alone": (
        {"input_ids": IDS, "position_ids": RESTART.expand(3, 1, 9)}, {"axes": 3}, "no ids of text",
    ),
    "all axes 0": (
        {"input_ids": IDS, "position_ids": torch.zeros(3, 1, 9, dtype=torch.int64)}, {"axes": 3}, "[0, 0, 0]",
    ),
    "all of four 0": (
        {"input_ids": IDS, "position_ids": torch.zeros(4, 1, 9, dtype=torch.int64)}, {"axes": 3}, "0 for all tokens",
    ),
    "ids of tokens with an axis more": ({"input_ids": IDS[..., None]}, {}, "input_ids are of (1, 9, 1)"),
    "a mask of other tokens": ({**PACKED, "attention_mask": CAUSAL[..., 1:].bool()}, {}, "(1, 1, 9, 8)"),
}  # fmt: skip


@pytest.mark.parametrize("name", NONSENSE)
def test_values_without_a_meaning_are_found(name: str) -> None:
    batch, options, words = NONSENSE[name]
    found = check_batch(batch, **options)
    assert any(words in each for each in found), found


def test_flash_attention_finds_documents_in_one_row_alone() -> None:
    """As its own function in `transformers` has it, which needs no GPU."""
    from transformers import modeling_flash_attention_utils

    is_packed: Any = vars(modeling_flash_attention_utils)["_is_packed_sequence"]
    two = {"input_ids": IDS.repeat(2, 1), "position_ids": RESTART.repeat(2, 1)}
    config = copy.deepcopy(model_of("llama", None).config)
    vars(config)["_attn_implementation_internal"] = "flash_attention_2"
    assert is_packed(RESTART, 1)
    assert check_batch(PACKED, model=config) == ()
    assert not is_packed(two["position_ids"], 2)
    assert "single row" in check_batch(two, model=config)[0]
    assert "several rows" in check_batch(two).unchecked[0]


def test_a_finding_is_a_sentence_and_data() -> None:
    found = check_batch({**PACKED, "attention_mask": CAUSAL.bool()})
    assert found[0].to_dict() == {
        "check": "documents", "message": str(found[0]), "remedy": "hide other documents from each token",
        "row": 0, "token": 5, "kind": "packed-documents-visible",
    }  # fmt: skip
    for again in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):  # noqa: S301  # our own bytes
        assert [each.to_dict() for each in again] == [each.to_dict() for each in found]
        assert again.unchecked == found.unchecked
    assert Positions.from_mask(REAL).index.tolist() == COUNTED.tolist()  # what the remedy names is what is right
