"""Replace the position encoding of a `transformers` model, through the extension points of `transformers`.

Read `swap.py` first, which has the public function, and then the files that it uses:

1. `model_points.py` finds the points at which positions enter a model. `rotary_point.py` handles rotary modules,
   `attention_point.py` handles attention modules, and `added_point.py` handles tables of positions and T5's bias.
2. `plan.py` assigns an encoding to every layer, and writes the assignment into the configuration.
3. `routes.py` chooses how each layer gets its encoding, attaches it and describes it. `new_encoding.py` lets the model
   hold the encoding. The model's attention calls `attention_function.py`, and `token_places.py` passes the positions of
   the tokens to it. `forward_arguments.py` reads the arguments of a model by name.

`locant.checkpoints.load_swapped` loads a saved model again.
"""

from locant.swapping.swap import Swap as Swap
from locant.swapping.swap import swap as swap
