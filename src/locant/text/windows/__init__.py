"""Windows: token ids cut into pieces of one length, and batches of them."""

from locant.text.windows.windows import IGNORED_TARGET as IGNORED_TARGET
from locant.text.windows.windows import Batch as Batch
from locant.text.windows.windows import Windows as Windows

__all__ = ["IGNORED_TARGET", "Batch", "Windows"]
