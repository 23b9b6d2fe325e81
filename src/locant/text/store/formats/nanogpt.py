"""nanoGPT's format, ``train.bin``: all tokens, and nothing else.

nanoGPT reads it with ``np.memmap("train.bin", dtype=np.uint16)``. Nothing in the file says what its dtype is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from locant.errors import InputError
from locant.text.store.formats.base import ExportSource, StoreFormat, StoreOptions, head_of, only_file
from locant.text.store.token_files import require_file

__all__ = ["NanogptFormat"]

HEADER_OF_LLM_C = 20240520
"""How the files of llm.c and modded-nanogpt begin, as int32: their tokens come after a header of 1 024 bytes."""


class NanogptFormat(StoreFormat):
    """A file of tokens: what nanoGPT's ``prepare.py`` writes."""

    def __init__(self, path: Path, options: StoreOptions) -> None:
        file = only_file(path, ".bin")
        require_file(file, "the file that nanoGPT's prepare.py wrote, such as train.bin")
        if head_of(file)[:4] == HEADER_OF_LLM_C.to_bytes(4, "little"):
            raise InputError(f"{file} begins with the header of llm.c", "the file without its first 1024 bytes")
        super().__init__([file], options.token_dtype, options)

    @classmethod
    def write(cls, source: ExportSource, folder: Path) -> np.dtype:
        source.write_tokens(folder / "train.bin")
        return source.dtype
