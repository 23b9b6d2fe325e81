"""The encodings of this package, one file each: a class, and in its `info` what `locant list` shows of it.

A new file needs no entry in a list (`locant.positions.registry`).
"""
