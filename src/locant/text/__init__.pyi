"""The public names of `locant.text`. Each is imported when it is first used: see ``locant/__init__.py``."""

from . import prepare as prepare
from . import reading as reading
from . import store as store
from . import tokenizer as tokenizer
from . import windows as windows
from .reading import read_texts as read_texts
from .reading import sample_text as sample_text
from .store import TokenStore as TokenStore
from .tokenizer import Tokenizer as Tokenizer
from .windows import IGNORED_TARGET as IGNORED_TARGET
from .windows import Batch as Batch
from .windows import BatchSampler as BatchSampler
from .windows import BytePatches as BytePatches
from .windows import Loader as Loader
from .windows import Windows as Windows
