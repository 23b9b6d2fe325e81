"""Entries about token tables: the padding row, resizing, rows split over ranks, gradients, weights used twice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F

from locant import RangeError, TokenEmbedding
from locant.embedding.deferred_errors import DeferredErrors
from locant.embedding.table import Fill, require_ids
from locant.parallel.vocabulary import LocalRows, SplitTable
from tests.known_bugs.exhibit import exhibit
from tests.parallel.vocabulary_ranks import CASES, RANKS, find_out, require_reset, require_the_table_of_one_rank
from tests.ranks import found_on, needs_gloo
from tests.threads import threads
from tests.tolerances import SCATTERED


class LooksUpItsPart(SplitTable):
    """What two twins have in common: every rank reads its own rows, and the parts are added up."""

    def rows(self, weight: Tensor, ids: Tensor, padding_idx: int | None, deferred: DeferredErrors) -> Tensor:
        assert isinstance(weight, DTensor)
        local, mesh = weight.to_local(), weight.device_mesh
        place = require_ids(ids, len(weight), "TokenEmbedding", "vocab_size", weight.device)
        place = place - mesh.get_local_rank() * -(-len(weight) // mesh.size())
        elsewhere = self.elsewhere(ids, (place < 0) | (place >= len(local)))
        padding = padding_idx if padding_idx is not None and padding_idx < len(local) else None
        mine = F.embedding(place.clamp(0, len(local) - 1), local, padding).masked_fill(elsewhere[..., None], 0)
        return DTensor.from_local(mine, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()

    def elsewhere(self, ids: Tensor, outside: Tensor) -> Tensor:
        return outside


class GlobalIndex(LooksUpItsPart):
    """The number of the padding row in the whole table, taken for a row of every rank's part."""


class OneMask(LooksUpItsPart):
    """The ids that are not here are remembered from the table that was read before, whatever its size."""

    remembered: tuple[Tensor, Tensor] | None = None

    def elsewhere(self, ids: Tensor, outside: Tensor) -> Tensor:
        if OneMask.remembered is None or OneMask.remembered[0] is not ids:
            OneMask.remembered = ids, outside
        return OneMask.remembered[1]


class ClearsACopy(SplitTable):
    """The padding row is cleared in what indexing returns, which of a split tensor is a copy."""

    def initialize(self, weight: Tensor, fill: Fill, padding_idx: int | None) -> None:
        super().initialize(weight, fill, None)
        if padding_idx is not None:
            weight[padding_idx].zero_()


class DrawsAlike(SplitTable):
    """Every rank draws its own part; with one seed, and on CPUs, all get the same rows."""

    def initialize(self, weight: Tensor, fill: Fill, padding_idx: int | None) -> None:
        assert isinstance(weight, DTensor)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it may not be complete, and goes on
            fill(weight)
        part = LocalRows.of(weight)
        if (place := part.local_index(padding_idx)) is not None:
            part.rows[place].zero_()


@pytest.mark.slow  # four processes
@needs_gloo
def test_82_a_split_table_is_the_table_of_one_rank() -> None:
    """The padding row and rows split over ranks go wrong.

    pytorch/pytorch#6411, pytorch/torchtitan#4637, NVIDIA-NeMo/Automodel#1675, pytorch/pytorch#131264,
    facebookresearch/fairseq#4633: The number of the padding row in the whole table was used for a row of every rank's
    part, so unrelated tokens got no gradient. Elsewhere the padding row was initialised again, or a resize lost old
    rows.

    Check: Compare every row of the table before and after a reset, a resize and a split.

    Test: four processes, bit for bit: outputs, gradients, a step, the saved state, a reset; padding rows and resizing.
    Here on four ranks; every other number of them in `tests/parallel/test_vocabulary.py`.
    """
    kinds = [SplitTable, GlobalIndex, OneMask, ClearsACopy, DrawsAlike]
    found = found_on(RANKS, find_out, kinds, [case for case in CASES if case[:2] == (RANKS, 7)])
    same, reset = (partial(check, found) for check in (require_the_table_of_one_rank, require_reset))
    exhibit(same, SplitTable, twin=GlobalIndex, because=r"\['gradient of small.weight', .*\] differ from those")
    exhibit(same, SplitTable, twin=OneMask, because=r"\['large', .*\] differ from those")
    exhibit(reset, SplitTable, twin=ClearsACopy, because=r"rows \[\] are zeros, not \[[0-9]\]")
    exhibit(reset, SplitTable, twin=DrawsAlike, because="only [0-9] rows are different")


