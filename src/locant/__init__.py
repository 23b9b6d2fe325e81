"""locant: raw text to attention-ready tensors, with every position encoding behind one interface."""

from locant._version import __version__ as __version__
from locant.attention import KVCache, attend
from locant.embedding import InputEmbedding, SegmentEmbedding, TokenEmbedding
from locant.errors import InputError, LocantError, RangeError, ShapeError
from locant.positions import (
    ALiBi,
    Learned,
    PositionEncoding,
    Positions,
    Rotary,
    Sinusoidal,
    T5Bias,
    encoding,
)
from locant.text import Tokenizer, Windows

__all__ = [
    "ALiBi",
    "InputEmbedding",
    "InputError",
    "KVCache",
    "Learned",
    "LocantError",
    "PositionEncoding",
    "Positions",
    "RangeError",
    "Rotary",
    "SegmentEmbedding",
    "ShapeError",
    "Sinusoidal",
    "T5Bias",
    "TokenEmbedding",
    "Tokenizer",
    "Windows",
    "attend",
    "encoding",
]
