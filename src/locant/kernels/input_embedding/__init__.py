"""Token, position and segment rows added, scaled, normed and dropped in one pass, with the gradients of all tables."""

from locant.kernels.input_embedding.lookup import look_up as look_up
from locant.kernels.input_embedding.op import NO_FAULT as NO_FAULT
from locant.kernels.input_embedding.op import input_embedding as input_embedding
from locant.kernels.input_embedding.operands import Operands as Operands
