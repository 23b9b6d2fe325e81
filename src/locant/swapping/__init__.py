"""Another position encoding in a `transformers` model, through the points that `transformers` itself offers.

`swap.py` is the door; `rotary_point.py`, `attention_point.py` and `added_point.py` know one point each; `plan.py`
says which layer gets what, and how it is written down; `locant.checkpoints.load_swapped` reads it again.
"""

from locant.swapping.swap import Swap as Swap
from locant.swapping.swap import swap as swap
