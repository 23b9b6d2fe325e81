"""`VocabularyParallel`: one to four processes get the numbers of one, what it refuses, what it goes together with."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from locant import (
    InputEmbedding,
    LocantError,
    NGramEmbedding,
    PerLayerEmbedding,
    Positions,
    RangeError,
    ShapeError,
    Sinusoidal,
    TokenEmbedding,
)
from locant.embedding import NGramHash, SparseTable, TableFile
from locant.lab.decoder import Decoder
from locant.parallel import VocabularyParallel, clip_grad_norm_, parameter_groups
from locant.parallel.vocabulary import SplitTable
from tests.parallel.vocabulary_ranks import CASES, RANKS, find_out, require_reset, require_the_table_of_one_rank
from tests.ranks import found_on, needs_gloo
from tests.refusal import refuses
from tests.tolerances import SHORT_SUM

pytestmark = needs_gloo


@pytest.mark.slow
def test_one_to_four_processes_have_the_table_of_one() -> None:
    """No number of ranks divides the rows, and one rank has none."""
    found = found_on(RANKS, find_out, [SplitTable], CASES)
    require_the_table_of_one_rank(found, SplitTable)
    require_reset(found, SplitTable)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def split(table: TokenEmbedding, mesh: DeviceMesh) -> TokenEmbedding:
    model = parallelize_module(nn.Sequential(table), mesh, {"0": VocabularyParallel()})
    return model[0]  # type: ignore[index,return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 2.5, "sqrt_d_model", "sqrt_d_model_rounded"])
def test_scale_and_dtype_are_those_of_a_whole_table(
    mesh: DeviceMesh, scale: float | str | None, dtype: torch.dtype
) -> None:
    whole = TokenEmbedding(11, 8, scale=scale, padding_idx=3).to(dtype)  # type: ignore[arg-type]
    part, ids = split(copy.deepcopy(whole), mesh), torch.randint(11, (2, 3, 5))
    expected, found = whole(ids), part(ids)
    assert torch.equal(found, expected)
    cotangent = torch.randn_like(expected)
    expected.backward(cotangent)
    found.backward(cotangent)
    assert isinstance(part.weight, DTensor)
    assert part.weight.placements == (Shard(0),)
    assert isinstance(part.weight.grad, DTensor)
    assert torch.equal(part.weight.grad.full_tensor(), whole.weight.grad)


def test_a_frozen_table_stays_frozen(mesh: DeviceMesh) -> None:
    table = TokenEmbedding(7, 4)
    table.weight.requires_grad_(False)
    assert not split(table, mesh).weight.requires_grad


def test_a_whole_decoder_runs_on_a_split_table_with_its_tied_head(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = Decoder(11, Sinusoidal(8), d_model=8, num_layers=1, num_heads=2)
    ids = torch.randint(11, (2, 5))
    expected = model(ids)
    parallelize_module(model, mesh, {"embedding": VocabularyParallel()})
    assert isinstance(model.embedding.token.weight, DTensor)
    torch.testing.assert_close(model(ids), expected, **SHORT_SUM)
    model(ids).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.unchecked
def test_it_compiles_without_a_break(mesh: DeviceMesh) -> None:
    table = split(TokenEmbedding(11, 4), mesh)
    ids = torch.arange(11)[None]
    with torch.no_grad():
        assert torch.equal(torch.compile(table, fullgraph=True, backend="aot_eager")(ids), table(ids))


def test_the_parts_are_drawn_as_a_whole_table_is(mesh: DeviceMesh) -> None:
    torch.manual_seed(3)
    expected = TokenEmbedding(11, 4, padding_idx=2).weight
    table = split(TokenEmbedding(11, 4, padding_idx=2), mesh)
    torch.manual_seed(3)
    table.reset_parameters()
    assert isinstance(table.weight, DTensor)
    assert torch.equal(table.weight.full_tensor(), expected)


def test_mistakes_are_named(mesh: DeviceMesh) -> None:
    with refuses(LocantError, "got a Linear to split by rows", "TokenEmbedding"):
        parallelize_module(nn.Sequential(nn.Linear(2, 2)), mesh, {"0": VocabularyParallel()})
    table = split(TokenEmbedding(7, 4), mesh)
    with refuses(LocantError, "got 9 rows for a table that is split", "resize() before"):
        table.resize(9)
    with refuses(RangeError, "got id 7 at (0, 1)", "vocab_size=7"):
        table(torch.tensor([[0, 7]]))
    with refuses(ShapeError, "x of shape", "d_model=4"):
        table.logits(torch.zeros(1, 3))
    assert table(torch.tensor([[0, 6]])).shape == (1, 2, 4)
    table.weight = nn.Parameter(torch.zeros(7, 4))
    with refuses(ShapeError, "got a weight of a plain tensor", "expected rows split over one mesh dimension"):
        table(torch.tensor([[0]]))


def test_a_mesh_of_two_dimensions_is_refused(mesh: DeviceMesh) -> None:
    square = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises((LocantError, ValueError), match="mesh"):
        parallelize_module(nn.Sequential(TokenEmbedding(7, 4)), square, {"0": VocabularyParallel()})
    embedding = InputEmbedding(7, 4)
    parallelize_module(embedding, square["tp"], {"token": VocabularyParallel()})
    assert embedding(torch.tensor([[6]])).shape == (1, 1, 4)


def test_clipping_and_optimizers_take_a_split_table_beside_plain_parameters(mesh: DeviceMesh) -> None:
    """torch refuses to add up or step what is partly DTensor: "got mixed torch.Tensor and DTensor"."""
    torch.manual_seed(0)
    whole = Decoder(11, Sinusoidal(8), d_model=8, num_layers=1, num_heads=2).double()  # AdamW magnifies roundings
    ids, part = torch.randint(11, (2, 5)), copy.deepcopy(whole)
    parallelize_module(part, mesh, {"embedding": VocabularyParallel()})
    for model in (whole, part):
        model(ids).square().sum().backward()
    with pytest.raises(RuntimeError, match="mixed"):
        nn.utils.clip_grad_norm_(part.parameters(), 1e-3)
    for options in ({"foreach": True}, {"fused": True}):
        with pytest.raises(RuntimeError, match="mixed"):
            torch.optim.AdamW(part.parameters(), lr=0.1, **options).step()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 1e-3)
    torch.testing.assert_close(clip_grad_norm_(part.parameters(), 1e-3), expected, **SHORT_SUM)
    for options in ({"foreach": True}, {"fused": True}):
        for parameters in (whole.parameters(), parameter_groups(part.parameters())):
            torch.optim.AdamW(parameters, lr=0.1, **options).step()
        for ours, theirs in zip(part.parameters(), whole.parameters(), strict=True):
            ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
            torch.testing.assert_close(ours, theirs, **SHORT_SUM)


def test_an_ngram_table_is_split_like_a_token_table(mesh: DeviceMesh) -> None:
    hashing = NGramHash.of(orders=(2, 3), heads=2, size=5, vocab_size=11)
    whole = NGramEmbedding(hashing, 3)
    model = parallelize_module(nn.Sequential(copy.deepcopy(whole)), mesh, {"0": VocabularyParallel()})
    ids, positions = torch.randint(11, (2, 5)), Positions.from_mask(torch.tensor([[0, 0, 1, 1, 1], [1] * 5]))
    expected, found = whole(ids, positions), model[0](ids, positions)  # type: ignore[operator]
    assert torch.equal(found, expected)
    cotangent = torch.randn_like(expected)
    expected.backward(cotangent)
    found.backward(cotangent)
    assert torch.equal(model[0].weight.grad.full_tensor(), whole.weight.grad)  # type: ignore[union-attr]


def test_a_per_layer_table_is_split_like_a_token_table(mesh: DeviceMesh) -> None:
    whole = PerLayerEmbedding(11, 2, 3, 8, padding_idx=4)
    model = parallelize_module(nn.Sequential(copy.deepcopy(whole)), mesh, {"0": VocabularyParallel()})
    ids, x = torch.randint(11, (2, 5)), torch.randn(2, 5, 8)
    expected, found = whole(ids, x), model[0](ids, x)  # type: ignore[operator]
    assert torch.equal(found, expected)
    cotangent = torch.randn_like(expected)
    expected.backward(cotangent)
    found.backward(cotangent)
    assert torch.equal(model[0].weight.grad.full_tensor(), whole.weight.grad)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["n-grams", "per layer"])
def test_sparse_rows_and_files_are_not_split(kind: str, mesh: DeviceMesh, tmp_path: Path) -> None:
    """A split table would lose the sparse gradients and the file, and each rank would train a copy of the rows."""
    hashing = NGramHash.of(orders=(2,), heads=1, size=5, vocab_size=11)
    build = {"n-grams": lambda: NGramEmbedding(hashing, 3), "per layer": lambda: PerLayerEmbedding(5, 1, 3, 8)}[kind]
    call = {"n-grams": lambda each: each(torch.tensor([[1, 2]])), "per layer": lambda each: each.rows([1, 2])}[kind]
    rows = build().weight.shape[0]  # type: ignore[union-attr]
    sparse, mapped, split = build(), build(), build()
    sparse.table = SparseTable()
    mapped.use_file(file := TableFile.create(tmp_path / "table.safetensors", num_rows=rows, width=3))
    for each in (sparse, mapped):
        with refuses(LocantError, type(each).__name__, "SparseTable", "dense gradients"):
            parallelize_module(nn.Sequential(each), mesh, {"0": VocabularyParallel()})
    parallelize_module(nn.Sequential(split), mesh, {"0": VocabularyParallel()})
    with refuses(LocantError, "one process at a time can train a file"):
        split.use_file(file)
    split.table = SparseTable()
    with refuses(LocantError, "split over ranks", "dense"):
        call(split)
