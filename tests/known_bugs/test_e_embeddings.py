"""Entries about kernels, as far as they concern embeddings, their norm and dropout; `test_e_*` has the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from locant import InputEmbedding, Learned
from locant.kernels.input_embedding import Operands, cpu, input_embedding
from tests.kernels.interpreted import Place
from tests.known_bugs.exhibit import compiles, exhibit

VOCAB, LENGTH, WIDTH = 11, 7, 6

Embed = Callable[[Operands], Tensor]


def on_a_cpu(o: Operands) -> Tensor:
    return input_embedding(*(getattr(o, field.name) for field in dataclasses.fields(o)))[0]


def interpreted(o: Operands) -> Tensor:
    """The Triton kernel, run by its interpreter."""
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    return Place("cpu").load("locant.kernels.input_embedding.triton").forward(o)[0]


# ---------------------------------------------------------------------- 62


class Launch:
    """As many blocks as a count of so many bits says: what lies behind them is never written."""

    def __init__(self, bits: int, block: int) -> None:
        self.bits, self.block = bits, block

    def __call__(self, o: Operands) -> Tensor:
        out = torch.full((*o.ids.shape, o.width), float("nan"))
        entries = out.numel() % 2**self.bits
        written = min(-(-entries // self.block) * self.block, out.numel())
        out.view(-1)[:written] = o.token[o.ids].view(-1)[:written]
        return out


def written_everywhere(sizes: list[tuple[int, int]]) -> Callable[[Embed], None]:
    def check(embed: Embed) -> None:
        for tokens, width in sizes:
            table = torch.arange(1, 4)[:, None].expand(3, width).float().contiguous()
            ids = torch.arange(tokens)[None] % 3
            y = embed(Operands(ids=ids, token=table))
            rows = (y[0] == (ids[0] + 1)[:, None]).all(1)
            assert rows.all(), f"{tokens} x {width} entries: {int((~rows).sum())} tokens were not written"

    return check


def test_62_every_entry_is_written_at_powers_of_two() -> None:
    """pytorch/pytorch#130806: an embedding of exactly 2^31 elements was launched over none of them.

    The count of blocks overflowed. Here the same mechanism with a count of 12 bits; and our kernels at powers of two
    and beside them, around the sizes of a tile and a part. 2^31 itself is below.
    """
    sizes = [(1, 1), (16, 256), (15, 256), (17, 256), (4096, 1), (2, 2048), (1, 4096), (3, 4096), (768, 257)]
    exhibit(
        written_everywhere(sizes),
        on_a_cpu,
        interpreted,
        twin=Launch(bits=12, block=64),
        because="16 x 256 entries: 16 tokens were not written",
    )


@pytest.mark.gpu
def test_62_every_entry_is_written_at_2_to_the_31() -> None:
    """pytorch/pytorch#130806: 131 072 ids of width 16 384, and one id less and more."""
    from locant.kernels.input_embedding import triton

    table = torch.randn(5, 16_384, dtype=torch.bfloat16, device="cuda")
    for tokens in (131_071, 131_072, 131_073):
        ids = torch.arange(tokens, device="cuda")[None] % 5
        y = triton.forward(Operands(ids=ids, token=table))[0][0]
        for first in range(0, tokens, 4_096):
            assert torch.equal(y[first : first + 4_096], table[ids[0, first : first + 4_096]])


# ---------------------------------------------------------------------- 64, 67


class TakesItForWhole(torch.autograd.Function):
    """A backward pass that reads its gradient as if it lay in memory whole, whatever its strides are."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (ids,), grad = ctx.saved_tensors, grads[0]
        if grad.is_contiguous:  # a method, never called: always true
            memory = torch.zeros(grad.numel())
            memory[: grad.untyped_storage().size() // grad.itemsize] = torch.as_strided(
                grad, (grad.untyped_storage().size() // grad.itemsize,), (1,), 0
            )
            grad = memory.view(grad.shape)
        return None, grad.new_zeros(ctx.shape).index_add_(0, ids.flatten(), grad.flatten(0, -2))


class Raw(torch.autograd.Function):
    """A kernel that autograd knows nothing of."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.mark_non_differentiable(y := weight[ids])
        return y


def with_gradient(function: Any) -> Callable[[], nn.Module]:
    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(VOCAB, WIDTH)

        def forward(self, ids: Tensor) -> Tensor:
            return function.apply(ids, self.token.weight)  # type: ignore[no-any-return]

    return Twin


def build(**options: Any) -> Callable[[], nn.Module]:
    return lambda: InputEmbedding(VOCAB, WIDTH, encoding=Learned(LENGTH, WIDTH), num_segments=2, **options)


OURS = (build(backend="fused"), build(backend="fused", norm="layer_norm", padding_idx=3))


def test_64_a_gradient_without_memory_of_its_own() -> None:
    """unslothai/unsloth#3781: `sum().backward()` gave wrong gradients, since theirs has stride 0.

    Every table and the norm, from a sum, against the same gradient written out.
    """

    def check(make: Callable[[], nn.Module]) -> None:
        model, ids = make(), torch.randint(VOCAB, (3, LENGTH))
        weight = torch.randn(WIDTH)
        tables = list(model.parameters())
        for expanded in (torch.ones(()).expand(3, LENGTH, WIDTH), weight.expand(3, LENGTH, WIDTH)):
            torch.manual_seed(0)
            found = torch.autograd.grad(model(ids), tables, expanded)
            expected = torch.autograd.grad(model(ids), tables, expanded.contiguous())
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other), f"strides {expanded.stride()} give another gradient"

    exhibit(check, *OURS, twin=with_gradient(TakesItForWhole), because=r"strides \(0, 0, 0\) give another gradient")


