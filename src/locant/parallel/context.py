"""Context parallelism: attention over a row whose tokens are spread over the ranks of a group.

Each rank calls `attend` with the queries, keys and values of its own tokens and with their positions
(`Positions.shard`). These tokens attend to the whole row. The rank gets their outputs and its part of every gradient.
Nothing else in a model changes: parts that act on one token at a time (embeddings, rotation, norms, linear layers) need
only the positions of the shard.

| method | stores, on each rank | sends, in each layer |
|---|---|---|
| ``"gather"`` | keys and values of the whole row | an all-gather of them, a reduce-scatter of their gradients |
| ``"ring"`` | keys and values of two shards | the same amount, one shard at a time, during attention to another shard |
| ``"ulysses"`` | some heads of the whole row | an all-to-all of queries, keys, values and outputs |

Sources: Ring Attention (arXiv:2310.01889), DeepSpeed-Ulysses (arXiv:2309.14509), striped and zigzag shards
(arXiv:2311.09431). Llama 3 trains with the gather (arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from locant.arguments import Real, one_of, short_repr, whole
from locant.attention.attend import attend as attend_here
from locant.attention.choice import BackendName
from locant.attention.inputs import check_sinks
from locant.attention.merge import merge
from locant.errors import LocantError, RangeError, ShapeError
from locant.parallel.ring import Ring, ring_attention
from locant.positions import PositionEncoding, Positions
from locant.positions.base import effective_score_bias, has_bias, has_pair_sets
from locant.positions.documents import PADDING
from locant.positions.heads import Heads
from locant.positions.positions import require_positions
from locant.positions.score_bias import ScoreBias
from locant.tensors import host_can_read

Method = Literal["gather", "ring", "ulysses"]
Group = ProcessGroup | DeviceMesh | None

SEQUENCE, HEADS = Shard(2), Shard(1)
"""The placements of ``batch heads seq head_dim`` on the ranks: split by tokens, or by heads."""


def attend(
    q: Float[Tensor, "batch heads query head_dim"],
    k: Float[Tensor, "batch kv_heads key head_dim"],
    v: Float[Tensor, "batch kv_heads key value_dim"],
    *,
    group: Group = None,
    method: Method = "gather",
    encoding: PositionEncoding | None = None,
    positions: Positions,
    k_positions: Positions | None = None,
    causal: bool = True,
    window: int | None = None,
    dropout_p: Real = 0.0,
    scale: Real | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    softcap: Real | None = None,
    backend: BackendName = "auto",
    return_lse: bool = False,
) -> Any:
    """Compute `locant.attend` over a row that is split into equal parts over the ranks of `group`.

    All ranks must call this together, with shards of the same length. On each rank, gradients of parameters (a learned
    bias, `sinks`) come from the rank's own queries, as in every other layer of the model. The whole gradient is the sum
    over the ranks.

    Args:
        q, k, v: tensors of this rank's tokens, rotated by `positions`. `k` and `v` may have fewer heads.
        group: the ranks that share the row, or a mesh of one dimension. Default: all ranks.
        method: how ranks communicate. It never changes what is computed. ``"ulysses"`` needs a number of heads that is
            a multiple of the number of ranks. If `encoding` has all heads, each rank uses its part of them. ``"ring"``
            does not support encodings that count the keys in between (`PositionEncoding.needs_all_keys`: `Cope`).
        positions: positions of this rank's tokens, such as ``Positions.packed(lengths).shard(rank, world)``.
        k_positions: positions of all ranks, from `gather_positions`. Compute them once per forward pass to save a small
            all-gather in every layer. For encodings that read hidden states (`HiddenBias`), call
            ``encoding.read(x, positions)`` for the rank's own tokens, as in one process. Then the ranks also send the
            features of their keys. If an encoding rotates by sums over earlier tokens, call `read_hidden_states`.
        dropout_p: must be 0 with ``"ring"``.
        backend: as in `locant.attend`. ``"ring"`` needs a log-sum-exp, which ``"sdpa"`` does not return.
        causal, window, scale, sinks, softcap, return_lse: as in `locant.attend`.

    >>> import torch
    >>> from locant import ALiBi
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q, k = torch.randn(2, 8, 6, 16), torch.randn(2, 4, 6, 16)
    >>> shard = Positions.arange(6).shard(dist.get_rank(), dist.get_world_size())
    >>> attend(q, k, k, method="ring", encoding=ALiBi(8), positions=shard).shape
    torch.Size([2, 8, 6, 16])
    >>> dist.destroy_process_group()
    """
    one_of("method", method, get_args(Method))
    require_positions(positions)
    mesh = _mesh(group, positions.device)
    reads = encoding is not None and has_bias(encoding) and any(x is not None for x in positions.read)
    _require_method(method, encoding, reads, dropout_p)
    positions.require_fits(q.shape[0], q.shape[2], q.device, "q")
    sinks = check_sinks(sinks, q)
    all_positions = gather_positions(positions, group=mesh) if k_positions is None else k_positions
    _require_all_tokens(all_positions, positions, mesh)
    if encoding is not None and reads:
        positions, all_positions = _with_features(mesh, encoding, positions, all_positions)
    options: dict[str, Any] = {
        "encoding": encoding, "causal": causal, "window": window, "scale": scale, "softcap": softcap,
        "backend": backend,
    }  # fmt: skip
    if method == "ring":
        y, lse = ring_attention(Ring(mesh.get_group()), q, k, v, positions, all_positions, options)
        if sinks is not None:
            y, lse = merge([(y, lse), (torch.zeros_like(y), sinks.to(lse)[None, :, None].expand_as(lse))])
        return (y, lse) if return_lse else y
    options |= {"dropout_p": dropout_p, "return_lse": return_lse}
    if method == "gather":
        whole_k, whole_v = (_redistribute(x, mesh, SEQUENCE, Replicate()) for x in (k, v))
        return attend_here(q, whole_k, whole_v, positions=positions, k_positions=all_positions, sinks=sinks, **options)
    return _attend_by_heads(mesh, q, k, v, all_positions, sinks, options)


def gather_positions(positions: Positions, *, group: Group = None) -> Positions:
    """Return the positions of all ranks' tokens, in the order of the ranks.

    All ranks raise an error if two ranks have the same token. This happens if every rank passes
    ``Positions.arange(local_length)``, which would rotate each shard as if it began the row. They also raise an error
    if shards have different sizes. The cost is two all-gathers, one of three integers per token and one of three
    integers per rank.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> gather_positions(Positions.arange(4))
    Positions(1x4, 0..3)
    >>> dist.destroy_process_group()
    """
    require_positions(positions)
    mesh = _mesh(group, positions.device)
    _require_even(positions, mesh)
    index = positions.index if positions.index.ndim == 3 else positions.index[..., None]
    local_part = torch.cat([positions.document[..., None], positions.order[..., None], index], dim=-1)
    shards = [torch.empty_like(local_part) for _ in range(mesh.size())]
    dist.all_gather(shards, local_part.contiguous(), group=mesh.get_group())
    document, order, *axes = torch.cat(shards, dim=1).unbind(-1)
    _require_own_tokens(document, order, len(shards))
    if len(axes) > 1:
        return Positions.of(torch.stack(axes, dim=-1), document, order=order)
    (index,) = axes
    if host_can_read(index) and not bool(document.any()) and index.numel() and _counts_one_by_one(index):
        return Positions.after(int(index[0, 0]), index.shape[1]).expand(len(index))
    return Positions.of(index, document, order=None if positions.order_or_none is None else order)


def read_hidden_states(
    encoding: PositionEncoding,
    x: Float[Tensor, "batch seq d_model"],
    positions: Positions,
    *,
    group: Group = None,
    k_positions: Positions | None = None,
) -> Positions:
    """Return ``encoding.read(x, positions)`` for this rank's tokens, with the bits of one process that has the row.

    Call it in place of `PositionEncoding.read` if an encoding rotates by sums over earlier tokens, which may be on
    other ranks (`SelectiveRoPE`). Other encodings need only their own tokens, and `attend` sends the features of
    biases. For them this is ``encoding.read(x, positions)``, so a model can call it for every encoding. All ranks must
    call it together. It sends the features of every token to every rank.

    Args:
        encoding: the encoding of this layer.
        x: hidden states of this rank's tokens.
        positions, group, k_positions: as in `attend`.

    >>> import torch
    >>> from locant import encoding
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> selective, x = encoding("selective_rope", head_dim=8, num_heads=2, d_model=16), torch.randn(1, 6, 16)
    >>> positions = read_hidden_states(selective, x, Positions.arange(6))
    >>> selective.rotate_one(torch.randn(1, 2, 6, 8), positions).shape
    torch.Size([1, 2, 6, 8])
    >>> dist.destroy_process_group()
    """
    mesh = _mesh(group, positions.device)
    read = encoding.read_shard(x, positions)
    if has_bias(encoding) or read.read.of_key is None:
        return read
    all_positions = gather_positions(positions, group=mesh) if k_positions is None else k_positions
    _require_all_tokens(all_positions, positions, mesh)
    _, whole_row = _with_features(mesh, encoding, read, all_positions)
    mine = whole_row.read.of_key.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]  # type: ignore[union-attr]
    return dataclasses.replace(read, read=read.read._replace(of_key=mine))


def head_slice(num_heads: int, *, group: Group = None) -> slice:
    """Return the heads that ``method="ulysses"`` computes on this rank, for the ``head_slice`` of an encoding.

    If tensor parallelism already splits the heads, `num_heads` is the number of this rank's heads, and the slice counts
    from the first of these heads. With heads 8 to 15 of a model, ``slice(4, 8)`` becomes ``head_slice=slice(12, 16)``.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> head_slice(8)
    slice(0, 8, None)
    >>> dist.destroy_process_group()
    """
    mesh = _mesh(group, torch.device("cpu"))
    num_heads = whole("num_heads", num_heads, 1, remedy="pass the number of query heads")
    if num_heads % mesh.size():
        got = f"got {num_heads} heads for method='ulysses' on {mesh.size()} ranks, expected a multiple"
        raise ShapeError(got, "method='ring', which does not split heads")
    count, rank = num_heads // mesh.size(), mesh.get_local_rank()
    return slice(rank * count, (rank + 1) * count)


def _mesh(group: Group, device: torch.device) -> DeviceMesh:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            got = f"got a mesh of {group.ndim} dimensions, a row is spread over one"
            raise ShapeError(got, "pass the submesh for context parallelism, mesh['cp']")
        return group
    group = dist.group.WORLD if group is None and dist.is_initialized() else group
    if not isinstance(group, ProcessGroup):
        got = (
            f"got {short_repr(group)} for group, expected an initialised process group of torch.distributed, or a mesh"
        )
        raise LocantError(got, "use torchrun and call torch.distributed.init_process_group()")
    return DeviceMesh.from_group(group, device.type)


def _redistribute(x: Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> Tensor:
    """Change how `x` is spread over the ranks. If every rank gets all of `x`, gradients are summed over ranks."""
    whole = DTensor.from_local(x, mesh, [source]).redistribute(placements=[target])
    return whole.to_local(grad_placements=[Partial() if target == Replicate() else target])


def _require_all_tokens(all_positions: Positions, positions: Positions, mesh: DeviceMesh) -> None:
    """Raise unless these may be the positions of all ranks, in order. This rank can only check its own part."""
    require_positions(all_positions)
    n, first = positions.seq_len, mesh.get_local_rank() * positions.seq_len
    rows = max(positions.batch, all_positions.batch)
    is_readable = host_can_read(positions.index) and host_can_read(all_positions.index)
    local_part = all_positions.slice(first, first + n).expand(rows)
    if all_positions.seq_len != n * mesh.size() or (is_readable and local_part != positions.expand(rows)):
        got = f"got {all_positions} for k_positions, expected the positions of {mesh.size()} ranks with {n} each"
        raise ShapeError(got, "k_positions=locant.parallel.gather_positions(positions, group=group)")


def _require_method(method: Method, encoding: PositionEncoding | None, reads: bool, dropout_p: Real) -> None:
    """Raise if the method does not support these arguments. `reads` is whether the bias depends on hidden states."""
    name = type(encoding).__name__
    if encoding is not None and has_pair_sets(encoding):
        got = f"got {name}, whose scores depend on the tokens between a query and a key, which other ranks hold"
        raise LocantError(got, "call locant.attend on whole rows, and give the ranks different rows or different heads")
    if method == "ring" and encoding is not None and encoding.needs_all_keys:
        got = f"got {name} with method='ring', which processes one shard of the keys at a time, but {name} needs all"
        raise LocantError(got, "method='gather', or method='ulysses'")
    if method == "ring" and dropout_p:
        got = f"got dropout_p={dropout_p} for method='ring', which computes weights again in the backward pass"
        raise RangeError(got, "method='gather', or dropout_p=0.0")
    if method == "ulysses" and reads:
        got = f"got {name} with method='ulysses', whose ranks need features that others read for other heads"
        raise LocantError(got, "method='gather', or method='ring'")


def _with_features(
    mesh: DeviceMesh, encoding: PositionEncoding, positions: Positions, all_positions: Positions
) -> tuple[Positions, Positions]:
    """Return this rank's positions and all positions, with features as if the encoding had read the whole row."""
    keys = positions.read.of_key
    if keys is None:
        return positions, all_positions
    all_positions = all_positions.expand(positions.batch)
    keys = _redistribute(keys, mesh, Shard(1), Replicate())
    queries, keys = encoding.of_row(positions.read.of_query, keys, all_positions, mesh.get_local_rank(), mesh.size())
    local_part = dataclasses.replace(positions, read=positions.read._replace(of_query=queries))
    return local_part, dataclasses.replace(all_positions, read=all_positions.read._replace(of_key=keys))


