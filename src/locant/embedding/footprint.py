"""What tables weigh: parameters, and bytes at the precisions they are kept in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["TableSize", "table_sizes"]


@dataclass(frozen=True, kw_only=True)
class TableSize:
    """One table of a model.

    >>> TableSize(name="token", shape=(32_000, 4_096)).num_bytes(torch.bfloat16) / 2**20
    250.0
    """

    name: str
    shape: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        return torch.Size(self.shape).numel()

    def num_bytes(self, dtype: torch.dtype) -> int:
        return self.num_parameters * dtype.itemsize


def table_sizes(module: nn.Module) -> list[TableSize]:
    """Every parameter of `module`, which may be on the meta device: nothing has to be allocated to be weighed.

    >>> from locant.embedding import TokenEmbedding
    >>> with torch.device("meta"):
    ...     large = TokenEmbedding(50_257, 768)
    >>> [size.num_parameters for size in table_sizes(large)]
    [38597376]
    """
    return [TableSize(name=name, shape=tuple(parameter.shape)) for name, parameter in module.named_parameters()]
