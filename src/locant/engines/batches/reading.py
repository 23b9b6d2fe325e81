"""Read batches from files."""

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
    """Read a batch from a file of safetensors, NumPy's ``.npz``, or JSON. Pickles are not supported.

    Raises:
        InputError: there is no such file, or it cannot be read.
    """
    path, remedy = Path(path), "pass a batch saved as .safetensors, .npz or .json"
    if not path.is_file():
        raise InputError(f"got no file {path}", remedy)
    if path.suffix not in (".safetensors", ".npz", ".json"):
        raise InputError(f"got {path} of kind {path.suffix!r}", remedy)
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
            raise ValueError("it does not map names to arrays")
        return {name: torch.as_tensor(value) for name, value in batch.items()}
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, zipfile.BadZipFile) as error:
        raise InputError(f"cannot read a batch from {path}: {error}", "pass a file that maps names to arrays") from None
