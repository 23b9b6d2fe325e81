"""`LearnedGrid` against the embeddings of published vision models, and images of several sizes in one row."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locant import InputEmbedding, Learned, LearnedGrid, Positions, ShapeError, encoding_from_config
from locant.positions.grids import Grid
from tests.refusal import refuses
from tests.tolerances import assert_close

TABLE, PATCH, WIDTH = 4, 2, 12
SIZES = [(4, 4), (2, 8), (7, 5), (3, 2), (1, 1)]
"""Of the table, of as many cells, larger, smaller, and one."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTEmbeddings", {"prefix": 1}),
    "clip": ("CLIPVisionEmbeddings", {"prefix": 1}),
    "siglip": ("SiglipVisionEmbeddings", {}),
    "deit": ("DeiTEmbeddings", {"prefix": 2}),
    "dinov2": ("Dinov2Embeddings", {"prefix": 1}),
    "dinov2_with_registers": ("Dinov2WithRegistersEmbeddings", {"prefix": 1, "antialias": True}),
    "siglip2": ("Siglip2VisionEmbeddings", {"mode": "bilinear", "antialias": True}),
}


def published(model: str) -> tuple[nn.Module, Any]:
    """The embeddings of a small model, with random positions, and its configuration."""
    folder = importlib.import_module(f"transformers.models.{model}")
    name = MODELS[model][0].removesuffix("Embeddings") + "Config"
    sizes = {"hidden_size": WIDTH, "image_size": TABLE * PATCH, "patch_size": PATCH, "num_patches": TABLE**2}
    module = getattr(folder, f"modeling_{model}")
    config = getattr(folder, name)(**sizes)
    embeddings = getattr(module, MODELS[model][0])(config).eval()
    nn.init.normal_(table_of(embeddings))
    return embeddings, config


def table_of(embeddings: Any) -> nn.Parameter:
    if hasattr(embeddings, "position_embedding"):
        return embeddings.position_embedding.weight
    return embeddings.position_embeddings


def images_of(embeddings: Any, sizes: tuple[int, int]) -> Callable[[], Tensor]:
    """The embeddings of two images of so many patches."""
    height, width = sizes
    if type(embeddings).__name__.startswith("Siglip2"):
        patches, shapes = torch.randn(2, height * width, 3 * PATCH**2), torch.tensor([sizes, sizes])
        return lambda: embeddings(patches, shapes)
    pixels = torch.randn(2, 3, height * PATCH, width * PATCH)
    known = {} if type(embeddings).__name__.startswith("Dinov2") else {"interpolate_pos_encoding": True}
    return lambda: embeddings(pixels, **known)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_values_and_gradients_are_those_of_published_models(model: str, sizes: tuple[int, int]) -> None:
    embeddings, config = published(model)
    ours = encoding_from_config(config)
    assert isinstance(ours, LearnedGrid)
    assert repr(ours) == repr(LearnedGrid(TABLE, TABLE, WIDTH, **MODELS[model][1]))
    their_table, forward = table_of(embeddings), images_of(embeddings, sizes)
    ours.weight.data.copy_(their_table.data.view_as(ours.weight))
    expected = forward()
    cotangent = torch.randn_like(expected)
    their_gradient = torch.autograd.grad(expected, their_table, cotangent)[0].view_as(ours.weight)
    their_table.data.zero_()
    x = forward().detach()
    actual = ours.embed(x, Positions.grid(*sizes, prefix=x.shape[1] - sizes[0] * sizes[1]))
    gradient = torch.autograd.grad(actual, ours.weight, cotangent)[0]
    if model == "siglip2":  # which resizes for each image anew, by a product of matrices of its own
        assert_close(actual, expected)
        assert_close(gradient, their_gradient)
    else:
        assert torch.equal(actual, expected)
        assert torch.equal(gradient, their_gradient)


