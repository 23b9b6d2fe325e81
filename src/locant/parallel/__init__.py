"""More than one device: tables whose rows are split over the ranks of a mesh.

Parts of a sequence for context parallelism come from `Positions.shard`, heads of a bias from its ``head_slice``.
Nothing here starts processes or process groups; a mesh of `torch.distributed` comes in ready.
"""

from locant.parallel.vocabulary import VocabularyParallel as VocabularyParallel
