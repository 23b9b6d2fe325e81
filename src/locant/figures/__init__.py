"""Draw pictures of encodings. The functions that draw import matplotlib."""

SIZES = {"d_model": 128, "num_heads": 8, "head_dim": 64, "max_seq_len": 128}
"""The sizes of an encoding that is drawn by name. They show the pattern, and single values are visible."""

GRID = {"height": 14, "width": 14}
"""The size of an encoding for grids that is drawn by name, for images of 224 x 224 pixels in patches of 16 x 16."""

TRAINED = 4_096
"""The trained length of scalings that are given by name."""

MAX_LENGTH = 4_096
"""The largest length to draw. At this length, a map of query x key has more values than a screen has pixels."""
