"""locant: raw text to attention-ready tensors, with every position encoding behind one interface."""

from locant._version import __version__ as __version__
from locant.attention import KVCache, attend
from locant.checkpoints import encoding_from_config
from locant.embedding import InputEmbedding, SegmentEmbedding, TokenEmbedding
from locant.errors import InputError, LocantError, RangeError, ShapeError
from locant.positions import (
    ALiBi,
    Cope,
    Deberta,
    Fire,
    Kerple,
    Learned,
    PositionEncoding,
    Positions,
    Rotary,
    Sandwich,
    Shaw,
    Sinusoidal,
    T5Bias,
    TransformerXL,
    XPos,
    encoding,
    scaling,
)
from locant.text import Tokenizer, Windows

__all__ = [
    "ALiBi",
    "Cope",
    "Deberta",
    "Fire",
    "InputEmbedding",
    "InputError",
    "KVCache",
    "Kerple",
    "Learned",
    "LocantError",
    "PositionEncoding",
    "Positions",
    "RangeError",
    "Rotary",
    "Sandwich",
    "SegmentEmbedding",
    "ShapeError",
    "Shaw",
    "Sinusoidal",
    "T5Bias",
    "TokenEmbedding",
    "Tokenizer",
    "TransformerXL",
    "Windows",
    "XPos",
    "attend",
    "encoding",
    "encoding_from_config",
    "scaling",
]
