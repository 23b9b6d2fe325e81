"""Other people's files: configurations explained and extended, and weights converted from one layout to another.

`swap` has a folder of its own here; `locant.swap` is its door.
"""

from locant.checkpoints.layout import convert_layout as convert_layout
from locant.checkpoints.swap.saving import load_swapped as load_swapped
