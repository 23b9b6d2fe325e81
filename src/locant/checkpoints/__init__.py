"""Files of published models: explain and extend configurations, and convert weights to another layout."""

from locant.checkpoints.layout import convert_layout as convert_layout
from locant.checkpoints.pretrained import load_swapped as load_swapped