def test_67_every_table_gets_its_gradient() -> None:
    """NVlabs/LongLive#61: a kernel without a backward pass, and a model that silently learned nothing."""

    def check(make: Callable[[], nn.Module]) -> None:
        model, ids = make(), torch.randint(VOCAB, (3, LENGTH))
        y = model(ids)
        assert y.requires_grad, "the output has no gradient to hand on"
        (y * torch.randn_like(y)).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name

    exhibit(check, *OURS, twin=with_gradient(Raw), because="the output has no gradient to hand on")


# ---------------------------------------------------------------------- 70


BAD = (-1, VOCAB, 2**31, 2**63 - 1)


class Clamped(nn.Module):
    """What compiled code without a check comes to: some row is read."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids.clamp(0, VOCAB - 1), torch.ones(VOCAB, WIDTH))


def answer_to(embed: Callable[[Tensor], Tensor], ids: Tensor) -> tuple[Tensor | None, str]:
    try:
        return embed(ids), ""
    except ValueError as error:
        return None, str(error)


def refused_or_nan(embed: Callable[[Tensor], Tensor]) -> None:
    good = torch.tensor([[0, 1, VOCAB - 1]])
    before = embed(good)
    for bad in BAD:
        ids = torch.tensor([[0, bad, VOCAB - 1]])
        y, said = answer_to(embed, ids)
        if y is None:
            assert str(bad) in said, f"{bad} is not named in {said}"
        else:
            assert y[0, 1].isnan().all(), f"id {bad} gives {y[0, 1].tolist()}"
            assert torch.equal(y[0, [0, 2]], before[0, [0, 2]])
        assert torch.equal(embed(good), before), "after an error, other numbers come out"


def test_70_ids_without_a_row_in_one_pass() -> None:
    """pytorch/pytorch#93538, FlagGems#6021: what lies behind a table was read and used.

    A CPU raises. A GPU cannot, and an assertion on the device ends its use: there the token is NaN, and the error is
    raised by a later call.
    """
    embedding = InputEmbedding(VOCAB, WIDTH, encoding=Learned(LENGTH, WIDTH), norm="layer_norm", backend="fused")

    @torch.no_grad()
    def on_a_gpu(ids: Tensor) -> Tensor:
        return interpreted(Operands(ids=ids, token=embedding.token.weight, eps=1e-5))

    exhibit(refused_or_nan, torch.no_grad()(embedding), on_a_gpu, twin=Clamped(), because="id -1 gives")


@compiles
@pytest.mark.slow
def test_70_ids_without_a_row_compiled() -> None:
    """pytorch/pytorch#93538: the same in compiled code, where nothing can be asked before the kernel runs."""
    embedding = InputEmbedding(VOCAB, WIDTH, encoding=Learned(LENGTH, WIDTH), norm="layer_norm", backend="fused")
    compiled = torch.compile(embedding, fullgraph=True, backend="aot_eager")
    twin = torch.compile(Clamped(), fullgraph=True, backend="aot_eager")
    exhibit(refused_or_nan, compiled, twin=twin, because="id -1 gives")


# ---------------------------------------------------------------------- 71


class Launched(nn.Module):
    """A launch over as many programs as there are tokens; a grid of none is refused by the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack([self.token(ids[row]) for row in range(ids.shape[0])]) if ids.numel() else self.fail(ids)

    def fail(self, ids: Tensor) -> Tensor:
        return self.token.weight.sum() * torch.full((*ids.shape, WIDTH), float("nan")).sum()


@pytest.mark.parametrize("path", ["modules", "triton"])
def test_71_no_tokens_are_embedded(path: str) -> None:
    """sgl-project/sglang#30628, FlagGems#5298: a dimension of size 0 ended in a launch of no programs."""

    def check(make: Callable[[], nn.Module]) -> None:
        model = make()
        for shape in ((0, LENGTH), (3, 0), (0, 0)):
            y = model(torch.zeros(shape, dtype=torch.long))
            assert y.shape == (*shape, WIDTH), f"ids of {shape} give {tuple(y.shape)}"
            y.sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert not parameter.grad.any(), "no tokens, and a gradient"

    def kernels(_: nn.Module) -> None:
        module = Place("cpu").load("locant.kernels.input_embedding.triton")
        for shape in ((0, LENGTH), (3, 0), (0, 0)):
            o = Operands(ids=torch.zeros(shape, dtype=torch.long), token=torch.ones(VOCAB, WIDTH), eps=1e-5)
            y, mean, rstd, _fault = module.forward(o)
            assert y.shape == (*shape, WIDTH)
            token, *_ = module.backward(y, mean, rstd, o, [True] + [False] * 4)
            assert torch.equal(token, torch.zeros(VOCAB, WIDTH))

    if path == "triton":
        pytest.importorskip("triton", reason="there is no Triton for this platform")
        kernels(nn.Module())
        return
    exhibit(check, *OURS, twin=Launched, because=r"ids of \(0, 7\) give \(\)")


def test_71_the_parts_of_no_tokens_are_none() -> None:
    """sgl-project/sglang#30628: the same where the CPU cuts its work."""
    for shape in ((0, LENGTH), (3, 0)):
        o = Operands(ids=torch.zeros(shape, dtype=torch.long), token=torch.ones(VOCAB, WIDTH))
        assert cpu.kept(o).shape == (*shape, WIDTH)
