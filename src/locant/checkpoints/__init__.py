"""Other people's files: configurations explained and extended, weights in another layout, models with other tokens."""

from locant.checkpoints.layout import convert_layout as convert_layout
from locant.checkpoints.pretrained import load_swapped as load_swapped
from locant.checkpoints.vocabulary import Change as Change
from locant.checkpoints.vocabulary import add_tokens as add_tokens
from locant.checkpoints.vocabulary import keep_tokens as keep_tokens
