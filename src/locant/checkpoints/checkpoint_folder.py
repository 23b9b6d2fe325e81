"""What lies in the folder of a checkpoint in safetensors: its weights, their index, and what belongs to them.

Pickles (``.bin``, ``.pt``) are not opened: opening one runs what is in it.
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

from locant.arguments import shown
from locant.checkpoints.config_source import CONFIG, read_json
from locant.errors import InputError
from locant.files import NewFile, flush, new_folder, require_new
from locant.spelling import dtype_name

INDEX = "model.safetensors.index.json"
WHOLE = ("model.safetensors", "adapter_model.safetensors")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Those of tables that can be computed with as they are, by their names in safetensors."""
LONGEST_NAME = 255
"""Bytes of the name of a file, on any usual system."""
LENGTH = struct.Struct("<Q")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
COMPANIONS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".md")
"""Kinds of files that belong to a checkpoint and do not depend on its layout, such as its tokenizer."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor: its bytes lie from `begin` to `end`, counted from the start of the file."""

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
    """What stands before the tensors, byte for byte, and the tensors in the order of the file."""

    raw: bytes
    tensors: tuple[TensorEntry, ...]


def headers_of(folder: Path) -> dict[str, Header]:
    """The header of each safetensors file, by the name of the file; the index agrees with them."""
    headers = {name: read_header(folder / name) for name in _weight_files(folder)}
    if (folder / INDEX).exists():
        _require_index(folder, headers)
    return headers


def read_header(path: Path) -> Header:
    """The header of a file, of which safetensors itself has checked that every byte belongs to one tensor.

    Eight bytes with its length, the header as JSON, and the tensors: https://huggingface.co/docs/safetensors
    """
    if not path.is_file():
        raise InputError(f"got no file {path}", "the checkpoint with all of its files")
    try:
        with safe_open(path, framework="np"), path.open("rb") as file:
            start = file.read(LENGTH.size)
            text = file.read(*LENGTH.unpack(start))
    except SafetensorError as error:
        raise InputError(f"{path} is no intact safetensors file: {error}", "a fresh copy of the file") from None
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
    """The tensors of a folder by name, mapped into memory. Only the files of those that are asked for are opened.

    A mapped tensor is private: what is written into it stays in this process. Its storage is its own, so that saving it
    saves no more than itself.

    Raises:
        InputError: no folder, no safetensors in it, or an index that is none.
    """

    def __init__(self, folder: Path | str) -> None:
        if not isinstance(folder, (str, Path)) or not str(folder):
            raise InputError(f"got {shown(folder)}, expected the folder of a model", "'.' for the current one")
        self.folder = Path(folder)
        if not os.path.isdir(folder):  # noqa: PTH112  # pathlib raises where a name is too long
            got = f"got {shown(str(folder))}, which is no folder: nothing is fetched from the network"
            raise InputError(got, "the path of the folder that the model was saved or downloaded to")
        files = _weight_files(self.folder)
        self.files: dict[str, str] = (
            _weight_map(self.folder)
            if (self.folder / INDEX).exists()
            else {tensor.name: file for file in files for tensor in read_header(self.folder / file).tensors}
        )
        """Which file each tensor is in, by the index where there is one; files that it names are not opened."""
        self._entries: dict[str, dict[str, TensorEntry]] = {}

    def find(self, module: str, part: str = "weight") -> str | None:
        """The tensor of this module, whatever prefix the saved class gives it; the shortest, as others are nested."""
        end = f"{module}.{part}"
        found = [name for name in self.files if name == end or name.endswith(f".{end}")]
        return min(found, key=lambda name: (name.count("."), name), default=None)

    def entry(self, name: str) -> TensorEntry:
        """What the header says of a tensor."""
        file = self.files[name]
        if file not in self._entries:
            header = read_header(self.folder / file)
            self._entries[file] = {tensor.name: tensor for tensor in header.tensors}
        if name not in self._entries[file]:
            got = f"got {self.folder} with {name} in its index and not in {file}"
            raise InputError(got, "the index and the files of one checkpoint")
        return self._entries[file][name]

    def tensor(self, name: str) -> Tensor:
        """The tensor, mapped into memory.

        Raises:
            InputError: a dtype that tables cannot be computed with, such as one of quantised weights.
        """
        entry = self.entry(name)
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            known = ", ".join(map(dtype_name, DTYPES))
            got = f"got {name} of dtype {dtype_name(entry.dtype)} in {self.folder}, expected one of {known}"
            raise InputError(got, "the model before it was quantised")
        if not entry.num_bytes:
            return torch.empty(entry.shape, dtype=dtype)
        path = self.folder / self.files[name]
        content = np.memmap(path, np.uint8, mode="c", offset=entry.begin, shape=(entry.num_bytes,))
        if content.ctypes.data % dtype.itemsize:  # a header of odd length
            content = np.array(content)
        return torch.from_numpy(content).view(dtype).view(entry.shape)


