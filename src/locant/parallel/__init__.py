"""Use several devices: split the rows of a token table, or the tokens of a sequence, over the ranks of a mesh.

The argument ``head_slice`` of an encoding selects the heads of one rank. This package does not start processes or
process groups. It uses the process groups of `torch.distributed`.
"""

from locant.parallel.context import attend as attend
from locant.parallel.context import gather_positions as gather_positions
from locant.parallel.context import head_slice as head_slice
from locant.parallel.context import read_hidden_states as read_hidden_states
from locant.parallel.vocabulary import VocabularyParallel as VocabularyParallel
from locant.parallel.vocabulary import clip_grad_norm_ as clip_grad_norm_
from locant.parallel.vocabulary import parameter_groups as parameter_groups
