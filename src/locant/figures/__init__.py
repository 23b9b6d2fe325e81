"""Pictures of encodings. matplotlib is imported by the functions that draw."""

SIZES = {"d_model": 128, "num_heads": 8, "head_dim": 64, "max_seq_len": 128}
"""Of an encoding that is drawn by its name: large enough for the pattern, small enough to see single values."""

GRID = {"height": 14, "width": 14}
"""Of an encoding of rows and columns that is drawn by its name: an image of 224 x 224 pixels in patches of 16."""

TRAINED = 4_096
"""The trained length, for scalings by name."""

MAX_LENGTH = 4_096
"""A map of query x key at this length has as many values as a screen has pixels, and then some."""
