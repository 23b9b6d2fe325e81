"""Batches saved to a file."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from locant.errors import InputError


def read_batch(path: Path | str) -> dict[str, Any]:
    """A batch from a file of safetensors, of NumPy's ``.npz``, or of JSON; a pickle is not opened.

    Raises:
        InputError: no such file, or none that can be read.
    """
    path, kinds = Path(path), "a batch saved as .safetensors, .npz or .json"
    if not path.is_file():
        raise InputError(f"got no file {path}", kinds)
    if path.suffix not in (".safetensors", ".npz", ".json"):
        raise InputError(f"got {path} of kind {path.suffix!r}", kinds)
    try:
        match path.suffix:
            case ".safetensors":
                batch: Any = load_file(path)
            case ".npz":
                with np.load(path, allow_pickle=False) as arrays:
                    batch = {name: torch.from_numpy(arrays[name]) for name in arrays}
            case _:
                batch = json.loads(path.read_bytes())
        numbers = (int, torch.Tensor, list)
        if not isinstance(batch, dict) or not all(isinstance(value, numbers) for value in batch.values()):
            raise ValueError("it holds other things than arrays by name")
        return {name: torch.as_tensor(value) for name, value in batch.items()}
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, zipfile.BadZipFile) as error:
        raise InputError(
            f"got {path}, which is no batch that can be read: {error}", "a file of arrays by name"
        ) from None
