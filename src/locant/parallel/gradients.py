"""Gradients of models whose parameters are spread over ranks in different ways: their norm, clipped, and their groups.

A table split by rows is a `DTensor` beside plain parameters, or beside others on another mesh (FSDP). torch adds up
norms, and steps many parameters at once, only where all are of one kind: "got mixed torch.Tensor and DTensor".
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from locant.arguments import Real, real

__all__ = ["clip_grad_norm_", "parameter_groups"]


def parameter_groups(parameters: Iterable[Tensor]) -> list[dict[str, list[Tensor]]]:
    """The parameters in groups that an optimizer can step at once (``fused=True``, ``foreach=True``), in their order.

    >>> from torch import nn
    >>> model = nn.Linear(4, 4)
    >>> optimizer = torch.optim.AdamW(parameter_groups(model.parameters()), lr=1e-3, foreach=True)
    """
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return [{"params": group} for group in groups.values()]


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
    groups = [group["params"] for group in parameter_groups(parameters)]
    norms = [_whole(get_total_norm(_gradients(group), norm_type)) for group in groups if _gradients(group)]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    for group in groups:
        clip_grads_with_norm_(group, max_norm, total)
    return total


def _gradients(group: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in group if parameter.grad is not None]


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