Tables = Callable[..., TokenEmbedding]


class ClearsAll(TokenEmbedding):
    """No padding row is `None`, and indexing with `None` gives all rows."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        with torch.no_grad():
            self.weight[self.padding_idx].zero_()


class DrawnAgain(TokenEmbedding):
    """The padding row is cleared by the constructor alone."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


class GetsAGradient(TokenEmbedding):
    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


def test_82_one_row_is_padding_or_none_is() -> None:
    """pytorch/pytorch#6411 and #6495, facebookresearch/fairseq#4633 and #4076: the padding row.

    It was drawn like all others when weights were initialised; without one, all rows were cleared.
    """

    def check(build: Tables) -> None:
        for padding_idx in (None, 0, 3, 6, -1):
            table = build(7, 4, padding_idx=padding_idx)
            expected = [] if padding_idx is None else [padding_idx % 7]
            for when in ("built", "reset"):
                zeros = (table.weight == 0).all(1).nonzero().flatten().tolist()
                assert zeros == expected, f"padding_idx={padding_idx}, {when}: rows {zeros} are zeros, not {expected}"
                table.reset_parameters()
            out = table(torch.arange(7))
            out.backward(torch.rand_like(out) + 1)
            assert table.weight.grad is not None
            idle = (table.weight.grad == 0).all(1).nonzero().flatten().tolist()
            assert idle == expected, f"padding_idx={padding_idx}: rows {idle} get no gradient, not {expected}"

    exhibit(
        check, TokenEmbedding, twin=ClearsAll, because=r"padding_idx=None, built: rows \[0, .*6\] are zeros, not \[\]"
    )
    exhibit(check, TokenEmbedding, twin=DrawnAgain, because=r"padding_idx=0, built: rows \[\] are zeros, not \[0\]")
    exhibit(check, TokenEmbedding, twin=GetsAGradient, because=r"padding_idx=0: rows \[\] get no gradient, not \[0\]")


class Initialises(TokenEmbedding):
    """The larger table is a new one, into which old rows are copied before it is initialised."""

    def resize(self, vocab_size: int) -> None:
        super().resize(vocab_size)
        self.reset_parameters()


class Shrinks(TokenEmbedding):
    """The table has as many rows as the tokenizer has tokens, also where it had been padded to more."""

    def resize(self, vocab_size: int) -> None:
        with torch.no_grad():
            rows = torch.randn(vocab_size, self.d_model, dtype=self.weight.dtype)
            kept = min(vocab_size, self.vocab_size)
            rows[:kept] = self.weight[:kept]
        self.weight = nn.Parameter(rows)


def test_82_a_resize_keeps_every_old_row_and_cuts_none() -> None:
    """pytorch/pytorch#6411, unslothai/unsloth-zoo#923, huggingface/transformers#35141 and #45079.

    And vllm-project/vllm#20843: old rows were initialised again, or a table was cut that had been padded to more rows
    than the tokenizer has tokens.
    """

    def keeps(build: Tables) -> None:
        table = build(7, 6, padding_idx=0)
        old = table.weight.detach().clone()
        table.resize(8)
        assert torch.equal(table.weight[:7], old), "old rows are others"
        assert table.weight[7].all(), "the new row is zeros"

    def cuts_nothing(build: Tables) -> None:
        table = build(64, 4)  # padded from 50
        with suppress(RangeError):
            table.resize(50)
        assert table.vocab_size == 64, f"the table has {table.vocab_size} rows left"

    exhibit(keeps, TokenEmbedding, twin=Initialises, because="old rows are others")
    exhibit(cuts_nothing, TokenEmbedding, twin=Shrinks, because="the table has 50 rows left")


