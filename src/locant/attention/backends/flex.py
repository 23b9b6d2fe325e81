"""Attention through FlexAttention: the bias is a function that the compiler puts into the kernel, and no tensor.

On CUDA with every gradient, parameters of the bias included. On a CPU only forward. Always compiled: without the
compiler FlexAttention holds all scores, which is what it is chosen to avoid. The first call of a kind takes seconds.

A kernel for CPUs is compiled for its sizes alone (with symbolic ones torch 2.13 writes C++ that does not compile), so
there queries and keys are filled up with padding to powers of two. Blocks of padding cost no arithmetic.

The backward of queries, keys and values is torch's own. It takes the mean of a row from the output, rounded to the
dtype of the queries, and adds up the gradient of a look-up with an atomic addition for every pair. So a learned table
of distances, and products of tokens with rows of distances (Shaw, DeBERTa, Inkling), are constants in there, and
`locant.kernels.distance_gradient` makes their gradients: the same bits in every run, with means of the weights
themselves. The gradients of biases of rows and columns are still torch's.
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
from locant.attention.inputs import Attended, AttentionInputs
from locant.attention.mask import BLOCK, AttentionMask
from locant.errors import LocantError
from locant.kernels.distance_gradient import Biases, Pairs, with_gradients
from locant.positions import Positions
from locant.positions.documents import PADDING
from locant.positions.fields import NOT_READ, Read
from locant.positions.pairs import ScoreMod, distance_mod
from locant.positions.score_bias import ByDistance, Lookup
from locant.positions.score_bias.by_distance import look_up
from locant.positions.score_bias.lookup import sum_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROWEST = 16
"""The narrowest head that FlexAttention's CUDA kernels take."""
FAR = 2**40
"""Farther than any two tokens."""
KINDS = 256
"""How many kernels may be compiled in one process: encodings times sizes. torch would stop after 8."""


def obstacle(inputs: AttentionInputs) -> str | None:
    """Why it cannot run, or ``None``."""
    device, dtype, encoding = inputs.q.device.type, inputs.q.dtype, inputs.encoding
    width = max(inputs.q.shape[-1], inputs.v.shape[-1])
    if inputs.return_weights:
        return "which never holds the weights of return_weights=True"
    if inputs.is_transformed:
        return "which has no derivative in forward mode or inside torch.func.grad and the like"
    if inputs.dropout_p > 0:
        return "which drops no weights"
    if inputs.bias is not None and not inputs.bias.has_score_mod:
        return f"for which {type(encoding).__name__} has a bias but no score_mod on {device}"
    if dtype not in DTYPES:
        return f"which does not compute in {dtype}"
    if device not in ("cpu", "cuda"):
        return f"which runs on cpu and cuda, not on {device}"
    if device == "cpu" and inputs.needs_gradient:
        return "which has no backward on a CPU"
    if device == "cpu" and inputs.needs_lse:
        return "which on a CPU keeps the log-sum-exp to itself, which sinks and return_lse=True need"
    if device == "cuda" and width < NARROWEST:
        return f"which takes no heads of {width} dimensions on cuda, {NARROWEST} or more"
    return None


def flex_attention(inputs: AttentionInputs) -> Attended:
    """The output and, where it is needed, the log-sum-exp; the bias is the encoding's `score_mod`."""
    queries = inputs.q.shape[2]
    inputs = _filled_up(inputs) if inputs.q.device.type == "cpu" else inputs
    learned, mask = _learned(inputs), inputs.mask.block_mask()
    plain = None if inputs.bias is None else inputs.bias.score_mod()
    if plain is None and inputs.bias is not None:
        raise LocantError(f"got {type(inputs.encoding).__name__} with a bias but no score_mod", "backend='tiled'")
    score_mod = _capped(plain if learned is None else learned.score_mod, inputs.softcap)
    options: dict[str, Any] = {"score_mod": score_mod, "block_mask": mask, "scale": inputs.scale}
    options |= {"enable_gqa": inputs.is_grouped, "kernel_options": _kernel_options(inputs)}
    if not inputs.needs_lse and learned is None:
        return Attended(_run(inputs.q, inputs.k, inputs.v, **options)[:, :, :queries])
    from torch.nn.attention.flex_attention import AuxRequest

    y, also = _run(inputs.q, inputs.k, inputs.v, **options, return_aux=AuxRequest(lse=True))
    lse = also.lse
    if learned is not None:
        numbers = _pairs(inputs.mask, mask, learned.first), inputs.scale, inputs.softcap
        y, lse = with_gradients(y, lse, inputs.q, inputs.k, inputs.v, learned.biases, *numbers)
    return Attended(y[:, :, :queries], lse[:, :, :queries])


