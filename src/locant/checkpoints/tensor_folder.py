"""Single tensors of a checkpoint in safetensors, mapped into memory: what is not looked at is not read.

A mapped tensor is private: what is written into it stays in this process. Its storage is its own, so that saving it
saves no more than itself.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from locant.arguments import shown
from locant.checkpoints.checkpoint_folder import TensorEntry, files_of_tensors, read_header
from locant.errors import InputError

__all__ = ["DTYPES", "TensorFolder"]

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Those of tables that can be computed with as they are, by their names in safetensors."""


class TensorFolder:
    """The tensors of a folder by name. Only the files of those that are asked for are opened.

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
        self.files = files_of_tensors(self.folder)
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
            got = f"got {name} of dtype {entry.dtype} in {self.folder}, expected one of {', '.join(DTYPES)}"
            raise InputError(got, "the model before it was quantised")
        if not entry.num_bytes:
            return torch.empty(entry.shape, dtype=dtype)
        path = self.folder / self.files[name]
        content = np.memmap(path, np.uint8, mode="c", offset=entry.begin, shape=(entry.num_bytes,))
        if content.ctypes.data % dtype.itemsize:  # a header of odd length
            content = np.array(content)
        return torch.from_numpy(content).view(dtype).view(entry.shape)
