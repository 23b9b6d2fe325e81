"""The encodings of this package, one file each: a class, and in its `info` all that is told of it.

A new file is found by itself (`locant.positions.registry`).
"""
