"""Replace the position encoding of a `transformers` model, through the extension points of `transformers`.

`swap.py` has the public function. `rotary_point.py`, `attention_point.py` and `added_point.py` each implement one kind
of extension point. `plan.py` assigns an encoding to every layer and writes the assignment into the configuration.
`locant.checkpoints.load_swapped` loads a saved model again.
"""

from locant.swapping.swap import Swap as Swap
from locant.swapping.swap import swap as swap
