"""What lies in the folder of a checkpoint in safetensors: its weights, their index, and what belongs to them.

Pickles (``.bin``, ``.pt``) are not opened: opening one runs what is in it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from locant.checkpoints.config_source import CONFIG, read_json
from locant.checkpoints.safetensors_header import Header, read_header
from locant.errors import InputError

__all__ = ["companions", "headers_of", "opened"]

INDEX = "model.safetensors.index.json"
WHOLE = ("model.safetensors", "adapter_model.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
COMPANIONS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".md")
"""Kinds of files that belong to a checkpoint and do not depend on its layout, such as its tokenizer."""


def headers_of(folder: Path) -> dict[str, Header]:
    """The header of each safetensors file, by the name of the file; the index agrees with them."""
    headers: dict[str, Header] = {}
    for name in _weight_files(folder):
        with opened(folder / name) as file:
            headers[name] = read_header(file, str(folder / name))
    _require_once(headers)
    if (folder / INDEX).exists():
        _require_index(folder, headers)
    return headers


@contextmanager
def opened(path: Path) -> Generator[IO[bytes]]:
    """A file, open for reading."""
    if not path.is_file():
        raise InputError(f"got no file {path}", "the checkpoint with all of its files")
    with path.open("rb") as file:
        yield file


def companions(folder: Path, weights: Mapping[str, object]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of other files, but for the configuration: those that belong to the checkpoint, and the rest."""
    others = sorted(path for path in folder.iterdir() if path.name not in (CONFIG, *weights))
    belong = [
        path.name
        for path in others
        if path.is_file() and (path.suffix in COMPANIONS or path.stem.upper() in ("LICENSE", "NOTICE"))
    ]
    return tuple(belong), tuple(path.name for path in others if path.name not in belong)


def _weight_files(folder: Path) -> list[str]:
    there = [name for name in (*WHOLE, INDEX) if (folder / name).exists()]
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if len(there) > 1:
        raise InputError(f"got {folder} with {' and '.join(there)}, expected one of them", "a folder of one checkpoint")
    if not there and pickles:
        raise InputError(
            f"got {folder} with {pickles[0]}, a pickle, which can run anything when it is opened",
            "the same weights as safetensors: model.save_pretrained(folder)",
        )
    if not there:
        raise InputError(f"got {folder} without {WHOLE[0]} or {INDEX}", "the folder of a checkpoint in safetensors")
    return sorted(set(_weight_map(folder).values())) if there == [INDEX] else there


def _weight_map(folder: Path) -> dict[str, str]:
    """Which file each tensor is in, according to the index."""
    weights = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(file, str) for file in weights.values()):
        raise InputError(f"got {folder / INDEX} without a weight_map of names to files", "the index of this checkpoint")
    for file in set(weights.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise InputError(f"got {file!r} in {folder / INDEX}, expected safetensors files beside it", "their names")
    return weights


def _require_once(headers: Mapping[str, Header]) -> None:
    """A tensor in two files would be two things."""
    where: dict[str, str] = {}
    for file, header in headers.items():
        for tensor in header.tensors:
            first = where.setdefault(tensor.name, file)
            if first != file:
                raise InputError(f"got {tensor.name} in {first} and in {file}", "each tensor in one file")


def _require_index(folder: Path, headers: Mapping[str, Header]) -> None:
    """The index and the files have to agree, or one of them is not of this checkpoint."""
    listed = set(_weight_map(folder).items())
    there = {(tensor.name, file) for file, header in headers.items() for tensor in header.tensors}
    if listed != there:
        name, file = min(listed ^ there)
        what = f"in {file} and not in its index" if (name, file) in there else f"in its index and not in {file}"
        raise InputError(f"got {folder} with {name} {what}", "the index and the files of one checkpoint")
