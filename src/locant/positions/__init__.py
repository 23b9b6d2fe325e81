"""Where tokens stand, and every way to tell a model so.

`where` holds `Positions`, `base` the three doors, `angles` the exact cosines, `scaling` the stretched frequencies; each
encoding has a file of its own, and `catalog` lists them by name.
"""

from locant.positions import scaling as scaling
from locant.positions.alibi import ALiBi as ALiBi
from locant.positions.base import PositionEncoding as PositionEncoding
from locant.positions.catalog import encoding as encoding
from locant.positions.cope import Cope as Cope
from locant.positions.deberta import Deberta as Deberta
from locant.positions.fire import Fire as Fire
from locant.positions.kerple import Kerple as Kerple
from locant.positions.learned import Learned as Learned
from locant.positions.positions import Positions as Positions
from locant.positions.rotary import Rotary as Rotary
from locant.positions.sandwich import Sandwich as Sandwich
from locant.positions.shaw import Shaw as Shaw
from locant.positions.sinusoidal import Sinusoidal as Sinusoidal
from locant.positions.t5 import T5Bias as T5Bias
from locant.positions.transformer_xl import TransformerXL as TransformerXL
from locant.positions.xpos import XPos as XPos
