"""Megatron-LM's and datatrove's own readers and writers; tests that use them are skipped where they are not installed.

Of Megatron-LM only the module of the format runs, unchanged; importing all of it takes seconds, and needs more than
reading files does. Both warn about what is missing, which is no concern of ours.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

__all__ = ["datatrove_reader", "datatrove_writes", "megatron_reader", "megatron_writes"]


def _imported(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


@cache
def _megatron() -> Any:
    folder = _imported("megatron").__path__[0]
    core, utils = ModuleType("megatron.core"), ModuleType("megatron.core.utils")
    core.__path__ = [f"{folder}/core"]
    utils.log_single_rank = lambda *_: None
    before = dict(sys.modules)
    sys.modules.update({"megatron.core": core, "megatron.core.utils": utils})
    try:
        return _imported("megatron.core.datasets.indexed_dataset")
    finally:
        for name in [name for name in sys.modules if name.startswith("megatron.core")]:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if name.startswith("megatron.core")})


def megatron_reader(prefix: Path, **options: Any) -> Any:
    return _megatron().IndexedDataset(str(prefix), **options)


def megatron_writes(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: type) -> None:
    """Documents of one or more sequences."""
    module = _megatron()
    builder = module.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        tokens = [token for sequence in document for token in sequence]
        builder.add_document(np.array(tokens, dtype=dtype), [len(sequence) for sequence in document])
    builder.finalize(f"{prefix}.idx")


def datatrove_reader(path: Path, seq_len: int, token_size: int) -> Any:
    module = _imported("datatrove.utils.dataset")
    return module.DatatroveFileDataset(str(path), seq_len, token_size=token_size, return_positions=True)


def datatrove_writes(
    folder: Path, name: str, documents: Sequence[Sequence[int]], token_size: int, **options: Any
) -> None:
    module = _imported("datatrove.pipeline.tokens.tokenizer")
    file = module.TokenizedFile(str(folder), name, token_size=token_size, **options)
    for document in documents:
        file.write(document, None)
    file.close()
