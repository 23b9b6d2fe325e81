"""The real llama.cpp: the library inside xllamacpp, called by the declarations that llama-cpp-py-sync generates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

__all__ = ["LlamaCpp", "rope_type"]

xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
bindings = pytest.importorskip("llama_cpp_py_sync._cffi_bindings", reason="llama-cpp-py-sync is not installed")

ffi = bindings.get_ffi()
library = ffi.dlopen(str(Path(xllamacpp.__file__).with_name("xllamacpp.abi3.so")))


@ffi.callback("void(enum ggml_log_level, const char *, void *)")
def _quiet(level: Any, text: Any, data: Any) -> None:
    pass


library.llama_log_set(_quiet, ffi.NULL)
library.llama_backend_init()

ROPE_TYPES = {-1: "none", 0: "interleaved", 2: "half", 8: "several axes", 40: "several axes"}


def rope_type(path: Path) -> str | None:
    """Which dimensions are paired for the architecture of a file of metadata; ``None`` where it is not loaded."""
    options = library.llama_model_default_params()
    options.vocab_only = True
    model = library.llama_model_load_from_file(str(path).encode(), options)
    if model == ffi.NULL:
        return None
    found = ROPE_TYPES[library.llama_model_rope_type(model)]
    library.llama_model_free(model)
    return found


class LlamaCpp:
    """A model with its context, both freed at the end of the block; caches are of float32."""

    def __init__(self, path: Path, n_ctx: int, **options: Any) -> None:
        of_model = library.llama_model_default_params()
        of_model.use_extra_bufts = False
        self.model = library.llama_model_load_from_file(str(path).encode(), of_model)
        assert self.model != ffi.NULL, f"llama.cpp does not load {path}"
        of_context = library.llama_context_default_params()
        of_context.n_ctx = of_context.n_batch = of_context.n_ubatch = n_ctx
        of_context.n_threads = of_context.n_threads_batch = 1
        of_context.flash_attn_type = of_context.type_k = of_context.type_v = 0
        for name, value in options.items():
            setattr(of_context, name, value)
        self.context = library.llama_init_from_model(self.model, of_context)

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        library.llama_free(self.context)
        library.llama_model_free(self.model)

    @property
    def vocab_size(self) -> int:
        """The number of logits of each token."""
        return library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))

    def logits(self, ids: Sequence[int], start: int = 0, *, keep: bool = False) -> np.ndarray:
        """Of every token, the first of which stands at `start`. With `keep`, tokens that were read before are seen."""
        if not keep:
            library.llama_memory_clear(library.llama_get_memory(self.context), True)
        batch = library.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for slot, token in enumerate(ids):
            batch.token[slot], batch.pos[slot] = int(token), start + slot
            batch.n_seq_id[slot], batch.seq_id[slot][0], batch.logits[slot] = 1, 0, 1
        assert library.llama_decode(self.context, batch) == 0
        content = ffi.buffer(library.llama_get_logits(self.context), len(ids) * self.vocab_size * 4)
        values = np.frombuffer(content, np.float32).reshape(len(ids), self.vocab_size).copy()
        library.llama_batch_free(batch)
        return values
