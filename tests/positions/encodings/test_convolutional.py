"""`Convolutional` against the modules of published models of speech, and rows that share a batch or a row."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locant import Convolutional, InputEmbedding, LocantError, Positions, RangeError, encoding_from_config
from locant.positions import randomized
from tests.refusal import refuses
from tests.tolerances import DRAWN, assert_close

WIDTH, GROUPS = 12, 3
LENGTHS = [9, 1, 14]
LAYERS = {"kernel_size": 5, "depth": 3, "norm": "layer"}


def published(model: str, kernel_size: int) -> tuple[nn.Module, Convolutional]:
    """The module of a model, and what is read of its configuration."""
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    names = {"wav2vec2": "Wav2Vec2", "wavlm": "WavLM", "hubert": "Hubert"}
    config = getattr(importlib.import_module("transformers"), f"{names[model]}Config")(
        hidden_size=WIDTH, num_conv_pos_embedding_groups=GROUPS, num_conv_pos_embeddings=kernel_size
    )
    return getattr(module, f"{names[model]}PositionalConvEmbedding")(config), read(config)


def read(config: Any) -> Convolutional:
    encoding = encoding_from_config(config.to_dict())
    assert isinstance(encoding, Convolutional)
    return encoding


def shaken(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


def loaded(ours: Convolutional, convolutions: list[Any]) -> Convolutional:
    """With the parameters of these convolutions."""
    ours = ours.double()
    for number, convolution in enumerate(convolutions):
        held = {name: value.detach() for name, value in convolution.named_parameters()}
        weight = held.get("parametrizations.weight.original1", held.get("weight"))
        ours.weight.data[number], ours.shift.data[number] = weight, held["bias"]
        if ours.gain is not None:
            ours.gain.data[number] = held["parametrizations.weight.original0"].flatten()
    return ours


def require_same(ours: Convolutional, theirs: Callable[[Tensor], Tensor], convolutions: list[Any]) -> None:
    x, cotangent = (torch.randn(2, 11, WIDTH, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    mine, expected = ours.embed(x, Positions.arange(11)), x + theirs(x)
    assert_close(mine, expected)
    gradients = torch.autograd.grad(mine, [x, *ours.parameters()], cotangent)
    of_theirs = [dict(each.named_parameters()) for each in convolutions]
    leaves = [parameter for each in of_theirs for parameter in each.values()]
    known = dict(zip(map(id, leaves), torch.autograd.grad(expected, [x, *leaves], cotangent)[1:], strict=True))
    names = {"weight": ("parametrizations.weight.original1", "weight"), "shift": ("bias",)}
    names["gain"] = ("parametrizations.weight.original0",)
    assert_close(gradients[0], torch.autograd.grad(x + theirs(x), x, cotangent)[0])
    for (name, parameter), gradient in zip(ours.named_parameters(), gradients[1:], strict=True):
        wanted = [known[id(next(each[one] for one in names[name] if one in each))] for each in of_theirs]
        assert_close(gradient, torch.stack(wanted).view_as(parameter))


@pytest.mark.parametrize(
    ("model", "kernel_size"), [("wav2vec2", 128), ("wav2vec2", 5), ("wav2vec2", 4), ("hubert", 7), ("wavlm", 6)]
)
def test_values_and_gradients_are_those_of_models_of_speech(model: str, kernel_size: int) -> None:
    module, ours = published(model, kernel_size)
    theirs = shaken(module)
    require_same(loaded(ours, [theirs.conv]), theirs, [theirs.conv])


@pytest.mark.parametrize("kernel_size", [19, 4])
def test_values_and_gradients_are_those_of_data2vec(kernel_size: int) -> None:
    module = importlib.import_module("transformers.models.data2vec.modeling_data2vec_audio")
    config = importlib.import_module("transformers").Data2VecAudioConfig(
        hidden_size=WIDTH, num_conv_pos_embedding_groups=GROUPS, conv_pos_kernel_size=kernel_size
    )
    theirs = shaken(module.Data2VecAudioPositionalConvEmbedding(config))
    convolutions = [layer.conv for layer in theirs.layers]
    require_same(loaded(read(config), convolutions), theirs, convolutions)


def test_initial_weights_are_drawn_as_in_wav2vec2() -> None:
    fresh = Convolutional(96, kernel_size=64, groups=2)
    assert float(fresh.weight.detach().std()) == pytest.approx(2 * (64 * 96) ** -0.5, rel=DRAWN, abs=0)
    assert_close(fresh._kernels(), fresh.weight)
    assert not fresh.shift.any()


ROWS: dict[str, tuple[Positions, list[list[int]]]] = {
    "packed": (Positions.packed([[9, 1, 14], [14]], length=27), [[0, 1, 2], [2]]),
    "padded left": (Positions.from_mask(torch.tensor([[0] * (14 - n) + [1] * n for n in LENGTHS])), [[0], [1], [2]]),
    "padded right": (Positions.from_mask(torch.tensor([[1] * n + [0] * (16 - n) for n in LENGTHS])), [[0], [1], [2]]),
    "in another order": (randomized([LENGTHS], 99), [[0, 1, 2]]),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(
    "options", [{"kernel_size": 8}, {"kernel_size": 7}, {"kernel_size": 6, "causal": True}, LAYERS], ids=str
)
def test_packed_or_padded_documents_get_the_same_result_as_alone(name: str, options: dict[str, Any]) -> None:
    encoding = shaken(Convolutional(WIDTH, groups=GROUPS, **options))
    positions, rows = ROWS[name]
    documents = [torch.randn(1, n, WIDTH, dtype=torch.float64, requires_grad=True) for n in LENGTHS]
    alone = [encoding.embed(x, Positions.arange(x.shape[1])) for x in documents]
    real = positions.document >= 0
    x = torch.randn(*real.shape, WIDTH, dtype=torch.float64)
    laid_out = torch.cat([documents[number][0] for row in rows for number in row])
    actual = encoding.embed(x.masked_scatter(real[..., None], laid_out), positions)
    expected = torch.cat([alone[number][0] for row in rows for number in row])
    assert_close(actual[real], expected)
    assert torch.equal(actual[~real], x[~real])
    cotangent, leaves = torch.randn_like(expected), [*documents, *encoding.parameters()]
    for mine, other in zip(
        torch.autograd.grad(actual[real], leaves, cotangent, retain_graph=True, allow_unused=True),
        torch.autograd.grad(expected, leaves, cotangent, allow_unused=True),
        strict=True,
    ):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert_close(mine, other)


def test_a_causal_convolution_sees_no_later_tokens() -> None:
    encoding = shaken(Convolutional(WIDTH, kernel_size=5, groups=GROUPS, causal=True))
    x = torch.randn(1, 9, WIDTH).double()
    whole = encoding.embed(x, Positions.arange(9))
    for seq_len in (1, 4, 8):
        assert_close(encoding.embed(x[:, :seq_len], Positions.arange(seq_len)), whole[:, :seq_len])


WRONG: dict[str, Positions] = {
    "behind a cache": Positions.after(3, 6),
    "a slice": Positions.packed([5, 4]).slice(2, 8),
    "a shard": Positions.arange(12).shard(1, 2),
    "out of order": Positions.of([0, 1, 2, 3, 5, 4]),
}


@pytest.mark.parametrize("name", WRONG)
def test_parts_of_documents_are_refused(name: str) -> None:
    with refuses(LocantError, "whole documents"):
        Convolutional(WIDTH, groups=GROUPS).embed(torch.zeros(1, 6, WIDTH), WRONG[name])


def test_widths_that_groups_do_not_share_are_refused() -> None:
    with refuses(RangeError, "groups=4"):
        Convolutional(12, groups=8)
    assert [Convolutional(width, kernel_size=1).groups for width in (768, 12, 5)] == [16, 4, 1]


def test_it_is_an_encoding_of_an_input_embedding() -> None:
    encoding = Convolutional(WIDTH, groups=GROUPS, kernel_size=4)
    embedding, ids = InputEmbedding(5, WIDTH, encoding=encoding), torch.randint(5, (2, 7))
    assert torch.equal(embedding(ids), encoding.embed(embedding.token(ids), Positions.arange(7)))
