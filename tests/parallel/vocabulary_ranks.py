"""What four processes find out about tables whose rows are split over one, two, three and four of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

from locant import RangeError, TokenEmbedding
from locant.embedding.table import Table
from locant.parallel import VocabularyParallel
from tests.tolerances import LOGITS

RANKS = 4
D_MODEL = 3
Case = tuple[int, int, int | None]
Kind = type[Table]
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


def _split(model: TwoTables, mesh: DeviceMesh, kind: Kind) -> TwoTables:
    parallelize_module(model, mesh, {"small": VocabularyParallel(), "large": VocabularyParallel()})
    model.small.table, model.large.table = kind(), kind()
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


def _loaded(mesh: DeviceMesh, kind: Kind, expected: dict[str, Tensor], case: Case) -> bool:
    """Whether the checkpoint of one rank, loaded into a split model, is read back as it was."""
    model = _split(_built(*case[1:]), mesh, kind)
    state = {name.removeprefix("saved "): value for name, value in expected.items() if name.startswith("saved ")}
    set_model_state_dict(model, dict(state), options=FULL)
    return not _unlike(state, get_model_state_dict(model, options=FULL))  # type: ignore[arg-type]


def _reset(mesh: DeviceMesh, kind: Kind, case: Case) -> list[object]:
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


def _one_case(mesh: DeviceMesh, kind: Kind, case: Case) -> dict[str, Any]:
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


def find_out(kinds: Sequence[Kind], cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """The work of one process: by kind of table, then by case."""
    meshes = {world: DeviceMesh("cpu", torch.arange(world)) for world in range(1, RANKS + 1)}
    mine = [case for case in cases if dist.get_rank() < case[0]]
    return {kind.__name__: {str(case): _one_case(meshes[case[0]], kind, case) for case in mine} for kind in kinds}


Found = list[dict[str, dict[str, Any]]]


def _results(found: Found, kind: Kind) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    for rank, kinds in enumerate(found):
        for case in CASES:
            if (result := kinds[kind.__name__].get(str(case))) is not None:
                yield f"rank {rank} of {case[0]}, {case[1]} rows, padding row {case[2]}", case, result


def require_the_table_of_one_rank(found: Found, kind: Kind) -> None:
    """Outputs, gradients, weights after a step and the saved state, bit for bit; an id on no rank is refused."""
    assert any(result for rank in found for result in rank[kind.__name__].values())
    for what, (_, vocab_size, _), result in _results(found, kind):
        assert not result["unlike"], f"{what}: {result['unlike']} differ from those of one rank"
        assert result["in parts"], f"{what}: a gradient is larger than the part of the table"
        assert result["loaded"], f"{what}: the state of one rank does not come back"
        assert result["logits off"] <= LOGITS, f"{what}: the tied head is off by {result['logits off']:.2g}"
        assert f"got id {vocab_size} at (0, 1)" in result["refusal"], f"{what}: an id without a row is not named"


def require_reset(found: Found, kind: Kind) -> None:
    """The padding row is zeros on the rank that has it, no other row is, and no two ranks have drawn the same rows."""
    for what, (_, vocab_size, padding_idx), result in _results(found, kind):
        zeros, different = result["reset"]
        expected = [] if padding_idx is None else [padding_idx]
        assert zeros == expected, f"{what}: rows {zeros} are zeros, not {expected}"
        assert different == vocab_size, f"{what}: only {different} rows are different"
