"""Golden vectors: reference values for a port of rotary positions to another language or library.

They are in one safetensors file, which every language can read. The header lists the fields of each encoding. The
tensors are::

    positions            int64   [seq]
    x                    float32 [seq, head_dim]   between -1 and 1
    NAME/inv_freq        float64 [pairs]           radians per position
    NAME/exact/cos, sin  float32 [seq, pairs]      of the exact angles, times the attention factor
    NAME/float32/cos, sin                          of products of float32 numbers, as `transformers` computes them
    NAME/half, NAME/interleaved  float32 [seq, head_dim]   x rotated by the exact angles, in this layout
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from locant._version import __version__
from locant.errors import InputError
from locant.files import write_whole
from locant.positions import Positions, Rotary
from locant.positions.scaling import NTK, DynamicNTK, Linear, Llama3, LongRoPE, Scaling, Unscaled, YaRN

HEAD_DIM = 64
PAIRS = HEAD_DIM // 2
TRAINED = 4096
LONGEST = 2**31

BASES = {"1e4": 10_000.0, "5e5": 500_000.0}
SCALINGS: dict[str, Scaling] = {
    "none": Unscaled(),
    "linear": Linear(factor=4.0),
    "ntk": NTK(factor=4.0),
    "dynamic": DynamicNTK(factor=4.0, original_max_seq_len=TRAINED),
    "yarn": YaRN(factor=4.0, original_max_seq_len=TRAINED),
    "llama3": Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=TRAINED),
    "longrope": LongRoPE(
        short_factor=[1 + i / 16 for i in range(PAIRS)],
        long_factor=[1 + i * 1.5 for i in range(PAIRS)],
        original_max_seq_len=TRAINED,
        factor=4.0,
    ),
}

POSITIONS = (
    0, 1, 2, 3, 7, 64, 255, 256, TRAINED - 1, TRAINED, 65_535, 65_536, 131_071, 1_000_000, 2**24 + 1, LONGEST - 1,
)  # fmt: skip
"""Positions around the limits of bytes and the trained length, one beyond float32's integers, and the last position."""


def golden_vectors() -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return all tensors, and the header, which describes the encodings.

    >>> tensors, header = golden_vectors()
    >>> tensors["yarn/1e4/exact/cos"].shape
    torch.Size([16, 32])
    """
    positions = Positions.of(list(POSITIONS))
    x = _numbers(len(POSITIONS), HEAD_DIM)
    tensors, encodings = {"positions": positions.index[0], "x": x}, {}
    for scaling_name, scaling in SCALINGS.items():
        for base_name, base in BASES.items():
            name = f"{scaling_name}/{base_name}"
            rotary = Rotary(HEAD_DIM, base=base, scaling=scaling)
            if scaling.length_threshold is not None:
                rotary = rotary.for_length(LONGEST)
            encodings[name] = _describe(rotary)
            tensors[f"{name}/inv_freq"] = rotary.inv_freq
            for angles in ("exact", "float32"):
                cos, sin = rotary.replace(angles=angles).cos_sin(positions)
                tensors[f"{name}/{angles}/cos"], tensors[f"{name}/{angles}/sin"] = cos[0], sin[0]
            for layout in ("half", "interleaved"):
                rotated = rotary.replace(layout=layout).rotate_one(x[None, None], positions)
                tensors[f"{name}/{layout}"] = rotated[0, 0]
    header = {"locant": __version__, "head_dim": str(HEAD_DIM), "encodings": json.dumps(encodings, sort_keys=True)}
    return tensors, header


def write_golden(path: Path) -> int:
    """Write the file, and return its number of tensors.

    Raises:
        InputError: the name does not end in ``.safetensors``.
    """
    if path.suffix != ".safetensors":
        raise InputError(f"got {str(path)!r}, expected a name ending in .safetensors", "golden.safetensors")
    tensors, header = golden_vectors()
    write_whole(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}, header))
    return len(tensors)


def _numbers(rows: int, columns: int) -> Tensor:
    """Return reproducible numbers from -1 to 1. They are multiples of an odd number modulo 2^24, exact in float32."""
    count = torch.arange(rows * columns, dtype=torch.int64).reshape(rows, columns)
    return (count * 10_368_889 % 2**24).to(torch.float32) / 2**23 - 1


def _describe(rotary: Rotary) -> dict[str, object]:
    """Return the fields of an encoding. No configuration of `transformers` can express NTK, or `for_length`."""
    fields = {} if isinstance(rotary.scaling, Unscaled) else vars(rotary.scaling)
    stated = {name: value for name, value in fields.items() if value is not None}
    return {
        "base": rotary.base,
        "scaling": type(rotary.scaling).__name__,
        **stated,
        "attention_factor": rotary.scaling.effective_attention_factor,
        "seq_len": rotary.seq_len,
    }
