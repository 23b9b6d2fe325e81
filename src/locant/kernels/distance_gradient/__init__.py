"""The gradient of biases that FlexAttention looks up by distance, without atomics; for CUDA."""

from locant.kernels.distance_gradient.op import Biases as Biases
from locant.kernels.distance_gradient.op import Pairs as Pairs
from locant.kernels.distance_gradient.op import with_gradients as with_gradients
