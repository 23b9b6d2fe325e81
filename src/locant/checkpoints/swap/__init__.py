"""Another position encoding in a `transformers` model, through the points that `transformers` itself offers.

`handle.py` is the door; `rotary_point.py`, `attention_point.py` and `embedding_point.py` know one point each; `plan.py`
says which layer gets what, `saving.py` how it is written down, and `loading.py` reads it again.
"""

from locant.checkpoints.swap.handle import Swap as Swap
from locant.checkpoints.swap.handle import swap as swap
from locant.checkpoints.swap.loading import load_swapped as load_swapped

__all__ = ["Swap", "load_swapped", "swap"]
