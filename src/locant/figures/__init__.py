"""Pictures of encodings. matplotlib is imported by the functions that draw."""

SIZES = {"d_model": 128, "num_heads": 8, "head_dim": 64, "max_seq_len": 128}
"""The sizes of an encoding that is drawn by name: large enough for the pattern, small enough to see single values."""

GRID = {"height": 14, "width": 14}
"""The size of an encoding of rows and columns that is drawn by name: 224 x 224 pixels in patches of 16."""

TRAINED = 4_096
"""The trained length of scalings that are given by name."""

MAX_LENGTH = 4_096
"""The largest length. A map of query x key at this length has more values than a screen has pixels."""