def _require_even(positions: Positions, mesh: DeviceMesh) -> None:
    """Raise on all ranks if shards have different sizes, because libraries would abort or mix up messages.

    On an accelerator, the device raises the error asynchronously, before anything else is sent.
    """
    local_part = torch.tensor([positions.batch, positions.seq_len, positions.axes], device=positions.device)
    sizes = [torch.empty_like(local_part) for _ in range(mesh.size())]
    dist.all_gather(sizes, local_part, group=mesh.get_group())
    message = "expected shards of one size on all ranks, as Positions.shard returns for a padded row"
    if not host_can_read(local_part):
        torch.ops.aten._assert_async.msg((torch.stack(sizes) == local_part).all(), message)
        return
    rows = [tuple(size.tolist()) for size in sizes]
    if len(set(rows)) > 1:
        lengths = ", ".join(f"{batch}x{seq}" + (f"x{axes}" if axes > 1 else "") for batch, seq, axes in rows)
        remedy = f"pad the row to a multiple of {2 * mesh.size()} tokens, and pass positions=row.shard(rank, world)"
        raise ShapeError(f"got positions of {lengths} on the ranks, {message}", remedy)


def _require_own_tokens(document: Tensor, order: Tensor, world: int) -> None:
    """Raise if two ranks have the same token. On an accelerator, the device raises the error asynchronously."""
    rank = torch.arange(world, device=order.device).repeat_interleave(order.shape[1] // world)
    key, slots = (document * 2**32 + order).sort(dim=1, stable=True)
    is_repeated = (key[:, 1:] == key[:, :-1]) & (rank[slots[:, 1:]] != rank[slots[:, :-1]]) & (key[:, 1:] >= 0)
    message = "got one token on two ranks, expected positions of each rank's own part of the row"
    if not host_can_read(is_repeated):
        torch.ops.aten._assert_async.msg(~is_repeated.any(), message)
        return
    if bool(is_repeated.any()):
        row, column = is_repeated.nonzero()[0].tolist()
        slot, other = slots[row, column : column + 2].tolist()
        token = f"position {int(order[row, slot])} of document {int(document[row, slot])}"
        got = f"{message}: {token} is on ranks {int(rank[slot])} and {int(rank[other])}"
        remedy = "positions=whole_row.shard(rank, world), with Positions.arange(length_of_the_row) for one document"
        raise RangeError(got, remedy)


def _attend_by_heads(
    mesh: DeviceMesh, q: Tensor, k: Tensor, v: Tensor, all_positions: Positions, sinks: Tensor | None,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """Attend with this rank's heads to all tokens, in the order of the row if this allows fast paths."""
    heads = head_slice(q.shape[1], group=mesh)
    options = {**options, "encoding": _select_heads(options["encoding"], q.shape[1], heads)}
    copies = mesh.size() // math.gcd(k.shape[1], mesh.size())  # several ranks may share a key head
    k, v = (x if copies == 1 else x.repeat_interleave(copies, dim=1) for x in (k, v))
    q, k, v = (_redistribute(x, mesh, SEQUENCE, HEADS) for x in (q, k, v))
    row, slots = _in_row_order(all_positions)
    if slots is not None:
        q, k, v = (x[:, :, slots] for x in (q, k, v))
    result = attend_here(q, k, v, positions=row, sinks=None if sinks is None else sinks[heads], **options)
    outputs = result if isinstance(result, tuple) else (result,)
    if slots is not None:
        inverse = slots.argsort()
        outputs = tuple(x[:, :, inverse] for x in outputs)
    outputs = tuple(_redistribute(x, mesh, HEADS, SEQUENCE) for x in outputs)
    return outputs if isinstance(result, tuple) else outputs[0]


class SelectedHeads(PositionEncoding):
    """An encoding that returns the bias of only some heads of another encoding."""

    def __init__(self, encoding: PositionEncoding, heads: slice) -> None:
        super().__init__()
        self.encoding, self.part = encoding, heads

    def score_bias(
        self, q: Tensor, k: Tensor, queries: Positions, keys: Positions, heads: slice | None = None
    ) -> ScoreBias | None:
        return effective_score_bias(self.encoding, q, k, queries, keys, self.part)


def _select_heads(encoding: PositionEncoding | None, num_heads: int, part: slice) -> PositionEncoding | None:
    """Return the encoding for this rank's heads. The input may have only these heads (`head_slice`) or all heads."""
    heads, count = getattr(encoding, "heads", None), part.stop - part.start
    if encoding is None or not isinstance(heads, Heads):
        return encoding
    first = 0 if len(heads) == num_heads else part.start
    has_part = heads.indices.step != 1 or (heads.indices.start - first) % num_heads == 0
    if heads.num_heads < num_heads or len(heads) not in (num_heads, count) or not has_part:
        got = f"got {type(encoding).__name__}({heads}) for heads {part.start} to {part.stop - 1} of {num_heads}"
        remedy = f"head_slice=locant.parallel.head_slice({num_heads}, group=group)"
        raise ShapeError(got, f"pass an encoding of all {num_heads} heads, or {remedy}")
    return encoding if len(heads) == count else SelectedHeads(encoding, part)


def _in_row_order(all_positions: Positions) -> tuple[Positions, Tensor | None]:
    """Return the row's positions and order if it is known to be one gapless document. Otherwise return the input."""
    if all_positions.start is not None or all_positions.axes > 1 or all_positions.order_or_none is not None:
        return all_positions, None
    index, document = all_positions.index, all_positions.document
    if not host_can_read(index) or len(index) > 1 or not index.numel() or bool((document != document[0, 0]).any()):
        return all_positions, None
    row, slots = index[0].sort()
    if int(document[0, 0]) == PADDING or not _counts_one_by_one(row[None]):
        return all_positions, None
    return Positions.after(int(row[0]), len(row)), slots


def _counts_one_by_one(index: Int[Tensor, "batch seq"]) -> bool:
    """Return whether all rows count one by one from the same index, which is not negative."""
    first = int(index[0, 0])
    return first >= 0 and torch.equal(index, torch.arange(first, first + index.shape[1]).expand_as(index))
