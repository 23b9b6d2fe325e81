"""Token tables split over the ranks of a mesh, with the same number of consecutive rows on each rank.

torch's own `RowwiseParallel` only supports `nn.Embedding`. It fails if a rank does not get a row (five rows on four
ranks), and it gives every rank the gradient of the whole table. Here each rank looks up its own rows, and the results
are summed. The output has the same bits as on one rank. Each rank's part of the gradient also has the same bits, and is
as large as the rank's part of the table.

The padding row is an index into the whole table. If every rank used it as an index into its own part, another token on
each rank would get no gradient. So it is converted once, and only the rank with this row uses it.

A model may have gradients of such a table, plain gradients, and gradients on another mesh (FSDP). torch sums norms
and steps many parameters at once only if all are of one kind ("got mixed torch.Tensor and DTensor"). `clip_grad_norm_`
and `parameter_groups` separate the kinds.

The forward pass needs an all-reduce of ``batch x seq x d_model``, and the backward pass does not communicate. With a
tied head, the forward pass also needs an all-gather of the logits, and the backward pass needs an all-reduce of
``batch x seq x d_model``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from locant.arguments import Real, real
from locant.embedding import InputEmbedding, NGramEmbedding, PerLayerEmbedding, SparseTable, TokenEmbedding
from locant.embedding.table import Fill, Table
from locant.errors import LocantError, ShapeError
from locant.kernels.look_up import look_up


class VocabularyParallel(ParallelStyle):
    """Split the table of a `TokenEmbedding`, `NGramEmbedding` or `PerLayerEmbedding` by rows, for `parallelize_module`.

    Ids, input vectors, outputs and logits are the same on every rank of the mesh. The table may have any number of
    rows. Its weight becomes a `DTensor`, so that distributed checkpoints work as for any other weight. In a model that
    also has plain gradients, clip with `clip_grad_norm_` and step with `parameter_groups`. Initialize or load the table
    before the split, or after it (with the meta device and ``reset_parameters``).

    Resize a table before it is split, and reset it before anything else (such as FSDP) splits it further. A
    `SparseTable` and a table in a `TableFile` cannot be split: a split table has dense gradients, and one process at a
    time can train a file.

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
        if not isinstance(token, (NGramEmbedding, PerLayerEmbedding, TokenEmbedding)) or token.weight is None:
            expected = "a TokenEmbedding, an NGramEmbedding or a PerLayerEmbedding with a table"
            got = f"got a {type(module).__name__} to split by rows, expected {expected}"
            raise LocantError(got, "parallelize_module(model, mesh, {'embedding.token': VocabularyParallel()})")
        if isinstance(token.table, SparseTable):
            got = f"got a {type(token).__name__} with a SparseTable, but a split table has dense gradients on each rank"
            raise LocantError(got, "split it without a SparseTable or a TableFile, or leave it whole")
        if device_mesh.ndim != 1:
            got = f"got a mesh of {device_mesh.ndim} dimensions, a table is split over one"
            raise ShapeError(got, "pass the submesh for tensor parallelism, mesh['tp']")
        weight = distribute_tensor(token.weight, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
        token.weight = nn.Parameter(weight, requires_grad=token.weight.requires_grad)
        token.table = SplitTable()
        return module


class SplitTable(Table):
    """A table whose rows are split over a mesh."""

    def read(
        self, ids: Int[Tensor, "*batch"], weight: Tensor, padding_idx: int | None = None
    ) -> Float[Tensor, "*batch d_model"]:
        return _look_up_on_all_ranks(ids, weight, padding_idx)

    def logits(self, weight: Tensor, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch vocab_size"]:
        split = _require_split(weight)
        replicated = DTensor.from_local(x, split.device_mesh, [Replicate()])
        logits = cast(DTensor, F.linear(replicated, split))
        return logits.redistribute(placements=[Replicate()]).to_local()

    def initialize(self, weight: Tensor, fill: Fill, padding_idx: int | None) -> None:
        """Draw the parts of all ranks in order and keep only this rank's part.

        Ranks with the same seed get slices of one table, and their generators stay equal. If each rank drew only its
        own part, all ranks would have the same rows, as torch's split tensors on CPUs do.
        """
        part = LocalRows.of(_require_split(weight))
        for first in range(0, weight.shape[0], part.size):
            rows = fill(part.rows.new_empty(min(part.size, weight.shape[0] - first), weight.shape[1]))
            if first == part.first:
                part.rows.copy_(rows)
        if (index := part.local_index(padding_idx)) is not None:
            part.rows[index].zero_()

    def extended_copy(self, weight: Tensor, num_rows: int) -> Float[Tensor, "num_rows d_model"]:
        got = f"got {num_rows} rows for a table that is split, whose rows would move to another rank"
        raise LocantError(got, "call resize() before parallelize_module")


@dataclass(frozen=True)
class LocalRows:
    """The rows of a table on this rank. The last ranks may have fewer rows than others, or no rows."""

    first: int
    """The index of this rank's first row in the whole table."""
    size: int
    """The number of rows on each rank, except for the last ranks."""
    rows: Float[Tensor, "some_rows d_model"]

    @classmethod
    def of(cls, weight: DTensor) -> LocalRows:
        size = -(-weight.shape[0] // weight.device_mesh.size())
        first = min(weight.device_mesh.get_local_rank() * size, weight.shape[0])
        return cls(first, size, weight.to_local())

    def __len__(self) -> int:
        return self.rows.shape[0]

    def local_index(self, row: int | None) -> int | None:
        """Return the local index of a row of the whole table, or ``None`` if this rank does not have it."""
        return row - self.first if row is not None and 0 <= row - self.first < len(self) else None


def _require_split(weight: Tensor) -> DTensor:
    if not isinstance(weight, DTensor) or tuple(weight.placements) != (Shard(0),):
        placement = f"placed as {weight.placements}" if isinstance(weight, DTensor) else "of a plain tensor"
        remedy = (
            "apply VocabularyParallel() before other wrappers, and call reset_parameters() or logits() before they "
            "split the table"
        )
        raise ShapeError(f"got a weight {placement}, expected rows split over one mesh dimension", remedy)
    return weight


def _look_up_on_all_ranks(
    ids: Int[Tensor, "*batch"], weight: Tensor, padding_idx: int | None
) -> Float[Tensor, "*batch d_model"]:
    split = _require_split(weight)
    part = LocalRows.of(split)
    if len(part):
        index = ids - part.first
        is_missing = (index < 0) | (index >= len(part))
        rows = look_up(index.masked_fill(is_missing, 0), part.rows, part.local_index(padding_idx))
        rows = rows.masked_fill(is_missing[..., None], 0)
    else:
        rows = part.rows.sum(0).expand(*ids.shape, -1)  # zeros with a gradient, so that all ranks do the same step
    return DTensor.from_local(rows, split.device_mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


def parameter_groups(parameters: Iterable[Tensor] | Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split parameters into groups that an optimizer can step at once (``fused=True``, ``foreach=True``), in order.

    Parameter groups as input are split further and keep their settings.

    >>> from torch import nn
    >>> model = nn.Linear(4, 4)
    >>> optimizer = torch.optim.AdamW(parameter_groups(model.parameters()), lr=1e-3, foreach=True)
    """
    items = list(parameters)
    groups = [x for x in items if isinstance(x, dict)] or [{"params": items}]
    return [{**group, "params": some} for group in groups for some in _group(group["params"], lambda x: x.device_mesh)]


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: Real, norm_type: Real = 2.0) -> Float[Tensor, ""]:
    """Clip gradients like `torch.nn.utils.clip_grad_norm_`, for plain parameters and DTensors on several meshes.

    Scale all gradients so that their norm, over all parameters and ranks, is at most `max_norm`. Return the norm before
    clipping. Plain tensors must have the same gradient on every rank. All ranks must call this together.

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
    norms = [_norm(group, norm_type) for group in _group(gradients, lambda x: (x.device_mesh, x.placements))]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    for group in _group(parameters, lambda x: x.device_mesh):
        clip_grads_with_norm_(group, max_norm, total)
    return total


def _norm(gradients: list[Tensor], norm_type: Real) -> Tensor:
    """Return the norm over all ranks of gradients with the same placement."""
    first = gradients[0]
    if not isinstance(first, DTensor):
        return get_total_norm(gradients, norm_type)
    local = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    nonempty = [part for part in local if part.numel()]  # torch cannot compute the maximum of an empty tensor
    norm = (get_total_norm(nonempty, norm_type) if nonempty else local[0].new_zeros(())).double()
    is_maximum = math.isinf(norm_type)
    split = Partial("max" if is_maximum else "sum")
    placements = [Replicate() if placement.is_replicate() else split for placement in first.placements]
    total = DTensor.from_local(norm if is_maximum else norm**norm_type, first.device_mesh, placements).full_tensor()
    return (total if is_maximum else total ** (1 / norm_type)).to(first.dtype)


def _group(tensors: Iterable[Tensor], key: Callable[[DTensor], object]) -> list[list[Tensor]]:
    """Group tensors by the key of a DTensor, in order of first occurrence. Plain tensors are one more group."""
    groups: dict[object, list[Tensor]] = {}
    for x in tensors:
        groups.setdefault(key(x) if isinstance(x, DTensor) else None, []).append(x)
    return list(groups.values())