def _kernel_options(inputs: AttentionInputs) -> dict[str, Any] | None:
    """For fewer than 128 queries torch takes a kernel that puts all that share a key head into one block.

    Where they do not fit into one of `BLOCK`, it finds no kernel ("No choices to select").
    """
    together = inputs.q.shape[2] * (inputs.q.shape[1] // inputs.k.shape[1])
    return {"FORCE_USE_FLEX_ATTENTION": True} if inputs.q.device.type == "cuda" and together > BLOCK else None


class _Learned(NamedTuple):
    """Biases that want a gradient."""

    biases: Biases
    first: int
    """The first distance that is listed."""
    score_mod: ScoreMod
    """Looks them up as constants."""


def _learned(inputs: AttentionInputs) -> _Learned | None:
    """Where the bias is looked up by distance, and is learned."""
    bias, distance = inputs.bias, distance_mod(inputs.q, inputs.mask.queries, inputs.mask.keys)
    if not inputs.needs_gradient:
        return None
    if isinstance(bias, ByDistance) and (listed := bias.listed()) is not None and listed[0].requires_grad:
        table, first = listed
        return _Learned(Biases(table), first, look_up(table.detach(), first, distance))
    if isinstance(bias, Lookup) and (table := bias.tables[0]).ends is not None:
        numbers = bias.products(table)
        if any(x is not None and x.requires_grad for x in numbers):
            constant = sum_of([bias.entry_mod(table, *(None if x is None else x.detach() for x in numbers))])
            return _Learned(Biases(*numbers, table.between_ends(inputs.q.device)), table.ends[0], constant)
    return None


def _pairs(mask: AttentionMask, block_mask: Any, first: int) -> Pairs:
    """What the gradient of the biases has to know of the mask."""
    span = FAR if mask.window is None else mask.window - 1
    bounds = first, 0 if mask.causal else -span, span
    if mask.offset is not None:
        return Pairs(*bounds, mask.offset)
    keys = None if mask.k_positions is None else _tokens(mask.k_positions)
    partly = _matrix(block_mask.kv_num_blocks, block_mask.kv_indices)
    wholly = _matrix(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return Pairs(*bounds, None, _tokens(mask.queries), keys, partly | wholly)


def _tokens(positions: Positions) -> Tensor:
    return torch.stack([positions.index, positions.document, positions.order], dim=1)


def _matrix(count: Tensor, which: Tensor) -> Tensor:
    """Which blocks of queries and keys are listed."""
    listed = torch.arange(which.shape[-1], device=which.device) < count[:, 0, :, None]
    return torch.zeros_like(listed).scatter(2, which[:, 0].long(), listed)


def _capped(score_mod: ScoreMod | None, softcap: Real | None) -> ScoreMod | None:
    """The bound comes before the bias, as `score_mod` is given the scaled score."""
    if softcap is None:
        return score_mod

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        bounded = (score / softcap).tanh() * softcap
        return bounded if score_mod is None else score_mod(bounded, batch, head, query, key)

    return capped


def _filled_up(inputs: AttentionInputs) -> AttentionInputs:
    """With padding, so that there is a power of two of queries and of keys, a block at least."""
    q, queries = _fill(inputs.q, inputs.mask.queries)
    k, keys = _fill(inputs.k, inputs.mask.keys)
    v, _ = _fill(inputs.v, inputs.mask.keys)
    mask = AttentionMask(queries, keys, inputs.mask.causal, inputs.mask.window)
    return dataclasses.replace(inputs, q=q, k=k, v=v, mask=mask)


def _fill(x: Tensor, positions: Positions) -> tuple[Tensor, Positions]:
    more = max(1 << (x.shape[2] - 1).bit_length(), BLOCK) - x.shape[2]
    if not more:
        return x, positions
    slots = torch.zeros(positions.batch, more, dtype=torch.int64, device=positions.device)
    index = slots if positions.axes == 1 else slots[..., None].expand(-1, -1, positions.axes)
    place = None if positions.place_or_none is None else slots  # at the beginning of each axis and of their grids
    padding = Positions(index, torch.full_like(slots, PADDING), slots, 0, 0, place_or_none=place, grids=positions.grids)
    padding = dataclasses.replace(padding, denominator=positions.denominator)
    filled = Positions.cat([dataclasses.replace(positions, read=NOT_READ), padding])
    wider = (each if each is None else F.pad(each, (0, 0) * (each.ndim - 2) + (0, more)) for each in positions.read)
    return F.pad(x, (0, 0, 0, more)), dataclasses.replace(filled, read=Read(*wider))


def _run(*tensors: Tensor, **options: Any) -> Any:
    if torch.compiler.is_compiling():
        from torch.nn.attention import flex_attention

        return flex_attention.flex_attention(*tensors, **options)  # type: ignore[call-overload]
    from torch._dynamo import config
    from torch._dynamo.exc import TorchDynamoException

    try:
        with config.patch(recompile_limit=KINDS):
            return _compiled(tensors[0].device.type)(*tensors, **options)
    except TorchDynamoException as error:
        cause = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise LocantError(f"torch could not compile FlexAttention here: {cause}", "backend='tiled'") from error


@functools.cache
def _compiled(device: str) -> Callable[..., Any]:
    from torch.nn.attention import flex_attention

    return torch.compile(flex_attention.flex_attention, fullgraph=True, dynamic=False if device == "cpu" else None)
