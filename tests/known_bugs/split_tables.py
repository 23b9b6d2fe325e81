"""What four processes find out about tables whose rows are split over one, two, three and four of them.

The processes are started by the tests.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

from locant import RangeError, TokenEmbedding
from locant.embedding.deferred_errors import DeferredErrors
from locant.embedding.table import Table, require_ids
from locant.parallel import VocabularyParallel
from locant.parallel.vocabulary import Part, SplitTable

__all__ = ["CASES", "RANKS", "TABLES", "find_out", "shards"]

RANKS = 4
D_MODEL = 3
Case = tuple[int, int, int | None]
FULL = StateDictOptions(full_state_dict=True)


def shards(vocab_size: int, world: int) -> list[range]:
    """The rows of every rank: equal runs, the last ones shorter or empty."""
    size = -(-vocab_size // world)
    ends = [min(rank * size, vocab_size) for rank in range(world + 1)]
    return [range(ends[rank], ends[rank + 1]) for rank in range(world)]


def _cases() -> Iterator[Case]:
    for world, vocab_size in ((1, 7), (2, 7), (3, 7), (4, 7), (4, 5)):  # of five rows, the fourth rank has none
        yield world, vocab_size, None
        for rows in shards(vocab_size, world):
            yield from ((world, vocab_size, row) for row in rows[-1:])


CASES = list(_cases())
"""Number of ranks, rows, and the padding row: none, or the last one of each rank."""


class GlobalIndex(SplitTable):
    """The number of the padding row in the whole table, taken for a row of every rank's part."""

    def rows(self, weight: Tensor, ids: Tensor, padding_idx: int | None, deferred: DeferredErrors) -> Tensor:
        assert isinstance(weight, DTensor)
        ids = require_ids(ids, len(weight), "TokenEmbedding", "vocab_size", weight.device)
        local, mesh = weight.to_local(), weight.device_mesh
        if not len(local):
            return super().rows(weight, ids, padding_idx, deferred)
        place = ids - mesh.get_local_rank() * -(-len(weight) // mesh.size())
        elsewhere = (place < 0) | (place >= len(local))
        padding = padding_idx if padding_idx is not None and padding_idx < len(local) else None
        mine = F.embedding(place.masked_fill(elsewhere, 0), local, padding).masked_fill(elsewhere[..., None], 0)
        return DTensor.from_local(mine, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


class ClearsACopy(SplitTable):
    """The padding row is cleared in what indexing returns, which of a split tensor is a copy."""

    def draw(self, weight: Tensor, std: float, padding_idx: int | None) -> None:
        super().draw(weight, std, None)
        if padding_idx is not None:
            weight[padding_idx].zero_()


class DrawsAlike(SplitTable):
    """Every rank draws its own part; with one seed, and on CPUs, all get the same rows."""

    def draw(self, weight: Tensor, std: float, padding_idx: int | None) -> None:
        assert isinstance(weight, DTensor)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it may not be complete, and goes on
            weight.normal_(std=std)
        part = Part.of(weight)
        if (place := part.place(padding_idx)) is not None:
            part.rows[place].zero_()


class OneMask(SplitTable):
    """The ids that are not here are remembered from the table that was read before, whatever its size."""

    remembered: Tensor | None = None

    def rows(self, weight: Tensor, ids: Tensor, padding_idx: int | None, deferred: DeferredErrors) -> Tensor:
        assert isinstance(weight, DTensor)
        ids = require_ids(ids, len(weight), "TokenEmbedding", "vocab_size", weight.device)
        local, mesh = weight.to_local(), weight.device_mesh
        place = ids - mesh.get_local_rank() * -(-len(weight) // mesh.size())
        if OneMask.remembered is None:
            OneMask.remembered = (place < 0) | (place >= len(local))
        if not len(local):
            return super().rows(weight, ids, padding_idx, deferred)
        mine = F.embedding(place.clamp(0, len(local) - 1), local).masked_fill(OneMask.remembered[..., None], 0)
        return DTensor.from_local(mine, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


TABLES: dict[str, Callable[[], Table]] = {
    "ours": SplitTable,
    "twin: global index": GlobalIndex,
    "twin: clears a copy": ClearsACopy,
    "twin: draws alike": DrawsAlike,
    "twin: one mask": OneMask,
}


class TwoTables(nn.Module):
    """Two tables of different sizes, read with the same ids."""

    def __init__(self, vocab_size: int, padding_idx: int | None) -> None:
        super().__init__()
        self.small = TokenEmbedding(vocab_size, D_MODEL, padding_idx=padding_idx)
        self.large = TokenEmbedding(2 * vocab_size + 1, D_MODEL)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.small(ids), self.large(ids)


def _built(vocab_size: int, padding_idx: int | None) -> TwoTables:
    torch.manual_seed(0)
    return TwoTables(vocab_size, padding_idx)


def _split(model: TwoTables, mesh: DeviceMesh, kind: str) -> TwoTables:
    OneMask.remembered = None
    parallelize_module(model, mesh, {"small": VocabularyParallel(), "large": VocabularyParallel()})
    model.small.table, model.large.table = TABLES[kind](), TABLES[kind]()
    return model


def _trained(model: TwoTables, ids: Tensor) -> dict[str, Tensor]:
    """Outputs, gradients, and the weights after a step; every rank sees the same numbers."""
    outs = dict(zip(("small", "large"), model(ids), strict=True))
    generator = torch.Generator().manual_seed(1)
    loss = sum((out * torch.randn(out.shape, generator=generator)).sum() for out in outs.values())
    loss.backward()  # type: ignore[union-attr]
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    grads = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    saved = get_model_state_dict(model, options=FULL)
    state = {f"saved {name}": value for name, value in saved.items()}
    return {**outs, **{name: _whole(value) for name, value in grads.items()}, **state}  # type: ignore[arg-type]


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _in_parts(model: TwoTables) -> bool:
    """Whether every gradient is as large here as the part of the weight that is here."""
    parameters = list(model.parameters())
    return all(p.grad.to_local().shape == p.to_local().shape for p in parameters)  # type: ignore[union-attr]


def _unlike(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    assert expected.keys() == found.keys(), f"{sorted(expected)} against {sorted(found)}"
    return [name for name, value in expected.items() if not torch.equal(value, found[name])]


def _loaded(mesh: DeviceMesh, kind: str, expected: dict[str, Tensor], case: Case) -> bool:
    """Whether the checkpoint of one rank, loaded into a split model, is read back as it was."""
    model = _split(_built(*case[1:]), mesh, kind)
    state = {name.removeprefix("saved "): value for name, value in expected.items() if name.startswith("saved ")}
    set_model_state_dict(model, dict(state), options=FULL)
    return not _unlike(state, get_model_state_dict(model, options=FULL))  # type: ignore[arg-type]


def _reset(mesh: DeviceMesh, kind: str, case: Case) -> list[object]:
    """After a build on the meta device and a reset: which rows are zeros, and how many different ones there are."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = _built(*case[1:])
    _split(model, mesh, kind).to_empty(device="cpu")
    model.small.reset_parameters()
    weight = _whole(model.small.weight.detach())
    return [(weight == 0).all(1).nonzero().flatten().tolist(), len(weight.unique(dim=0))]


def _logits_off(model: TwoTables, mesh: DeviceMesh) -> float:
    """How far logits and both of their gradients are from those of one rank."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 5, D_MODEL, generator=generator)
    cotangent = torch.randn(2, 5, model.large.vocab_size, generator=generator)
    whole = _whole(model.large.weight.detach()).requires_grad_()
    alone, x_alone = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = F.linear(x_alone, whole)
    expected.backward(cotangent)
    model.zero_grad()
    found = model.large.logits(alone)
    found.backward(cotangent)
    pairs = [(found, expected), (alone.grad, x_alone.grad), (_whole(model.large.weight.grad), whole.grad)]  # type: ignore[arg-type]
    return max(float((one - other).detach().abs().max()) for one, other in pairs)  # type: ignore[operator]


def _refusal(model: TwoTables) -> str:
    """What an id without a row is told; the next call has to work."""
    try:
        model(torch.tensor([[0, model.small.vocab_size]]))
    except RangeError as error:
        model(torch.zeros(1, 2, dtype=torch.long))
        return str(error)
    return "nothing"


def _one_case(mesh: DeviceMesh, kind: str, case: Case) -> dict[str, Any]:
    ids = torch.arange(3 * case[1]).view(3, -1) % case[1]
    expected = _trained(_built(*case[1:]), ids)
    model = _split(_built(*case[1:]), mesh, kind)
    return {
        "unlike": _unlike(expected, _trained(model, ids)),
        "in parts": _in_parts(model),
        "loaded": _loaded(mesh, kind, expected, case),
        "reset": _reset(mesh, kind, case),
        "logits off": _logits_off(model, mesh),
        "refusal": _refusal(model),
    }


def find_out() -> dict[str, dict[str, Any]]:
    """The work of one process: by table, then by case."""
    meshes = {world: DeviceMesh("cpu", torch.arange(world)) for world in range(1, RANKS + 1)}
    found: dict[str, dict[str, Any]] = {kind: {} for kind in TABLES}
    for kind, results in found.items():
        for case in CASES if kind == "ours" else [case for case in CASES if case[:2] == (RANKS, 7)]:
            if dist.get_rank() < case[0]:
                results[str(case)] = _one_case(meshes[case[0]], kind, case)
    return found
