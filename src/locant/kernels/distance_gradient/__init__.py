"""The gradient of biases that FlexAttention looks up by distance, without atomics; for CUDA."""

from locant.kernels.distance_gradient.op import with_gradients
from locant.kernels.distance_gradient.pairs import Biases, Pairs

__all__ = ["Biases", "Pairs", "with_gradients"]
