"""Packed batches have the outputs of documents alone, and mistakes in packing are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening, PreTrainedModel

from locant import InputError, LocantError, Positions, RangeError, ShapeError
from locant.cli import main
from locant.engines.batches import check_batch, pack_documents, read_batch
from tests.refusal import refuses
from tests.tolerances import assert_close

LENGTHS = (5, 1, 9, 3)
DOCUMENTS = [torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
EXAMPLES = [{"input_ids": ids} for ids in DOCUMENTS]


def _model(kind: str, attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, pad_token_id=0, **({} if kind == "gpt_neox" else {"num_key_value_heads": 2}),
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox"])
def test_a_packed_row_gives_loss_and_gradients_of_documents_alone(kind: str, attention: str) -> None:
    model = _model(kind, attention)
    batch = pack_documents(EXAMPLES)
    targets = sum(length - 1 for length in LENGTHS)
    packed = model(**batch, use_cache=False).loss * targets
    gradients = torch.autograd.grad(packed, [*model.parameters()])
    alone = torch.zeros(())
    for ids in DOCUMENTS:
        if len(ids) > 1:  # one token alone has no target
            row = torch.tensor(ids)[None]
            alone = alone + model(input_ids=row, labels=row).loss * (len(ids) - 1)
    assert_close(packed, alone)
    for a, b in zip(gradients, torch.autograd.grad(alone, [*model.parameters()]), strict=True):
        assert_close(a, b)
    if attention == "sdpa":  # why the docstring asks for use_cache=False
        assert (model(**batch).loss * targets - alone).abs() > 1e-2


def test_a_packed_batch_equals_the_collator_of_transformers() -> None:
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")(EXAMPLES)
    ours = pack_documents(EXAMPLES)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(value)), name
    assert check_batch(theirs) == ()


@pytest.mark.parametrize(
    "positions",
    [
        Positions.arange(5),
        Positions.arange(4, batch=3),
        Positions.after(7, 3),
        Positions.packed([3, 1, 4]),
        Positions.packed([[3, 2], [1, 4]]),
        Positions.from_mask(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])),
        Positions.grid(2, 3, 2),
    ],
    ids=repr,
)
def test_what_is_written_is_read_back(positions: Positions) -> None:
    batch = positions.to_batch()
    again = Positions.from_batch(batch)
    assert torch.equal(again.index, positions.index)
    assert torch.equal(again.mask(), positions.mask())
    assert check_batch({**batch, "input_ids": torch.ones(positions.batch, positions.seq_len)}) == ()


def test_a_mask_that_numbers_documents_and_lengths_alone_are_read() -> None:
    packed = Positions.packed([2, 3])
    numbered = Positions.from_batch({"attention_mask": torch.tensor([[1, 1, 2, 2, 2]])})
    lengths = Positions.from_batch({"cu_seq_lens_q": torch.tensor([0, 2, 5])})
    for read in (numbered, lengths):
        assert torch.equal(read.index, packed.index)
        assert torch.equal(read.document, packed.document)


def test_packed_images_have_documents() -> None:
    """A vision-language model of `transformers` finds documents only in ids of text before those of the axes."""
    packed = Positions.packed_grids([[(1, 2, 2), (1, 1, 3)]])
    ids = packed.to_batch()["position_ids"]
    assert ids.shape == (4, 1, 7)
    assert ids[0].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    again = Positions.from_batch(packed.to_batch())
    assert torch.equal(again.index, packed.index)
    assert torch.equal(again.document, packed.document)


PACKED = pack_documents(EXAMPLES)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "ids do not restart": ({"position_ids": torch.arange(18)[None]}, "have different documents from token 5"),
    "a mask hides the documents": ({"attention_mask": torch.ones(1, 18)}, "do not look for documents"),
    "a mask numbers them": ({"attention_mask": torch.tensor([[1] * 5 + [2] * 13])}, "numbers documents"),
    "a document without its end": ({"cu_seq_lens_q": torch.tensor([0, 5, 6, 15])}, "end with 15, and 18 tokens"),
    "lengths of padded tokens": ({"cu_seq_lens_k": torch.tensor([0, 8, 16, 24])}, "end with 24"),
    "queries and keys differ": ({"cu_seq_lens_k": torch.tensor([0, 6, 7, 15, 18])}, "differ"),
    "one of two lengths": ({"cu_seq_lens_k": None}, "both are needed"),
    "a longest that is none": ({"max_length_q": 8}, "max_length_q is 8, and a document has 9"),
    "targets across documents": ({"labels": PACKED["input_ids"]}, "token 5 of row 0"),
    "ids that were not padded": (
        {"position_ids": PACKED["position_ids"][:, :15]},
        "1 x 15 tokens, and the batch has 1 x 18",
    ),
    "another length beside ids alone": (
        {"input_ids": None, "labels": None, "position_ids": torch.arange(3)[None]},
        "end with 18, and 3 tokens",
    ),
    "a mask of another length": (
        {"input_ids": None, "labels": None, "attention_mask": torch.ones(1, 17)},
        "1 x 18 tokens, and the batch has 1 x 17",
    ),
    "labels of another shape": ({"labels": PACKED["labels"][..., None]}, "labels are of (1, 18, 1)"),
    "ids of another shape": ({"position_ids": torch.zeros(2, 1, 18, dtype=torch.int64)}, "shape (2, 1, 18)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_found(name: str) -> None:
    change, words = WRONG[name]
    findings = check_batch({**PACKED, **change})
    assert any(words in finding for finding in findings), findings


def test_flattened_axes_are_found() -> None:
    batch = {"input_ids": torch.ones(1, 12), "position_ids": torch.arange(12)[None]}
    assert "images are counted as text" in check_batch(batch, axes=3)[0]
    assert check_batch(batch) == ()
    grid = Positions.grid(3, 2, 2).to_batch() | {"input_ids": torch.ones(1, 12)}
    assert check_batch(grid, axes=3) == ()
    ends = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 12]))
    assert "no ids of text" in check_batch(grid | ends, axes=3)[0]


def test_contradictory_and_ambiguous_batches_raise() -> None:
    with refuses(LocantError, "different documents", "check-batch"):
        Positions.from_batch({"position_ids": torch.arange(5)[None], "cu_seq_lens_q": torch.tensor([0, 2, 5])})
    with refuses(LocantError, "different documents"):
        Positions.from_batch({"cu_seq_lens_q": torch.tensor([0, 2, 5]), "cu_seq_lens_k": torch.tensor([0, 3, 5])})
    with refuses(LocantError, "has no positions"):
        Positions.from_batch({"input_ids": torch.ones(1, 3)})
    with refuses(LocantError, "padding and several documents"):
        Positions.packed([[3, 2], [1, 1]]).to_batch()
    with refuses(LocantError, "grow by one"):
        Positions.of([[0, 2, 0, 1]], document=[[0, 0, 1, 1]]).to_batch()
    with refuses(ShapeError, "position_ids of shape"):
        Positions.from_batch({"position_ids": torch.zeros(1, 2, 3, 4, dtype=torch.int64)})
    with refuses(ShapeError, "one number per token"):
        pack_documents([{"input_ids": [[1, 2]]}])


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".json"])
def test_the_verb_reads_a_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"batch{suffix}"
    for batch, code in ((PACKED, 0), ({**PACKED, "labels": PACKED["input_ids"]}, 1)):
        tensors = {name: torch.as_tensor(value).clone() for name, value in batch.items()}
        match suffix:
            case ".safetensors":
                save_file(tensors, path)
            case ".npz":
                np.savez(path, allow_pickle=False, **{name: tensor.numpy() for name, tensor in tensors.items()})
            case _:
                path.write_text(json.dumps({name: tensor.tolist() for name, tensor in tensors.items()}))
        result = CliRunner().invoke(main, ["check-batch", str(path), "--json"])
        assert (result.exit_code, len(json.loads(result.stdout)["findings"])) == (code, code)


def test_files_without_a_batch_raise(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"")
    for name, content in (
        ("a.json", "[1]"),
        ("b.json", "{"),
        ("c.npz", "x"),
        ("d.safetensors", "x"),
        ("e.json", '{"a": "b"}'),
        ("f.json", '{"input_ids": [[1, null]]}'),
    ):
        (tmp_path / name).write_text(content)
    for path in [*tmp_path.iterdir(), tmp_path]:
        with refuses(InputError, path.name):
            read_batch(path)
    for name in ("nothing.json", "nothing.npz", "nothing.safetensors"):
        with refuses(
            InputError, f"got no file {tmp_path / name}; try: pass a batch saved as .safetensors, .npz or .json"
        ):
            read_batch(tmp_path / name)


def test_gaps_in_the_ids_of_one_document_are_not_boundaries() -> None:
    """Without a mask a model of `transformers` would take each gap for the end of a document."""
    for positions in (Positions.of([[0, 5, 9, 10]]), Positions.cat([Positions.arange(2), Positions.after(10, 2)])):
        batch = positions.to_batch()
        assert batch["attention_mask"].all()
        assert Positions.from_batch(batch) == positions
        assert check_batch(batch) == ()
    with refuses(LocantError, "different documents"):
        Positions.from_batch({"position_ids": torch.tensor([[0, 1, 0, 1]]), "attention_mask": torch.ones(1, 4)})
    with refuses(LocantError, "different documents"):  # documents of one token
        Positions.from_batch({"position_ids": torch.tensor([[0, 0]]), "attention_mask": torch.ones(1, 2)})


def test_padded_examples_are_packed_without_their_padding() -> None:
    padded = [{"input_ids": [7, 8, 0], "attention_mask": [1, 1, 0]}, {"input_ids": [9, 9], "labels": None}]
    assert pack_documents(padded)["input_ids"].tolist() == [[7, 8, 9, 9]]
    alone = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")(EXAMPLES[:1])
    ours = pack_documents(EXAMPLES[:1])
    assert {name: torch.as_tensor(value).tolist() for name, value in ours.items()} == {
        name: torch.as_tensor(value).tolist() for name, value in alone.items()
    }


def test_ends_that_a_collator_repeats_to_fill_the_list_are_not_documents() -> None:
    ends = torch.tensor([0, 5, 5, 6, 15, 18, 18, 18])
    batch = {**PACKED, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    assert check_batch(batch) == ()
    assert Positions.from_batch(batch) == Positions.from_batch(PACKED)


def test_lists_are_read_and_other_values_raise() -> None:
    assert check_batch({"input_ids": [1, 2, 3], "position_ids": [0, 1, 2]}) == ()
    padded = {"input_ids": [[1, 2]], "labels": [[1, 2]], "attention_mask": [[1, 0]]}
    assert "labels have targets at padding, the first at token 1 of row 0; set them to -100" in check_batch(padded)
    assert check_batch({"input_ids": torch.ones(3, 4), "position_ids": torch.arange(4).expand(2, 4)})
    wrong: list[Any] = ["text", {}, {"foo": 1}, {"input_ids": [[1, 2], [3]]}, None]
    wrong += [{**PACKED, "labels": 5}, {**PACKED, "max_length_q": [5, 9]}]
    for batch in wrong:
        with refuses(LocantError):
            check_batch(batch)
    with refuses(RangeError, "axes"):
        check_batch(PACKED, axes=0)
    odd: list[tuple[Any, Any]] = [({}, LocantError), ([1, 2], LocantError), ({"input_ids": [1.5, 2]}, ShapeError)]
    for example, kind in odd:
        with refuses(kind):
            pack_documents([example])
    with refuses(LocantError, "2 axes"):
        Positions.grid(2, 3).to_batch()
