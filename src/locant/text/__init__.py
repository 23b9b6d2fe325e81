"""Convert files of text to token ids, store the ids on disk, and cut them into windows."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
