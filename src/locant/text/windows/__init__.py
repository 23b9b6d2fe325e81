"""Windows: token ids cut into pieces of one length, and batches of them."""

from locant.text.windows.collation import IGNORED_TARGET as IGNORED_TARGET
from locant.text.windows.collation import Batch as Batch
from locant.text.windows.loader import Loader as Loader
from locant.text.windows.sampler import BatchSampler as BatchSampler
from locant.text.windows.windows import Windows as Windows

__all__ = ["IGNORED_TARGET", "Batch", "BatchSampler", "Loader", "Windows"]
