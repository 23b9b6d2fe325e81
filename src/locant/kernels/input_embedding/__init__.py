"""Token, position and segment rows added, scaled, normed and dropped in one pass, with the gradients of all tables."""

from locant.kernels.input_embedding.lookup import look_up as look_up
from locant.kernels.input_embedding.lookup import look_up_unchecked as look_up_unchecked
from locant.kernels.input_embedding.lookup import reports_faults as reports_faults
from locant.kernels.input_embedding.op import input_embedding as input_embedding
from locant.kernels.input_embedding.operands import MAX_NORMED as MAX_NORMED
from locant.kernels.input_embedding.operands import NO_FAULT as NO_FAULT
from locant.kernels.input_embedding.operands import Operands as Operands
