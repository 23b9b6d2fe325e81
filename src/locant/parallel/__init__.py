"""More than one device: token tables with rows split over the ranks of a mesh, and rows of tokens split over ranks.

An encoding's ``head_slice`` gives a bias for the heads of one rank. This package does not start processes or process
groups. It uses the process groups of `torch.distributed`.
"""

from locant.parallel.context import attend as attend
from locant.parallel.context import gather_positions as gather_positions
from locant.parallel.context import head_slice as head_slice
from locant.parallel.vocabulary import VocabularyParallel as VocabularyParallel
from locant.parallel.vocabulary import clip_grad_norm_ as clip_grad_norm_
from locant.parallel.vocabulary import parameter_groups as parameter_groups
