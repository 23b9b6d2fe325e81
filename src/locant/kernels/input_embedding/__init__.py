"""Token, position and segment rows added, scaled, normed and dropped in one pass, with the gradients of all tables."""

from locant.kernels.input_embedding.op import input_embedding as input_embedding
from locant.kernels.input_embedding.op import look_up as look_up
from locant.kernels.input_embedding.reference import Operands as Operands