def test_a_grid_of_its_own_size_gets_the_table_itself() -> None:
    grid = LearnedGrid(3, 5, 8, prefix=1).bfloat16()
    assert grid.table([Grid((3, 5), 1)]) is grid.weight
    with_registers = grid.table([Grid((3, 5), 3)])
    assert torch.equal(with_registers[[0, *range(3, 18)]], grid.weight)
    assert not with_registers[1:3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_padded_or_sliced_images_get_the_same_result_as_alone(dtype: torch.dtype) -> None:
    encoding = LearnedGrid(TABLE, TABLE, WIDTH, prefix=1, antialias=True).to(dtype)
    images = {sizes: torch.randn(1, 3 + sizes[0] * sizes[1], WIDTH).to(dtype) for sizes in SIZES}
    alone = {sizes: encoding.embed(x, Positions.grid(*sizes, prefix=3)) for sizes, x in images.items()}
    rows = [[*SIZES[:2], SIZES[0]], SIZES[2:]]
    positions = Positions.packed_grids([[*row] for row in rows], prefix=3, length=80)
    x = torch.randn(2, 80, WIDTH).to(dtype)
    expected = [torch.cat([alone[sizes] for sizes in row], 1)[0] for row in rows]
    for row, into in zip(rows, x, strict=True):
        parts = torch.cat([images[sizes] for sizes in row], 1)[0]
        into[: len(parts)] = parts
    whole = encoding.embed(x, positions)
    cut = [encoding.embed(x[:, a:b], positions.slice(a, b)) for a, b in ((0, 7), (7, 30), (30, 80))]
    for actual in (whole, torch.cat(cut, 1)):
        assert all(torch.equal(got[: len(want)], want) for got, want in zip(actual, expected, strict=True))


def test_gradients_of_packed_images_add_up() -> None:
    encoding = LearnedGrid(TABLE, TABLE, WIDTH, mode="bilinear").double()
    cotangents = [torch.randn(1, a * b, WIDTH).double() for a, b in SIZES]
    alone = [
        torch.autograd.grad(encoding.embed(torch.zeros_like(each), Positions.grid(*sizes)), encoding.weight, each)[0]
        for sizes, each in zip(SIZES, cotangents, strict=True)
    ]
    together = torch.cat(cotangents, 1)
    packed = encoding.embed(torch.zeros_like(together), Positions.packed_grids(SIZES))
    assert_close(torch.autograd.grad(packed, encoding.weight, together)[0], torch.stack(alone).sum(0))


def test_corners_are_aligned_where_they_are_asked_to_be() -> None:
    encoding = LearnedGrid(2, 2, 1, mode="bilinear", align_corners=True)
    encoding.weight.data.copy_(torch.tensor([[0.0], [1.0], [2.0], [3.0]]))
    row, column = torch.meshgrid(torch.arange(3.0), torch.arange(5.0), indexing="ij")
    assert torch.equal(encoding.table([Grid((3, 5))])[:, 0], (row + column / 4).flatten())


def test_a_table_of_one_row_is_one_for_text() -> None:
    learned, grid = Learned(9, WIDTH), LearnedGrid(1, 9, WIDTH)
    grid.weight.data.copy_(learned.weight.data)
    ids, positions = torch.zeros(1, 6, dtype=torch.long), Positions.packed([4, 2])
    embedding = InputEmbedding(3, WIDTH, encoding=learned)
    expected = embedding(ids, positions)
    embedding.encoding = grid
    assert torch.equal(embedding(ids, positions), expected)


@pytest.mark.unchecked
def test_images_of_any_size_share_a_graph_after_the_second() -> None:
    encoding, graphs = LearnedGrid(4, 4, WIDTH, prefix=1), 0

    def count(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    embed = torch.compile(encoding.embed, backend=count, fullgraph=True)
    for sizes in [(6, 5), (3, 7), (5, 8), (2, 9)]:
        positions = Positions.grid(*sizes, prefix=2)
        x = torch.randn(2, positions.seq_len, WIDTH)
        assert_close(embed(x, positions), encoding.embed(x, positions))
    assert graphs <= 2


WRONG: dict[str, Callable[[], Positions]] = {
    "text": lambda: Positions.arange(6),
    "no grid": lambda: Positions.of(Positions.grid(2, 3).index),
    "no class token": lambda: Positions.grid(2, 3),
    "a video": lambda: Positions.grid(1, 1, 5, prefix=1),
}


@pytest.mark.parametrize("name", WRONG)
def test_positions_without_a_grid_raise_an_error(name: str) -> None:
    with refuses(ShapeError, "Positions.grid(height, width, prefix=1)"):
        LearnedGrid(4, 4, WIDTH, prefix=1).embed(torch.zeros(1, 6, WIDTH), WRONG[name]())
