"""Text: from files to token ids, to stores of them on the disk, and to windows of them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
