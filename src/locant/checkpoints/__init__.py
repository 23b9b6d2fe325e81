"""Files of published models: explain and extend configurations, load GGUF files, and convert weights."""

from locant.checkpoints.gguf_model import load_gguf as load_gguf
from locant.checkpoints.layout import convert_layout as convert_layout
from locant.checkpoints.pretrained import load_swapped as load_swapped
