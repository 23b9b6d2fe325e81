"""The public names. At run time each is imported when it is first used: see ``__init__.py``."""

from . import attention as attention
from . import checkpoints as checkpoints
from . import embedding as embedding
from . import errors as errors
from . import formats as formats
from . import lab as lab
from . import models as models
from . import parallel as parallel
from . import positions as positions
from . import scaling as scaling
from . import text as text
from ._version import __version__ as __version__
from .attention import KVCache, PagedKVCache, StaticKVCache, attend
from .embedding import InputEmbedding, NGramEmbedding, PerLayerEmbedding, SegmentEmbedding, TokenEmbedding
from .engines.gguf import encoding_from_gguf
from .engines.kv_reuse import move_cache
from .errors import InputError, LocantError, RangeError, ShapeError
from .figures.plot import plot
from .kernels.norm_rotary import HeadNorm
from .models import encoding_from_config, register_architecture
from .positions import (
    ALiBi,
    ContinuousGridBias,
    Convolutional,
    Cope,
    Deberta,
    DecomposedBias,
    DistanceBias,
    DualChunk,
    Fire,
    Fox,
    GridBias,
    Inkling,
    Kerple,
    Learned,
    LearnedGrid,
    PositionEncoding,
    Positions,
    ReRoPE,
    Rotary,
    Sandwich,
    SelfExtend,
    Shaw,
    Sinusoidal,
    T5Bias,
    TransformerXL,
    XPos,
    encoding,
    register_encoding,
)
from .probing.probe import probe
from .swapping import swap
from .text import Tokenizer, TokenStore, Windows
from .text.prepare import prepare

__all__ = [
    "ALiBi",
    "ContinuousGridBias",
    "Convolutional",
    "Cope",
    "Deberta",
    "DecomposedBias",
    "DistanceBias",
    "DualChunk",
    "Fire",
    "Fox",
    "GridBias",
    "HeadNorm",
    "Inkling",
    "InputEmbedding",
    "InputError",
    "KVCache",
    "Kerple",
    "Learned",
    "LearnedGrid",
    "LocantError",
    "NGramEmbedding",
    "PagedKVCache",
    "PerLayerEmbedding",
    "PositionEncoding",
    "Positions",
    "RangeError",
    "ReRoPE",
    "Rotary",
    "Sandwich",
    "SegmentEmbedding",
    "SelfExtend",
    "ShapeError",
    "Shaw",
    "Sinusoidal",
    "StaticKVCache",
    "T5Bias",
    "TokenEmbedding",
    "TokenStore",
    "Tokenizer",
    "TransformerXL",
    "Windows",
    "XPos",
    "attend",
    "encoding",
    "encoding_from_config",
    "encoding_from_gguf",
    "move_cache",
    "plot",
    "prepare",
    "probe",
    "register_architecture",
    "register_encoding",
    "scaling",
    "swap",
]
