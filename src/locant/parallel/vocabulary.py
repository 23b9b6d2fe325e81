"""Token tables split over the ranks of a mesh, each rank with an equal run of rows.

torch's own `RowwiseParallel` takes an `nn.Embedding` and nothing else; it fails where a rank is left without a row
(five rows on four ranks), and hands every rank the gradient of the whole table. Here each rank looks up the rows that
it has, and the parts are added up: the output is that of one rank, bit for bit, and so is each rank's part of the
gradient, which is as large as its part of the table.

The padding row is a number of the whole table. A rank that took it for a row of its own part would starve another
token on every rank, so it is translated here, once, and only the rank that has the row knows of it.

Cost: one all-reduce of ``batch x seq x d_model`` forward, none backward; for the tied head an all-gather of the logits
forward and an all-reduce of ``batch x seq x d_model`` backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from locant.embedding import InputEmbedding, TokenEmbedding
from locant.embedding.deferred_errors import Asked, DeferredErrors, raises_later
from locant.embedding.table import Table, require_ids
from locant.errors import LocantError, ShapeError
from locant.kernels.input_embedding import look_up

__all__ = ["SplitTable", "VocabularyParallel"]


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
            raise LocantError(
                f"got a {type(module).__name__} to split by rows, expected a TokenEmbedding",
                "parallelize_module(model, mesh, {'embedding.token': VocabularyParallel()})",
            )
        if device_mesh.ndim != 1:
            raise ShapeError(
                f"got a mesh of {device_mesh.ndim} dimensions, a table is split over one",
                "the part for tensor parallelism, mesh['tp']",
            )
        weight = distribute_tensor(token.weight, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
        token.weight = nn.Parameter(weight, requires_grad=token.weight.requires_grad)
        token.table = SplitTable()
        return module


class SplitTable(Table):
    """Reads and writes a table whose rows are split over a mesh."""

    def rows(
        self, weight: Tensor, ids: Integer[Tensor, "*batch"], padding_idx: int | None, deferred: DeferredErrors
    ) -> Float[Tensor, "*batch d_model"]:
        later = raises_later(weight)
        if later:
            deferred.raise_arrived()
        ids = require_ids(ids, weight.shape[0], "TokenEmbedding", "vocab_size", weight.device, read=not later)
        split = _split(weight)
        mine = _rows_here(LocalRows.of(split), ids, padding_idx)
        if later:
            limit, num_rows = f"vocab_size={weight.shape[0]}", weight.shape[0]
            wrong = deferred.watch(Asked(ids=ids, layer="TokenEmbedding", limit=limit, num_rows=num_rows))
            mine = mine.masked_fill(wrong[..., None], torch.nan)
        return (
            DTensor.from_local(mine, split.device_mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()
        )

    def logits(self, weight: Tensor, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch vocab_size"]:
        split = _split(weight)
        everywhere = DTensor.from_local(x, split.device_mesh, [Replicate()])
        logits = cast(DTensor, F.linear(everywhere, split))
        return logits.redistribute(placements=[Replicate()]).to_local()

    def draw(self, weight: Tensor, std: float, padding_idx: int | None) -> None:
        """Draws the parts of all ranks in turn and keeps its own.

        Ranks with one seed end with slices of one table and go on in step; a draw for each part alone would give them
        all the same rows, as torch does for split tensors on CPUs.
        """
        part = LocalRows.of(_split(weight))
        for first in range(0, weight.shape[0], part.size):
            drawn = part.rows.new_empty(min(part.size, weight.shape[0] - first), weight.shape[1]).normal_(std=std)
            if first == part.first:
                part.rows.copy_(drawn)
        if (place := part.place(padding_idx)) is not None:
            part.rows[place].zero_()

    def longer(self, weight: Tensor, num_rows: int) -> Float[Tensor, "num_rows d_model"]:
        raise LocantError(
            f"got {num_rows} rows for a table that is split, whose rows would change their rank",
            "resize() before parallelize_module",
        )


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
        got = f"placed as {weight.placements}" if isinstance(weight, DTensor) else "of a plain tensor"
        raise ShapeError(
            f"got a weight {got}, expected rows split over one mesh dimension",
            "VocabularyParallel() before other wrappers, and reset_parameters() or logits() where they have it whole",
        )
    return weight


def _rows_here(part: LocalRows, ids: Int[Tensor, "*batch"], padding_idx: int | None) -> Float[Tensor, "*batch d_model"]:
    """The row of every id that is here, zeros for the others."""
    if not len(part):
        return part.rows.sum(0).expand(*ids.shape, -1)  # zeros which keep a gradient, so that all ranks step alike
    place = ids - part.first
    elsewhere = (place < 0) | (place >= len(part))
    rows = look_up(place.masked_fill(elsewhere, 0), part.rows, part.place(padding_idx))
    return rows.masked_fill(elsewhere[..., None], 0)
