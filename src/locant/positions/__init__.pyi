"""The names of this room. At run time each is imported when it is first used: see ``locant/__init__.py``."""

from . import scaling as scaling
from .base import EncodingInfo as EncodingInfo
from .base import ModelShape as ModelShape
from .base import PositionEncoding as PositionEncoding
from .distance_bias import DistanceBias as DistanceBias
from .encodings.alibi import ALiBi as ALiBi
from .encodings.cope import Cope as Cope
from .encodings.deberta import Deberta as Deberta
from .encodings.fire import Fire as Fire
from .encodings.kerple import Kerple as Kerple
from .encodings.learned import Learned as Learned
from .encodings.rotary import Rotary as Rotary
from .encodings.sandwich import Sandwich as Sandwich
from .encodings.shaw import Shaw as Shaw
from .encodings.sinusoidal import Sinusoidal as Sinusoidal
from .encodings.t5 import T5Bias as T5Bias
from .encodings.transformer_xl import TransformerXL as TransformerXL
from .encodings.xpos import XPos as XPos
from .pair_table import Pairs as Pairs
from .positions import Positions as Positions
from .registry import encoding as encoding
from .registry import register_encoding as register_encoding
from .temperature import Temperature as Temperature
