"""Positions of tokens, and all position encodings.

`positions` holds `Positions`, `base` the base class of encodings, `encodings` a file for each encoding, and `registry`
finds them by name. `angles` computes exact cosines and sines, `scaling` the scaled frequencies.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
