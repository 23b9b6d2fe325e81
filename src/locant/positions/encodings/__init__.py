"""The encodings of this package, a file for each or for a family; the `info` of a class is what `locant list` shows.

A new file needs no entry in a list (`locant.positions.registry`).
"""

INIT_STD = 0.02
"""The deviation of tables and projections at first, as in GPT-2 and BERT."""
