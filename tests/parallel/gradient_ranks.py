"""What each rank of the tests of clipping does: a decoder trained whole, and with its token table split.

The processes are started by the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

from locant import Rotary
from locant.lab.decoder import Decoder
from locant.parallel import VocabularyParallel, clip_grad_norm_, parameter_groups

STEPS, BATCH = 3, 4
MAX_NORM = 0.5
Optimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.1),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "SGD, foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
}


def _decoder(vocabulary: int) -> Decoder:
    torch.manual_seed(0)
    return Decoder(vocabulary, Rotary(4), d_model=8, num_layers=2, num_heads=2).double()


def _split(vocabulary: int, shape: tuple[int, ...]) -> tuple[Decoder, slice]:
    """Its table over the last dimension of a mesh, everything over the first of two; and the rows it trains on."""
    model, rows = _decoder(vocabulary), slice(0, BATCH)
    names = ("dp", "tp")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    parallelize_module(model, mesh["tp"], {"embedding": VocabularyParallel()})
    if len(shape) == 2:
        share = BATCH // shape[0]
        rows = slice(share * mesh.get_local_rank("dp"), share * (mesh.get_local_rank("dp") + 1))
        fully_shard(model, mesh=mesh["dp"])
    return model, rows


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _step(model: nn.Module, rows: slice, step: int, clip: Callable[..., Tensor], norm_type: float) -> Tensor:
    ids = torch.randint(5, (BATCH, 6), generator=torch.Generator().manual_seed(step))[rows]
    model.zero_grad()
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    return clip(model.parameters(), MAX_NORM, norm_type)


def _off(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max() / other.detach().abs().max().clamp(min=1))


def _trained(vocabulary: int, shape: tuple[int, ...], name: str, norm_type: float) -> dict[str, Any]:
    """How far norms and weights are from those of one process."""
    alone, (model, rows) = _decoder(vocabulary), _split(vocabulary, shape)
    mine, expected = OPTIMIZERS[name](parameter_groups(model.parameters())), OPTIMIZERS[name](alone.parameters())
    off, norms = 0.0, []
    for step in range(STEPS):
        one = _step(model, rows, step, clip_grad_norm_, norm_type)
        other = _step(alone, slice(None), step, nn.utils.clip_grad_norm_, norm_type)
        norms.append(float(other))
        mine.step()
        expected.step()
        off = max(off, _off(one, other))
        off = max(off, *(_off(_whole(p), q) for p, q in zip(model.parameters(), alone.parameters(), strict=True)))
    saved = get_optimizer_state_dict(model, mine, options=StateDictOptions(full_state_dict=True))
    return {"off": off, "norms": norms, "saved": len(saved.get("state", {}))}


def find_out(cases: list[tuple[int, tuple[int, ...], str, float]]) -> dict[str, Any]:
    """The work of one process."""
    return {str(case): _trained(*case) for case in cases}
