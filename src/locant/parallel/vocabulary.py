"""Token tables split over the ranks of a mesh, each rank with an equal run of rows.

torch's own `RowwiseParallel` takes an `nn.Embedding` and nothing else; it fails where a rank is left without a row
(five rows on four ranks), and hands every rank the gradient of the whole table. Here each rank looks up the rows that
it has, and the parts are added up: the output is that of one rank, bit for bit, and so is each rank's part of the
gradient, which is as large as its part of the table.

The padding row is a number of the whole table. A rank that took it for a row of its own part would starve another
token on every rank, so it is translated here, once, and only the rank that has the row knows of it.

Gradients of such a table stand beside plain ones, or others on another mesh (FSDP). torch adds up norms, and steps many
parameters at once, only where all are of one kind ("got mixed torch.Tensor and DTensor"): `clip_grad_norm_` and
`parameter_groups` take them apart.

Cost: one all-reduce of ``batch x seq x d_model`` forward, none backward; for the tied head an all-gather of the logits
forward and an all-reduce of ``batch x seq x d_model`` backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from locant.arguments import Real, real
from locant.embedding import InputEmbedding, TokenEmbedding
from locant.embedding.table import DeferredErrors, Fill, Table, rows_of
from locant.errors import LocantError, ShapeError
from locant.kernels.look_up import look_up


class VocabularyParallel(ParallelStyle):
    """Splits the table of a `TokenEmbedding` by rows, for `parallelize_module`.

    Ids and vectors are the same on every rank of the mesh, and so are outputs and logits. The table may have any
    number of rows. Its weight becomes a `DTensor`, so distributed checkpoints work as for any other; gradients beside
    plain ones are clipped by `clip_grad_norm_`, and stepped in `parameter_groups`. The table is drawn or loaded before
    or after (on the meta device, and ``reset_parameters``).

    Resize a table before it is split, and reset it before anything else (such as FSDP) splits it further.

    >>> import torch
    >>> from torch import distributed as dist
    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    >>> model = nn.Sequential(TokenEmbedding(50_257, 8))
    >>> _ = parallelize_module(model, mesh, {"0": VocabularyParallel()})
    >>> model(torch.tensor([[1, 50_256]])).shape, model[0].weight.placements
    (torch.Size([1, 2, 8]), (Shard(dim=0),))
    >>> dist.destroy_process_group()
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        token = module.token if isinstance(module, InputEmbedding) else module
        if not isinstance(token, TokenEmbedding):
            got = f"got a {type(module).__name__} to split by rows, expected a TokenEmbedding"
            raise LocantError(got, "parallelize_module(model, mesh, {'embedding.token': VocabularyParallel()})")
        if device_mesh.ndim != 1:
            got = f"got a mesh of {device_mesh.ndim} dimensions, a table is split over one"
            raise ShapeError(got, "the part for tensor parallelism, mesh['tp']")
        weight = distribute_tensor(token.weight, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
        token.weight = nn.Parameter(weight, requires_grad=token.weight.requires_grad)
        token.table = SplitTable()
        return module


class SplitTable(Table):
    """Reads and writes a table whose rows are split over a mesh."""

    def rows(
        self, weight: Tensor, ids: Integer[Tensor, "*batch"], padding_idx: int | None, deferred: DeferredErrors
    ) -> Float[Tensor, "*batch d_model"]:
        return rows_of(ids, weight, "TokenEmbedding", "vocab_size", deferred, padding_idx, read=_rows_of_all_ranks)

    def logits(self, weight: Tensor, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch vocab_size"]:
        split = _split(weight)
        everywhere = DTensor.from_local(x, split.device_mesh, [Replicate()])
        logits = cast(DTensor, F.linear(everywhere, split))
        return logits.redistribute(placements=[Replicate()]).to_local()

    def draw(self, weight: Tensor, fill: Fill, padding_idx: int | None) -> None:
        """Draws the parts of all ranks in turn and keeps its own.

        Ranks with one seed end with slices of one table and go on in step; a draw for each part alone would give them
        all the same rows, as torch does for split tensors on CPUs.
        """
        part = LocalRows.of(_split(weight))
        for first in range(0, weight.shape[0], part.size):
            drawn = fill(part.rows.new_empty(min(part.size, weight.shape[0] - first), weight.shape[1]))
            if first == part.first:
                part.rows.copy_(drawn)
        if (place := part.place(padding_idx)) is not None:
            part.rows[place].zero_()

    def longer(self, weight: Tensor, num_rows: int) -> Float[Tensor, "num_rows d_model"]:
        got = f"got {num_rows} rows for a table that is split, whose rows would change their rank"
        raise LocantError(got, "resize() before parallelize_module")


@dataclass(frozen=True)
class LocalRows:
    """The rows of a table that are on this rank; the last ranks may have fewer than others, or none."""

    first: int
    """The number, in the whole table, of the first row here."""
    size: int
    """How many rows every part has, but for the last ones."""
    rows: Float[Tensor, "some_rows d_model"]

    @classmethod
    def of(cls, weight: DTensor) -> LocalRows:
        size = -(-weight.shape[0] // weight.device_mesh.size())
        first = min(weight.device_mesh.get_local_rank() * size, weight.shape[0])
        return cls(first, size, weight.to_local())

    def __len__(self) -> int:
        return self.rows.shape[0]

    def place(self, row: int | None) -> int | None:
        """Where a row of the whole table is here, if it is."""
        return row - self.first if row is not None and 0 <= row - self.first < len(self) else None


def _split(weight: Tensor) -> DTensor:
    if not isinstance(weight, DTensor) or tuple(weight.placements) != (Shard(0),):
        where = f"placed as {weight.placements}" if isinstance(weight, DTensor) else "of a plain tensor"
        remedy = (
            "VocabularyParallel() before other wrappers, and reset_parameters() or logits() where they have it whole"
        )
        raise ShapeError(f"got a weight {where}, expected rows split over one mesh dimension", remedy)
    return weight


def _rows_of_all_ranks(
    ids: Int[Tensor, "*batch"], weight: Tensor, padding_idx: int | None
) -> Float[Tensor, "*batch d_model"]:
    split = _split(weight)
    part = LocalRows.of(split)
    if len(part):
        place = ids - part.first
        elsewhere = (place < 0) | (place >= len(part))
        rows = look_up(place.masked_fill(elsewhere, 0), part.rows, part.place(padding_idx))
        rows = rows.masked_fill(elsewhere[..., None], 0)
    else:
        rows = part.rows.sum(0).expand(*ids.shape, -1)  # zeros which keep a gradient, so that all ranks step alike
    return DTensor.from_local(rows, split.device_mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


def parameter_groups(parameters: Iterable[Tensor] | Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parameters in groups that an optimizer can step at once (``fused=True``, ``foreach=True``), in their order.

    Groups that are given are divided, and keep their settings.

    >>> from torch import nn
    >>> model = nn.Linear(4, 4)
    >>> optimizer = torch.optim.AdamW(parameter_groups(model.parameters()), lr=1e-3, foreach=True)
    """
    given = list(parameters)
    groups = [x for x in given if isinstance(x, dict)] or [{"params": given}]
    return [{**group, "params": some} for group in groups for some in _apart(group["params"], lambda x: x.device_mesh)]


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: Real, norm_type: Real = 2.0) -> Float[Tensor, ""]:
    """`torch.nn.utils.clip_grad_norm_`, also where plain parameters and DTensors on several meshes meet.

    Scales all gradients so that their norm, over all parameters and ranks, is at most `max_norm`; returns the norm.
    What is not a DTensor has to have the same gradient on every rank. All ranks call it together.

    >>> from torch import nn
    >>> model = nn.Linear(4, 1, bias=False)
    >>> model.weight.grad = torch.tensor([[0.0, 3.0, 4.0, 0.0]])
    >>> clip_grad_norm_(model.parameters(), 1.0)
    tensor(5.)
    >>> model.weight.grad
    tensor([[0.0000, 0.6000, 0.8000, 0.0000]])
    """
    max_norm = real("max_norm", max_norm, low=0, remedy="max_norm=1.0")
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [_norm(some, norm_type) for some in _apart(gradients, lambda x: (x.device_mesh, x.placements))]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    for group in _apart(parameters, lambda x: x.device_mesh):
        clip_grads_with_norm_(group, max_norm, total)
    return total


def _norm(gradients: list[Tensor], norm_type: Real) -> Tensor:
    """Of gradients that are placed alike: the part of this rank, added to those of the others."""
    first = gradients[0]
    if not isinstance(first, DTensor):
        return get_total_norm(gradients, norm_type)
    here = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    filled = [part for part in here if part.numel()]  # torch knows no largest of none
    norm = (get_total_norm(filled, norm_type) if filled else here[0].new_zeros(())).double()
    largest = math.isinf(norm_type)
    split = Partial("max" if largest else "sum")
    placements = [Replicate() if placement.is_replicate() else split for placement in first.placements]
    whole = DTensor.from_local(norm if largest else norm**norm_type, first.device_mesh, placements).full_tensor()
    return (whole if largest else whole ** (1 / norm_type)).to(first.dtype)


def _apart(tensors: Iterable[Tensor], place: Callable[[DTensor], object]) -> list[list[Tensor]]:
    """Those of one place in one list, in the order of the first of each; plain tensors have a place of their own."""
    lists: dict[object, list[Tensor]] = {}
    for x in tensors:
        lists.setdefault(place(x) if isinstance(x, DTensor) else None, []).append(x)
    return list(lists.values())
