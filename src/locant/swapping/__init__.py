"""Replace the position encoding of a `transformers` model, through the extension points of `transformers`.

Read `swap.py` first, which has the public function, then what it calls:

1. `model_points.py` finds the points of a model at which positions enter it: `rotary_point.py` its rotary modules,
   `attention_point.py` its attention modules, `added_point.py` its tables of positions and T5's bias.
2. `plan.py` assigns an encoding to every layer, and writes the assignment into the configuration.
3. `routes.py` chooses how each layer gets its encoding, attaches it and describes it. `new_encoding.py` lets the model
   hold the encoding. `attention_function.py` is called in the attention of the model, and `token_places.py` passes it
   the positions of the tokens. `forward_arguments.py` reads the arguments of a model by name.

`locant.checkpoints.load_swapped` loads a saved model again.
"""

from locant.swapping.swap import Swap as Swap
from locant.swapping.swap import swap as swap
