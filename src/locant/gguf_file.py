"""Find GGUF files, and read their metadata and tensors with the package `gguf`.

Everything that reads a model from a path calls `find_gguf` first, so a GGUF file is a model wherever a folder is one.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from locant.arguments import short_repr
from locant.errors import InputError
from locant.extras import require
from locant.shell import shell_path

SUFFIX = ".gguf"
MAGIC = b"GGUF"
CONFIG, SAFETENSORS = "config.json", "*.safetensors"
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
"""The end of the name of one of several files into which `llama-gguf-split` has split a model."""
PIECE = re.compile(r"\.gguf[.\-_]?(part|split|piece)?[.\-_]?[0-9a-z]{1,5}$", re.IGNORECASE)
"""The end of the name of a piece of the bytes of a file."""
PROJECTOR = "mmproj"
"""The beginning of the name of a file with only the part of a model that reads images or sound."""

HEADER = "the header"
MOST_MISSING = 4
"""The number of missing files that an error names."""
UNQUANTISED = {"F16", "BF16", "F32", "F64"}
_SHARED = RLock()
"""A lock for the time in which functions of the package `gguf` are replaced, so that threads restore them in order."""
WHOLE = "use a whole file, as llama.cpp loads it"
OTHER_KINDS = {
    "adapter": ("an adapter, which changes a model in another file", "merge it into its model with llama-export-lora"),
    PROJECTOR: ("the part of a model that reads images or sound", "use the file of its language model"),
    "imatrix": ("statistics for a quantisation, without a model", "use the file of the model"),
}
"""The content of files whose ``general.type`` is not ``model``, and the remedy."""


def find_gguf(path: Path | str) -> Path | None:
    """Return the GGUF file that a path means, or ``None`` if it means something else.

    A path means the file itself, which may be missing, or the only GGUF file in a folder without safetensors.
    Projectors (``mmproj-...``) are not counted. ``~`` is the home folder.

    Raises:
        InputError: a folder holds several GGUF files, or the path is a piece of a file.

    >>> find_gguf("model"), find_gguf("model/tiny.gguf").name
    (None, 'tiny.gguf')
    """
    path = Path(os.path.expanduser(path))  # noqa: PTH111  # pathlib raises if the user is unknown
    if not os.path.isdir(path):  # noqa: PTH112  # pathlib raises if a name is too long
        if path.suffix.lower() == SUFFIX:
            return path
        if PIECE.search(path.name) and os.path.isfile(path):  # noqa: PTH113
            whole = path.with_name(path.name[: path.name.lower().rindex(SUFFIX) + len(SUFFIX)])
            got = f"got {path}, a piece of a GGUF file"
            raise InputError(got, f"join the pieces in their order: cat {shell_path(whole)}.* > {shell_path(whole)}")
        return None
    files = sorted(each for each in path.iterdir() if each.suffix.lower() == SUFFIX)
    models = [each for each in files if not each.name.lower().startswith(PROJECTOR)] or files
    if not models or any(path.glob(SAFETENSORS)):
        return None
    shards = [each for each in models if SHARD.search(each.name)]
    if len(models) > 1 and len(shards) < len(models):
        names = ", ".join(each.name for each in models[:8])
        raise InputError(f"got {path} with {len(models)} GGUF files, {names}", f"pass one of them, such as {models[0]}")
    return models[0]


def open_gguf(path: Path | str) -> GgufFile:
    """Open a GGUF file, and read its header, which is kept for the next call."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(f"got no file {path}", "pass the path of a .gguf file")
    state = path.stat()
    return _open(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1)  # the header of a large vocabulary takes a second, and several functions need it
def _open(path: Path, modified: int, size: int) -> GgufFile:
    return GgufFile(path)


