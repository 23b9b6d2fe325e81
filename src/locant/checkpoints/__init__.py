"""Other people's files: configurations of published models, and what they say about position."""

from locant.checkpoints.architectures import encoding_from_config as encoding_from_config
from locant.checkpoints.architectures import layer_types as layer_types
from locant.checkpoints.layout import convert_layout as convert_layout
