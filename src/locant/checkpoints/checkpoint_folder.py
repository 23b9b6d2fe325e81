"""The folder of a checkpoint in safetensors: its weights, their index and the other files.

Pickles (``.bin``, ``.pt``) are not opened, because opening one runs the code in it.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from locant.arguments import short_repr
from locant.checkpoints.config_source import CONFIG, read_json
from locant.errors import InputError
from locant.files import NewFile, flush, new_folder, require_new
from locant.spelling import dtype_name

INDEX = "model.safetensors.index.json"
WEIGHT_FILES = ("model.safetensors", "adapter_model.safetensors")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes of tables that need no conversion before computation, by their names in safetensors."""
LONGEST_NAME = 255
"""The longest file name on usual systems, in bytes."""
LENGTH = struct.Struct("<Q")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
COMPANIONS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".md")
"""Suffixes of files that belong to a checkpoint and do not depend on its layout, such as its tokenizer."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor, stored from byte `begin` to byte `end` of its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class Header:
    """The bytes before the tensors, unchanged, and the tensors in the order of the file."""

    raw: bytes
    tensors: tuple[TensorEntry, ...]


def read_headers(folder: Path) -> dict[str, Header]:
    """Return the header of each safetensors file by file name.

    Raise `InputError` if weights are missing, pickled or damaged, or if the index does not match the headers.
    """
    headers = {name: read_header(folder / name) for name in _weight_files(folder)}
    if (folder / INDEX).exists():
        _require_index(folder, headers)
    return headers


def read_header(path: Path) -> Header:
    """Read the header of a file. safetensors checks that every byte after it belongs to one tensor.

    A file holds the length of the header in eight bytes, the header as JSON, and the tensors:
    https://huggingface.co/docs/safetensors
    """
    if not path.is_file():
        raise InputError(f"got no file {path}", "use the checkpoint with all of its files")
    try:
        with safe_open(path, framework="np"), path.open("rb") as file:
            start = file.read(LENGTH.size)
            text = file.read(*LENGTH.unpack(start))
    except SafetensorError as error:
        raise InputError(f"{path} is not an intact safetensors file: {error}", "copy the file again") from None
    fields = json.loads(text)
    fields.pop("__metadata__", None)
    first = len(start) + len(text)
    tensors = [
        TensorEntry(
            name=name, dtype=entry["dtype"], shape=tuple(entry["shape"]),
            begin=first + entry["data_offsets"][0], end=first + entry["data_offsets"][1],
        )
        for name, entry in fields.items()
    ]  # fmt: skip
    return Header(raw=start + text, tensors=tuple(sorted(tensors, key=lambda each: (each.begin, each.end))))


class TensorFolder:
    """The tensors of a folder by name, mapped into memory. A file is opened when one of its tensors is requested.

    A mapped tensor is private, so changes to it stay in this process. It does not share its storage, so saving it does
    not save other tensors.

    Raises:
        InputError: the path is not a folder, or the folder has no safetensors, damaged safetensors, both a whole
            checkpoint and an index, or an invalid index.
    """

    def __init__(self, folder: Path | str) -> None:
        if not isinstance(folder, (str, Path)) or not str(folder):
            raise InputError(f"got {short_repr(folder)}, expected the folder of a model", "use '.' for the current one")
        self.folder = Path(folder)
        if not os.path.isdir(folder):  # noqa: PTH112  # pathlib raises if a name is too long
            got = f"got {short_repr(str(folder))}, which is not a folder: nothing is downloaded"
            raise InputError(got, "pass the path of the folder that the model was saved or downloaded to")
        files = _weight_files(self.folder)
        self.files: dict[str, str] = (
            _weight_map(self.folder)
            if (self.folder / INDEX).exists()
            else {tensor.name: file for file in files for tensor in read_header(self.folder / file).tensors}
        )
        """The file of each tensor, from the index if there is one. Files in the index are not opened."""
        self._entries: dict[str, dict[str, TensorEntry]] = {}

    def find(self, module: str, part: str = "weight") -> str | None:
        """Return the name of this module's tensor, after any prefix of the saved class, or None.

        If several names match, return the shortest, because the others are in nested models.
        """
        end = f"{module}.{part}"
        names = [name for name in self.files if name == end or name.endswith(f".{end}")]
        return min(names, key=lambda name: (name.count("."), name), default=None)

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of a tensor in its header."""
        file = self.files[name]
        if file not in self._entries:
            header = read_header(self.folder / file)
            self._entries[file] = {tensor.name: tensor for tensor in header.tensors}
        if name not in self._entries[file]:
            got = f"got {self.folder} with {name} in its index but not in {file}"
            raise InputError(got, "use the index and the files of one checkpoint")
        return self._entries[file][name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.entry(name).shape

    def tensor(self, name: str) -> Tensor:
        """Return the tensor, mapped into memory.

        Raises:
            InputError: the dtype does not allow computation, as in quantised weights, or the file lacks the tensor.
        """
        entry = self.entry(name)
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            expected = ", ".join(map(dtype_name, DTYPES))
            got = f"got {name} of dtype {dtype_name(entry.dtype)} in {self.folder}, expected one of {expected}"
            raise InputError(got, "use the model before it was quantised")
        if not entry.num_bytes:
            return torch.empty(entry.shape, dtype=dtype)
        path = self.folder / self.files[name]
        content = np.memmap(path, np.uint8, mode="c", offset=entry.begin, shape=(entry.num_bytes,))
        if content.ctypes.data % dtype.itemsize:  # a header of odd length
            content = np.array(content)
        return torch.from_numpy(content).view(dtype).view(entry.shape)


def companions(folder: Path, weights: Mapping[str, object]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the checkpoint's other files (not weights or configuration), and of unrelated files."""
    others = sorted(path for path in folder.iterdir() if path.name not in (CONFIG, *weights))
    belong = [
        path.name
        for path in others
        if path.is_file() and (path.suffix in COMPANIONS or path.stem.upper() in ("LICENSE", "NOTICE"))
    ]
    return tuple(belong), tuple(path.name for path in others if path.name not in belong)


@contextmanager
def rewrite_folder(
    folder: Path,
    output: Path,
    headers: Mapping[str, Header],
    write: Callable[[str, Header, NewFile], object],
    copied: Iterable[str],
    *,
    force: bool = False,
) -> Generator[Path, None, None]:
    """Create a new folder with the weight files that `write` writes, and copies of other files.

    The folder gets its name when the block has ended and all files are on the disk.
    """
    with new_folder(output, force=force) as new:
        for name, header in headers.items():
            with NewFile(new / name) as target:
                write(name, header, target)
                target.fsync()
                target.publish()
        for name in copied:
            shutil.copyfile(folder / name, new / name)
            flush(new / name)
        yield new


def require_output(output: Path, *, force: bool) -> None:
    """Raise `InputError` if the folder of a model cannot be written. `force` allows replacing the folder of a model."""
    if not (force and output.is_dir() and any(output.iterdir())):
        require_new(output)
    elif not (output / CONFIG).exists():
        got = f"got {output} to replace, which is not the folder of a model: it has no {CONFIG}"
        raise InputError(got, "use the name of a new folder")


def _weight_files(folder: Path) -> list[str]:
    files = [name for name in (*WEIGHT_FILES, INDEX) if (folder / name).exists()]
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if len(files) > 1:
        got = f"got {folder} with {' and '.join(files)}, expected one of them"
        raise InputError(got, "use a folder with one checkpoint")
    if not files and pickles:
        got = f"got {folder} with {pickles[0]}, a pickle, which can run any code when it is opened"
        save = "safetensors.torch.save_file(model.state_dict(), 'model.safetensors')"
        raise InputError(got, f"write the same weights as safetensors: model.save_pretrained(folder), or {save}")
    if not files:
        raise InputError(f"got {folder} without {WEIGHT_FILES[0]} or {INDEX}", "use a folder with safetensors")
    return sorted(set(_weight_map(folder).values())) if files == [INDEX] else files


def _weight_map(folder: Path) -> dict[str, str]:
    index = read_json(folder / INDEX)
    weights = index.get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(file, str) for file in weights.values()):
        raise InputError(
            f"got {folder / INDEX} without a weight_map of names to files", "use the index of this checkpoint"
        )
    for file in set(weights.values()):
        if Path(file).name != file or not file.endswith(".safetensors") or len(file) > LONGEST_NAME:
            got = f"got {short_repr(file)} in {folder / INDEX}, expected a safetensors file in the same folder"
            raise InputError(got, "use the index of this checkpoint")
    if not isinstance(index.get("metadata", {}), dict):
        raise InputError(
            f"got {folder / INDEX} with metadata that is not an object", "use the index of this checkpoint"
        )
    return weights


def _require_index(folder: Path, headers: Mapping[str, Header]) -> None:
    """Raise `InputError` if the index and the files do not agree, because they then belong to different checkpoints."""
    in_index = set(_weight_map(folder).items())
    in_files = {(tensor.name, file) for file, header in headers.items() for tensor in header.tensors}
    if in_index != in_files:
        name, file = min(in_index ^ in_files)
        where = f"in {file} but not in its index" if (name, file) in in_files else f"in its index but not in {file}"
        raise InputError(f"got {folder} with {name} {where}", "use the index and the files of one checkpoint")
