"""Windows: token ids cut into pieces of one length, and batches of them."""

from locant.text.windows.collation import IGNORED_TARGET, Batch
from locant.text.windows.loader import Loader
from locant.text.windows.sampler import BatchSampler
from locant.text.windows.windows import Windows

__all__ = ["IGNORED_TARGET", "Batch", "BatchSampler", "Loader", "Windows"]
