"""Batches for training: documents packed into one row, and checks of batches that other programs packed."""

from locant.engines.batches.check import Findings as Findings
from locant.engines.batches.check import check_batch as check_batch
from locant.engines.batches.finding import Finding as Finding
from locant.engines.batches.packing import pack_documents as pack_documents
from locant.engines.batches.reading import read_batch as read_batch

__all__ = ["Finding", "Findings", "check_batch", "pack_documents", "read_batch"]
