"""Other people's files: configurations explained and extended, weights in another layout."""

from locant.checkpoints.layout import convert_layout as convert_layout
from locant.checkpoints.pretrained import load_swapped as load_swapped
