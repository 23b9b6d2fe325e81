"""Formats of token stores, by name: one file each, reading beside writing. `register_format` adds another.

=============  ======================================================  ==========================================
``locant``     a folder of shards with a manifest and the tokenizer    `locant.TokenStore`
``megatron``   ``tokens.bin`` and ``tokens.idx``                       ``IndexedDataset("tokens")``
``nanogpt``    ``train.bin``: all tokens, and nothing else             ``np.memmap("train.bin", dtype=np.uint16)``
``datatrove``  ``00000.ds`` and its index and metadata, per shard      ``DatatroveFolderDataset``
=============  ======================================================  ==========================================

nanoGPT's and datatrove's tokens have two bytes up to 65 536 entries of the vocabulary, and four beyond; Megatron-LM's
and locant's have two up to 65 499. Only locant's has hashes and the tokenizer in it.
"""

from __future__ import annotations

from typing import Any

from locant.arguments import shown
from locant.errors import RangeError
from locant.registry import Registry
from locant.text.store.formats.base import ExportSource, StoreFormat, StoreOptions
from locant.text.store.formats.locant import LocantFormat
from locant.text.store.formats.others import DatatroveFormat, MegatronFormat, NanogptFormat

__all__ = ["FORMATS", "ExportSource", "StoreFormat", "StoreOptions", "register_format"]


def register_format(name: str, format: type[StoreFormat]) -> None:  # noqa: A002  # what the field calls it
    """Make a format known to ``TokenStore(path, format=name)`` and ``locant export``, as an entry point would.

    Raises:
        RangeError: no subclass of `StoreFormat`, or a name that is taken.
    """
    FORMATS.register(name, format)


def _check(name: str, value: Any) -> None:
    if not (isinstance(value, type) and issubclass(value, StoreFormat)):
        raise RangeError(f"got {shown(value)} for store format {name!r}, expected a class", "a subclass of StoreFormat")


FORMATS: Registry[type[StoreFormat]] = Registry("store format", "locant.formats", _check)
FORMATS.register("locant", LocantFormat)
FORMATS.register("megatron", MegatronFormat)
FORMATS.register("nanogpt", NanogptFormat)
FORMATS.register("datatrove", DatatroveFormat)
