"""More than one device: tables whose rows are split over the ranks of a mesh, rows whose tokens are.

A bias for the heads of one rank comes from an encoding's ``head_slice``. Nothing here starts processes or process
groups; they are those of `torch.distributed`.
"""

from locant.parallel.context import attend as attend
from locant.parallel.context import gather_positions as gather_positions
from locant.parallel.context import head_slice as head_slice
from locant.parallel.vocabulary import VocabularyParallel as VocabularyParallel
from locant.parallel.vocabulary import clip_grad_norm_ as clip_grad_norm_
from locant.parallel.vocabulary import parameter_groups as parameter_groups
