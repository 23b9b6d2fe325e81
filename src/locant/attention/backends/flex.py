"""Attention through FlexAttention: the bias is a function that the compiler puts into the kernel, not a tensor.

CUDA supports every gradient, including gradients of the bias's parameters. A CPU supports only the forward pass.
FlexAttention is always compiled, because without the compiler it stores all scores. The first call for each kind of
input takes seconds.

A kernel for CPUs is compiled for fixed sizes, because with symbolic sizes torch 2.13 writes C++ that does not compile.
So on a CPU queries and keys are padded to powers of two. Blocks of padding are not computed.

torch computes the gradients of queries, keys and values. For these it needs a mean over each row of scores. It computes
this mean from the output, which is rounded to the dtype of the queries.

For the gradient of a look-up, torch would use an atomic addition for every pair, in a random order. So biases that are
looked up by distance are constants in torch's kernels: learned tables of distances, and products of tokens with rows of
distances (Shaw, DeBERTa, Inkling). `locant.kernels.distance_gradient` computes their gradients. They have the same bits
in every run, and their means do not use the rounded output. torch still computes the gradients of biases that depend on
rows and columns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from locant.arguments import Real
from locant.attention.inputs import NEEDS_LSE, AttentionInputs, AttentionResult
from locant.attention.mask import BLOCK, AttentionMask
from locant.errors import LocantError
from locant.kernels.distance_gradient import Biases, Pairs, with_gradients
from locant.positions import Positions
from locant.positions.distances import ScoreMod, distance_mod
from locant.positions.documents import PADDING
from locant.positions.fields import NO_FEATURES, TokenFeatures
from locant.positions.score_bias import ByDistance, Lookup
from locant.positions.score_bias.by_distance import look_up
from locant.positions.score_bias.lookup import sum_of
from locant.spelling import dtype_name

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_HEAD_DIM = 16
"""The smallest width of a head that FlexAttention's CUDA kernels support."""
FAR = 2**40
"""A distance greater than the distance of any two tokens."""
MAX_KERNELS = 256
"""The largest number of kernels that a process may compile: encodings times sizes. torch's default is 8."""


def obstacle(inputs: AttentionInputs) -> str | None:
    """Return the reason why FlexAttention does not support these inputs, or ``None``."""
    device, dtype, encoding = inputs.q.device.type, inputs.q.dtype, inputs.encoding
    width = max(inputs.q.shape[-1], inputs.v.shape[-1])
    if inputs.return_weights:
        return "which never stores the weights for return_weights=True"
    if inputs.is_transformed:
        return "which has no derivative in forward mode or inside torch.func.grad and similar transforms"
    if inputs.dropout_p > 0:
        return "which does not support dropout"
    if inputs.bias is not None and not inputs.bias.has_score_mod:
        return f"for which {type(encoding).__name__} has a bias but no score_mod on {device}"
    if dtype not in DTYPES:
        return f"which does not compute in {dtype_name(dtype)}"
    if device not in ("cpu", "cuda"):
        return f"which runs on cpu and cuda, not on {device}"
    if device == "cpu" and inputs.needs_gradient:
        return "which has no backward on a CPU"
    if device == "cpu" and inputs.needs_lse:
        return f"which on a CPU does not return {NEEDS_LSE}"
    if device == "cuda" and width < MIN_HEAD_DIM:
        return f"which does not support heads of {width} dimensions on cuda, only {MIN_HEAD_DIM} or more"
    return None


def flex_attention(inputs: AttentionInputs) -> AttentionResult:
    """Return the output and, if needed, the log-sum-exp. The bias is the encoding's `score_mod`."""
    queries = inputs.q.shape[2]
    inputs = _pad_to_power_of_two(inputs) if inputs.q.device.type == "cpu" else inputs
    learned, mask = _find_learned(inputs), inputs.mask.block_mask()
    encoding_mod = None if inputs.bias is None else inputs.bias.score_mod()
    if encoding_mod is None and inputs.bias is not None:
        raise LocantError(f"got {type(inputs.encoding).__name__} with a bias but no score_mod", "backend='tiled'")
    score_mod = _with_softcap(encoding_mod if learned is None else learned.score_mod, inputs.softcap)
    options: dict[str, Any] = {"score_mod": score_mod, "block_mask": mask, "scale": inputs.scale}
    options |= {"enable_gqa": inputs.is_grouped, "kernel_options": _kernel_options(inputs)}
    if not inputs.needs_lse and learned is None:
        return AttentionResult(_run(inputs.q, inputs.k, inputs.v, **options)[:, :, :queries])
    from torch.nn.attention.flex_attention import AuxRequest

    y, extra = _run(inputs.q, inputs.k, inputs.v, **options, return_aux=AuxRequest(lse=True))
    lse = extra.lse
    if learned is not None:
        numbers = _to_pairs(inputs.mask, mask, learned.first), inputs.scale, inputs.softcap
        y, lse = with_gradients(y, lse, inputs.q, inputs.k, inputs.v, learned.biases, *numbers)
    return AttentionResult(y[:, :, :queries], lse[:, :, :queries])