class GgufFile:
    """The metadata and tensors of a GGUF file. A wrong value raises an `InputError` that names its key."""

    def __init__(self, path: Path | str) -> None:
        gguf = require("gguf", "reading GGUF files")
        if not Path(path).is_file():
            raise InputError(f"got no file {path}", "pass the path of a .gguf file")
        self.path = Path(path)
        with self.path.open("rb") as file:
            start = file.read(64)
        if start[:4] != MAGIC:
            pointer = start.startswith(b"version https://git-lfs")
            which = "a pointer of Git LFS" if pointer else f"whose first bytes are {short_repr(start[:8])}"
            raise InputError(f"got {path}, {which}, not a GGUF file", "git lfs pull" if pointer else WHOLE)

        class Reader(gguf.GGUFReader):
            """The reader with a plain array of the same bytes: to slice a `np.memmap` takes twice as long."""

            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

        with self._read_as(HEADER):
            self._reader = Reader(path)
            self.tensors: Mapping[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = self._text("general.architecture")

    @contextmanager
    def _read_as(self, what: str) -> Generator[None]:
        """Raise `InputError` with the name of the part of the file that cannot be read."""
        try:
            yield
        except Exception as error:  # unexpected bytes can make the reader raise anything
            why = f"where {what} cannot be read: {type(error).__name__}, {short_repr(str(error))}"
            if what == HEADER and "reshape" in str(error):  # the rest of the file is smaller than the next tensor
                why = f"which ends inside its tensors, after {self.path.stat().st_size:,} bytes"
            raise InputError(f"got {self.path}, {why}", "download or convert the file again") from error

    def value(self, key: str) -> Any:
        """Return the value of a key, or ``None`` if the file does not have the key."""
        field = self._reader.fields.get(key)
        if field is None:
            return None
        with self._read_as(f"the key {key}"):
            return field.contents()

    def _text(self, key: str, default: str | None = None) -> str:
        value = self.value(key)
        value = default if value is None else value
        if not isinstance(value, str) or not value:
            raise self.wrong(key, value, "a name")
        return value

    def wrong(self, key: str, value: object, expected: str) -> InputError:
        """Return the error for a key that has a wrong value or no value."""
        got = f"got {self.path} without {key}" if value is None else f"got {self.path} with {key}={short_repr(value)}"
        return InputError(f"{got}, expected {expected}", "convert the model again, or use a file that llama.cpp loads")

    def dequantise(self, name: str) -> np.ndarray:
        """Return a tensor as float32."""
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        with self._read_as(f"the tensor {name}"):
            return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    @contextmanager
    def shared_with_transformers(self) -> Generator[None]:
        """Let `transformers` use the header that is read already, and one table of names, until the block ends.

        Otherwise it reads the header again for the configuration, the weights and the tokenizer, and makes the same
        table once for each module of the model. For SmolLM2-135M, both take three quarters of the time of loading.
        """
        import gguf

        def read(path: Any, mode: Any = "r") -> Any:
            return self._reader if mode == "r" and self.path.samefile(path) else reader(path, mode)

        module: Any = gguf
        with _SHARED:
            reader, names = module.GGUFReader, module.get_tensor_name_map
            module.GGUFReader, module.get_tensor_name_map = read, cache(names)
            try:
                yield
            finally:
                module.GGUFReader, module.get_tensor_name_map = reader, names

    def require_model(self) -> None:
        """Raise `InputError` if the file does not hold a whole model: a shard, an adapter, or a projector."""
        count = self.value("split.count")
        if (isinstance(count, int) and count > 1) or SHARD.search(self.path.name):
            raise self._shard_error(count)
        kind = PROJECTOR if self.architecture == "clip" else str(self.value("general.type") or "model")
        if kind in OTHER_KINDS:
            what, remedy = OTHER_KINDS[kind]
            raise InputError(f"got {self.path}, {what}", remedy)

    def _shard_error(self, count: int | None) -> InputError:
        """Return the error for one of several files, with the call that merges them or the names that are missing."""
        name = SHARD.search(self.path.name)
        number, count = (int(name[1]), int(name[2])) if name else (int(self.value("split.no") or 0) + 1, count)
        got = f"got {self.path}, file {number} of {count} of a split model, which transformers cannot read"
        shards = [self.path]
        if name:
            stem, numbers = self.path.name[: name.start()], range(1, int(name[2]) + 1)
            shards = [self.path.with_name(f"{stem}-{each:05}-of-{name[2]}.gguf") for each in numbers]
        missing = [shard.name for shard in shards if not shard.is_file()]
        listed = ", ".join(missing[:MOST_MISSING]) + (" ..." if len(missing) > MOST_MISSING else "")
        merge = f"merge the files: llama-gguf-split --merge {shell_path(shards[0])} whole.gguf"
        return InputError(got, f"add the missing {listed}, then {merge}" if missing else merge)

    @property
    def pretrained_arguments(self) -> dict[str, Any]:
        """The arguments of `from_pretrained`. The path is absolute, because a name is also searched in other places."""
        path = self.path.absolute()
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": str(path), "local_files_only": True}

    @property
    def num_weights(self) -> int:
        """The number of weights in all tensors."""
        return sum(int(tensor.n_elements) for tensor in self.tensors.values())

    def types(self, *names: str) -> dict[str, float]:
        """Return the share of the weights that each type of the file stores, the largest first.

        Args:
            names: the tensors to count. Default: all.
        """
        counts = Counter[str]()
        for name in names or self.tensors:
            tensor = self.tensors[name]
            counts[tensor.tensor_type.name] += int(tensor.n_elements)
        total = sum(counts.values()) or 1
        return {name: count / total for name, count in counts.most_common()}
