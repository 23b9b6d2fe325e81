"""Gradients of models whose parameters are spread over ranks in different ways: their norm, clipped, and their groups.

A table split by rows is a `DTensor` beside plain parameters, or beside others on another mesh (FSDP). torch adds up
norms, and steps many parameters at once, only where all are of one kind: "got mixed torch.Tensor and DTensor".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from locant.arguments import Real, real

__all__ = ["clip_grad_norm_", "parameter_groups"]


def parameter_groups(parameters: Iterable[Tensor] | Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parameters in groups that an optimizer can step at once (``fused=True``, ``foreach=True``), in their order.

    Groups that are given are divided, and keep their settings.

    >>> from torch import nn
    >>> model = nn.Linear(4, 4)
    >>> optimizer = torch.optim.AdamW(parameter_groups(model.parameters()), lr=1e-3, foreach=True)
    """
    given = list(parameters)
    groups = [x for x in given if isinstance(x, dict)] or [{"params": given}]
    return [{**group, "params": some} for group in groups for some in _apart(group["params"], _mesh)]


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: Real, norm_type: Real = 2.0) -> Float[Tensor, ""]:
    """Scale all gradients so that their norm, over all parameters and ranks, is at most `max_norm`; returns the norm.

    As `torch.nn.utils.clip_grad_norm_`, also where plain parameters and DTensors on several meshes meet. What is not a
    DTensor has to have the same gradient on every rank. All ranks call it together.

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
    norms = [_norm(some, norm_type) for some in _apart(gradients, _placed)]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    for group in _apart(parameters, _mesh):
        clip_grads_with_norm_(group, max_norm, total)
    return total


def _norm(gradients: list[Tensor], norm_type: Real) -> Tensor:
    """Of gradients that are placed alike: the part of this rank, added to those of the others."""
    first = gradients[0]
    if not isinstance(first, DTensor):
        return get_total_norm(gradients, norm_type)
    here = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    filled = [part for part in here if part.numel()]  # torch knows no largest of none, and other ranks would wait
    norm = (get_total_norm(filled, norm_type) if filled else here[0].new_zeros(())).double()
    largest = math.isinf(norm_type)
    split = Partial("max" if largest else "sum")
    placements = [Replicate() if placement.is_replicate() else split for placement in first.placements]
    whole = DTensor.from_local(norm if largest else norm**norm_type, first.device_mesh, placements).full_tensor()
    return (whole if largest else whole ** (1 / norm_type)).to(first.dtype)


def _apart(tensors: Iterable[Tensor], place: Callable[[Tensor], object]) -> list[list[Tensor]]:
    """Those of one place in one list, in the order of the first of each."""
    lists: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault(place(tensor), []).append(tensor)
    return list(lists.values())


def _mesh(tensor: Tensor) -> object:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _placed(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