def _kernel_options(inputs: AttentionInputs) -> dict[str, Any] | None:
    """Return options that avoid torch's kernel for few queries if it does not support these sizes.

    For fewer than 128 queries, this kernel puts all queries that share a key head into one block. If they do not fit
    into `BLOCK`, torch does not find a kernel ("No choices to select").
    """
    queries_per_key_head = inputs.q.shape[2] * (inputs.q.shape[1] // inputs.k.shape[1])
    is_too_large = inputs.q.device.type == "cuda" and queries_per_key_head > BLOCK
    return {"FORCE_USE_FLEX_ATTENTION": True} if is_too_large else None


class _LearnedBias(NamedTuple):
    """Biases that need a gradient."""

    biases: Biases
    first: int
    """The first distance of the table."""
    score_mod: ScoreMod
    """The function that adds the biases, as constants, to the scores."""


def _find_learned(inputs: AttentionInputs) -> _LearnedBias | None:
    """Return a bias that is looked up by distance and is learned, or ``None`` for any other bias."""
    bias, distance = inputs.bias, distance_mod(inputs.q, inputs.mask.queries, inputs.mask.keys)
    if not inputs.needs_gradient:
        return None
    if isinstance(bias, ByDistance) and (listed := bias.table_or_none()) is not None and listed[0].requires_grad:
        table, first = listed
        return _LearnedBias(Biases(table), first, look_up(table.detach(), first, distance))
    if isinstance(bias, Lookup) and (table := bias.tables[0]).ends is not None:
        products = bias.products(table)
        if any(x is not None and x.requires_grad for x in products):
            constant = sum_of([bias.entry_mod(table, *(None if x is None else x.detach() for x in products))])
            return _LearnedBias(Biases(*products, table.between_ends(inputs.q.device)), table.ends[0], constant)
    return None


def _to_pairs(mask: AttentionMask, block_mask: Any, first: int) -> Pairs:
    """Return the description of the mask that the gradient of the biases needs."""
    span = FAR if mask.window is None else mask.window - 1
    bounds = first, 0 if mask.causal else -span, span
    if mask.offset is not None:
        return Pairs(*bounds, mask.offset)
    keys = None if mask.k_positions is None else _token_numbers(mask.k_positions)
    partly = _to_block_matrix(block_mask.kv_num_blocks, block_mask.kv_indices)
    wholly = _to_block_matrix(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return Pairs(*bounds, None, _token_numbers(mask.queries), keys, partly | wholly)


def _token_numbers(positions: Positions) -> Tensor:
    return torch.stack([positions.index, positions.document, positions.order], dim=1)


def _to_block_matrix(count: Tensor, indices: Tensor) -> Tensor:
    """Return a boolean matrix of the pairs of blocks in the lists of a `BlockMask`."""
    is_valid = torch.arange(indices.shape[-1], device=indices.device) < count[:, 0, :, None]
    return torch.zeros_like(is_valid).scatter(2, indices[:, 0].long(), is_valid)


def _with_softcap(score_mod: ScoreMod | None, softcap: Real | None) -> ScoreMod | None:
    """Return a `score_mod` that bounds the scaled score and then adds the bias."""
    if softcap is None:
        return score_mod

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        bounded = (score / softcap).tanh() * softcap
        return bounded if score_mod is None else score_mod(bounded, batch, head, query, key)

    return capped


def _pad_to_power_of_two(inputs: AttentionInputs) -> AttentionInputs:
    """Pad queries and keys to a power of two, at least one block."""
    q, queries = _pad(inputs.q, inputs.mask.queries)
    k, keys = _pad(inputs.k, inputs.mask.keys)
    v, _ = _pad(inputs.v, inputs.mask.keys)
    mask = AttentionMask(queries, keys, inputs.mask.causal, inputs.mask.window)
    return dataclasses.replace(inputs, q=q, k=k, v=v, mask=mask)


def _pad(x: Tensor, positions: Positions) -> tuple[Tensor, Positions]:
    length = max(1 << (x.shape[2] - 1).bit_length(), BLOCK) - x.shape[2]
    if not length:
        return x, positions
    slots = torch.zeros(positions.batch, length, dtype=torch.int64, device=positions.device)
    index = slots if positions.axes == 1 else slots[..., None].expand(-1, -1, positions.axes)
    place = None if positions.place_or_none is None else slots  # at the beginning of each axis and its grid
    padding = Positions(index, torch.full_like(slots, PADDING), slots, 0, 0, place_or_none=place, grids=positions.grids)
    padding = dataclasses.replace(padding, denominator=positions.denominator)
    padded = Positions.cat([dataclasses.replace(positions, read=NO_FEATURES), padding])
    read = (x if x is None else F.pad(x, (0, 0) * (x.ndim - 2) + (0, length)) for x in positions.read)
    return F.pad(x, (0, 0, 0, length)), dataclasses.replace(padded, read=TokenFeatures(*read))


def _run(*tensors: Tensor, **options: Any) -> Any:
    if torch.compiler.is_compiling():
        from torch.nn.attention import flex_attention

        return flex_attention.flex_attention(*tensors, **options)  # type: ignore[call-overload]
    from torch._dynamo import config
    from torch._dynamo.exc import TorchDynamoException

    try:
        with config.patch(recompile_limit=MAX_KERNELS):
            return _compile_for(tensors[0].device.type)(*tensors, **options)
    except TorchDynamoException as error:
        cause = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise LocantError(f"torch could not compile FlexAttention here: {cause}", "backend='tiled'") from error


@functools.cache
def _compile_for(device: str) -> Callable[..., Any]:
    from torch.nn.attention import flex_attention

    return torch.compile(flex_attention.flex_attention, fullgraph=True, dynamic=False if device == "cpu" else None)
