"""Other people's files: configurations explained and extended, and weights converted from one layout to another."""

from locant.checkpoints.layout import convert_layout as convert_layout
