"""Formats of token stores, under their public name: see `locant.text.store.formats`.

A format is a subclass of `StoreFormat`, made known by `register_format` or by an entry point in the group
``locant.formats``. One of .npy files, which have a header before their tokens:

>>> import tempfile
>>> from pathlib import Path
>>> import numpy as np
>>> class Npy(StoreFormat):
...     "``tokens.npy``, and ``documents.npy`` with where each document begins."
...
...     def __init__(self, path, options):
...         tokens = np.load(path / "tokens.npy", mmap_mode="r")
...         super().__init__([path / "tokens.npy"], tokens.dtype, options, header=tokens.offset)
...         self.folder = path
...
...     def offsets(self, shard):
...         return np.load(self.folder / "documents.npy")
...
...     @classmethod
...     def write(cls, source, folder):
...         np.save(folder / "tokens.npy", np.concatenate([*source.blocks()]).astype(source.dtype))
...         np.save(folder / "documents.npy", source.store.all_offsets())
...         return source.dtype
>>> register_format("example_npy", Npy)

From then on it can be read, and written by `locant.text.store.export_store` and ``locant export --to example_npy``:

>>> folder = Path(tempfile.mkdtemp())
>>> np.save(folder / "tokens.npy", np.array([5, 6, 7], dtype=np.uint16))
>>> np.save(folder / "documents.npy", np.array([0, 1, 3]))
>>> from locant import TokenStore
>>> store = TokenStore(folder, format="example_npy")
>>> store[:], store.documents
(array([5, 6, 7], dtype=uint16), array([0, 1, 3]))
"""

from locant.text.store.formats import ExportSource as ExportSource
from locant.text.store.formats import StoreFormat as StoreFormat
from locant.text.store.formats import StoreOptions as StoreOptions
from locant.text.store.formats import register_format as register_format

__all__ = ["ExportSource", "StoreFormat", "StoreOptions", "register_format"]