class AsAtomicsDo(torch.autograd.Function):
    """The gradients of one row are added up in the order in which they happen to arrive."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        ids, grad = ctx.saved_tensors[0].flatten(), grads[0].flatten(0, -2)
        arrival = torch.randperm(len(ids))
        return None, grad.new_zeros(ctx.shape).index_add_(0, ids[arrival], grad[arrival])


class Atomic(TokenEmbedding):
    def forward(self, ids: Tensor) -> Tensor:
        return AsAtomicsDo.apply(ids, self.weight)  # type: ignore[no-any-return]


def test_83_the_gradient_is_the_same_bits_every_time() -> None:
    """Gradients of an embedding differ between runs, and tied weights are lost.

    PaddlePaddle/Paddle#50245, pytorch/pytorch#102628, #187682 and #172454: If many tokens have one id, a GPU adds their
    gradients with atomics in any order, so results differ between runs. Elsewhere one of two tied weights was missing
    from the file, and random after loading.

    Check: Run one backward pass twice and compare `weight.grad` with `torch.equal`.

    Test: backward passes on one thread and on two; on a GPU it is not shown. One storage, no two names for it. Here a
    few hot ids, on one thread and on two.
    """
    ids = torch.randint(3, (8, 512))
    ids[torch.rand(8, 512) < 0.05] = 49
    cotangent = torch.randn(8, 512, 16)

    def check(build: Tables) -> None:
        torch.manual_seed(0)
        table = build(50, 16, scale="sqrt_d_model")
        first = None
        for count in (1, 2):
            with threads(count):
                for run in range(5):
                    (grad,) = torch.autograd.grad(table(ids), table.weight, cotangent)
                    first = grad if first is None else first
                    assert torch.equal(grad, first), f"pass {run} on {count} threads has another gradient"
        assert first is not None
        truth = torch.zeros(50, 16, dtype=torch.float64).index_add_(0, ids.flatten(), cotangent.flatten(0, 1).double())
        assert torch.allclose(first.double(), truth * 4, **SCATTERED)

    exhibit(check, TokenEmbedding, twin=Atomic, because="pass 1 on 1 threads has another gradient")


class OneWeight(nn.Module):
    """The head has no parameter of its own, so that there is nothing to tie, to miss or to tie again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(11, 8)
        self.tie()

    def tie(self) -> None:
        self.head = self.embedding.logits


class OwnHead(nn.Module):
    """A head with a parameter of its own, which is tied to the table by whoever remembers to do so."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = TokenEmbedding(11, 8), nn.Linear(8, 11, bias=False)

    def tie(self) -> None:
        self.head.weight = self.embedding.weight


@torch.no_grad()
def test_83_a_weight_that_is_used_twice_comes_back_as_one(tmp_path: Path) -> None:
    """PaddlePaddle/Paddle#50245, huggingface/transformers#38870 and #43159, huggingface/safetensors#265 and #520,
    huggingface/accelerate#2875: of two tied weights one was missing from the file, and random after loading it.
    """
    path, x = tmp_path / "model.safetensors", torch.randn(3, 8)

    def check(build: type[OneWeight | OwnHead]) -> None:
        saved, model = build(), build()
        saved.tie()
        state = saved.state_dict()
        save_file({"embedding.weight": state["embedding.weight"]}, path)  # safetensors refuses one storage twice
        model.load_state_dict(load_file(path), strict=False)
        assert torch.equal(model.embedding.weight, saved.embedding.weight), "the table is not the one that was saved"
        for more in (0, 1):
            model.embedding.weight.add_(more)
            assert torch.equal(model.head(x), F.linear(x, model.embedding.weight)), "the head is not the table"

    assert list(OneWeight().state_dict()) == ["embedding.weight"]
    exhibit(check, OneWeight, twin=OwnHead, because="the head is not the table")
