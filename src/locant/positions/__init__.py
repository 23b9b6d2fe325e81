"""Positions of tokens, and every encoding of them.

`positions` holds `Positions`, `base` the class of all encodings, `encodings` a file for each, `registry` finds them by
name; `angles` has the exact cosines, `scaling` the scaled frequencies.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
