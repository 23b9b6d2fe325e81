"""Cut token ids into windows of one length, and make batches of windows."""

from locant.text.windows.layouts import IGNORED_TARGET, Batch, BatchOfWindows
from locant.text.windows.loader import BatchSampler, Loader
from locant.text.windows.patches import BytePatches
from locant.text.windows.windows import Windows

__all__ = ["IGNORED_TARGET", "Batch", "BatchOfWindows", "BatchSampler", "BytePatches", "Loader", "Windows"]
