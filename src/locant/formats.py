"""Public names for the formats of token stores, which `locant.text.store.formats` defines.

A format is a subclass of `StoreFormat`. `register_format` or an entry point in the group ``locant.formats`` registers
it. The page "Extending locant" has a format for .npy files as an example.
"""

from locant.text.store.formats import ExportSource as ExportSource
from locant.text.store.formats import StoreFormat as StoreFormat
from locant.text.store.formats import StoreOptions as StoreOptions
from locant.text.store.formats import register_format as register_format

__all__ = ["ExportSource", "StoreFormat", "StoreOptions", "register_format"]
