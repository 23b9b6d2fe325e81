"""Positions of tokens, and every encoding of them.

`positions` holds `Positions`, `base` the class of all encodings, `encodings` a file for each, `registry` finds them by
name; `angles` has the exact cosines, `scaling` the scaled frequencies.
"""

from locant.positions import scaling as scaling
from locant.positions.base import EncodingInfo as EncodingInfo
from locant.positions.base import ModelShape as ModelShape
from locant.positions.base import PositionEncoding as PositionEncoding
from locant.positions.distance_bias import DistanceBias as DistanceBias
from locant.positions.encodings.alibi import ALiBi as ALiBi
from locant.positions.encodings.cope import Cope as Cope
from locant.positions.encodings.deberta import Deberta as Deberta
from locant.positions.encodings.fire import Fire as Fire
from locant.positions.encodings.kerple import Kerple as Kerple
from locant.positions.encodings.learned import Learned as Learned
from locant.positions.encodings.rotary import Rotary as Rotary
from locant.positions.encodings.sandwich import Sandwich as Sandwich
from locant.positions.encodings.shaw import Shaw as Shaw
from locant.positions.encodings.sinusoidal import Sinusoidal as Sinusoidal
from locant.positions.encodings.t5 import T5Bias as T5Bias
from locant.positions.encodings.transformer_xl import TransformerXL as TransformerXL
from locant.positions.encodings.xpos import XPos as XPos
from locant.positions.positions import Positions as Positions
from locant.positions.registry import encoding as encoding
from locant.positions.registry import register_encoding as register_encoding
