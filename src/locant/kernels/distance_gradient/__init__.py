"""The gradient of a bias of the distance that FlexAttention looks up in a table, without atomics; for CUDA."""

from locant.kernels.distance_gradient.op import with_table_gradient
from locant.kernels.distance_gradient.pairs import Pairs

__all__ = ["Pairs", "with_table_gradient"]
