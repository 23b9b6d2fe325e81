"""What a measurement was made with, so that it can be made again."""

from __future__ import annotations

import os
import platform

import numpy as np
import tokenizers
import torch

from locant._version import __version__

__all__ = ["environment"]


def environment() -> dict[str, str | int]:
    """Versions and machine, without names of hosts, users or paths."""
    return {
        "locant": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "tokenizers": tokenizers.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count() or 0,
        "torch_threads": torch.get_num_threads(),
    }
