"""The encodings of this package, one file each or one per family. `locant list` shows the `info` of each class.

A new file needs no entry in a list (`locant.positions.registry`).
"""

INIT_STD = 0.02
"""The standard deviation of new tables and projections, as in GPT-2 and BERT."""
