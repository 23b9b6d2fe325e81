"""Positions of tokens, and all position encodings.

`positions` defines `Positions`, and `base` defines the base class of encodings. `encodings` has a file for each
encoding, and `registry` finds encodings by name. `angles` computes exact cosines and sines. `scaling` computes scaled
frequencies.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
