"""Formats of token stores, under their public name: see `locant.text.store.formats`.

A format is a subclass of `StoreFormat`, made known by `register_format` or by an entry point in the group
``locant.formats``; the page "Extending locant" has one of .npy files.
"""

from locant.text.store.formats import ExportSource as ExportSource
from locant.text.store.formats import StoreFormat as StoreFormat
from locant.text.store.formats import StoreOptions as StoreOptions
from locant.text.store.formats import register_format as register_format

__all__ = ["ExportSource", "StoreFormat", "StoreOptions", "register_format"]