def companions(folder: Path, weights: Mapping[str, object]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of other files, but for the configuration: those that belong to the checkpoint, and the rest."""
    others = sorted(path for path in folder.iterdir() if path.name not in (CONFIG, *weights))
    belong = [
        path.name
        for path in others
        if path.is_file() and (path.suffix in COMPANIONS or path.stem.upper() in ("LICENSE", "NOTICE"))
    ]
    return tuple(belong), tuple(path.name for path in others if path.name not in belong)


@contextmanager
def rewritten(
    folder: Path,
    output: Path,
    headers: Mapping[str, Header],
    write: Callable[[str, Header, NewFile], object],
    copied: Iterable[str],
    *,
    force: bool = False,
) -> Generator[Path, None, None]:
    """A new folder with each file of weights as `write` writes it, and copies of other files.

    It has its name when what is written besides is on the disk as well.
    """
    with new_folder(output, force=force) as new:
        for name, header in headers.items():
            with NewFile(new / name) as target:
                write(name, header, target)
                target.settle()
                target.publish()
        for name in copied:
            shutil.copyfile(folder / name, new / name)
            flush(new / name)
        yield new


def require_output(output: Path, *, force: bool) -> None:
    """Raise where the folder of a model cannot be written; with `force`, one that is there may be replaced."""
    if not (force and output.is_dir() and any(output.iterdir())):
        require_new(output)
    elif not (output / CONFIG).exists():
        got = f"got {output} to replace, which is no folder of a model: it has no {CONFIG}"
        raise InputError(got, "the name of a new folder")


def _weight_files(folder: Path) -> list[str]:
    there = [name for name in (*WHOLE, INDEX) if (folder / name).exists()]
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if len(there) > 1:
        raise InputError(f"got {folder} with {' and '.join(there)}, expected one of them", "a folder of one checkpoint")
    if not there and pickles:
        got = f"got {folder} with {pickles[0]}, a pickle, which can run anything when it is opened"
        save = "safetensors.torch.save_file(model.state_dict(), 'model.safetensors')"
        raise InputError(got, f"write the same weights as safetensors: model.save_pretrained(folder), or {save}")
    if not there:
        raise InputError(f"got {folder} without {WHOLE[0]} or {INDEX}", "the folder of a checkpoint in safetensors")
    return sorted(set(_weight_map(folder).values())) if there == [INDEX] else there


def _weight_map(folder: Path) -> dict[str, str]:
    index = read_json(folder / INDEX)
    weights = index.get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(file, str) for file in weights.values()):
        raise InputError(f"got {folder / INDEX} without a weight_map of names to files", "the index of this checkpoint")
    for file in set(weights.values()):
        if Path(file).name != file or not file.endswith(".safetensors") or len(file) > LONGEST_NAME:
            got = f"got {shown(file)} in {folder / INDEX}, expected safetensors files beside it"
            raise InputError(got, "their names")
    if not isinstance(index.get("metadata", {}), dict):
        raise InputError(f"got {folder / INDEX} with metadata that is no object", "the index of this checkpoint")
    return weights


def _require_index(folder: Path, headers: Mapping[str, Header]) -> None:
    """The index and the files have to agree, or one of them is not of this checkpoint."""
    listed = set(_weight_map(folder).items())
    there = {(tensor.name, file) for file, header in headers.items() for tensor in header.tensors}
    if listed != there:
        name, file = min(listed ^ there)
        what = f"in {file} and not in its index" if (name, file) in there else f"in its index and not in {file}"
        raise InputError(f"got {folder} with {name} {what}", "the index and the files of one checkpoint")
