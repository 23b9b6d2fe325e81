"""locant: raw text to attention-ready tensors, with every position encoding behind one interface.

The public names are those of ``__init__.pyi``; each is imported when it is first used. Importing torch takes a second
and 200 MB, and the command line, before it knows what is asked for, and the workers of `prepare` do without.
"""

import lazy_loader

from locant._version import __version__ as __version__

ROOMS = {
    "attention", "checkpoints", "embedding", "errors", "formats", "lab", "models", "parallel", "positions", "text",
}  # fmt: skip

__getattr__, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
# What a type checker reads is the stub.
__all__ = [name for name in _names if name not in {*ROOMS, "__version__"}]  # pyright: ignore[reportUnsupportedDunderAll]
