"""Reading: from a range of a file's bytes to the documents that begin there, one file for each kind of input.

`documents` asks `text`, `jsonl` or `parquet`, and each of them gets its bytes from `streams`, which opens files and
unpacks compressed ones.
"""

from locant.text.prepare.readers.documents import Batch, documents

__all__ = ["Batch", "documents"]
