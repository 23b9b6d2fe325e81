"""Pictures of encodings. matplotlib is imported by the functions that draw."""

SIZES = {"d_model": 128, "num_heads": 8, "head_dim": 64, "max_seq_len": 128}
"""Of an encoding that is drawn by its name: large enough for the pattern, small enough to see single values."""

TRAINED = 4_096
"""The trained length, for scalings by name."""

MAX_LENGTH = 4_096
"""A map of query x key at this length has as many values as a screen has pixels, and then some."""
