"""The layout of a whole checkpoint on disk: a folder of safetensors files, converted into another folder.

The folder appears under its name when all of it is written and on the disk, or not at all. Files are streamed, see
`layout_stream`. Pickles (``.bin``, ``.pt``) are not opened: opening one runs what is in it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from locant.checkpoints.layout import LayoutChange, require_moves
from locant.checkpoints.layout_stream import write_reordered
from locant.checkpoints.projections import Run
from locant.checkpoints.safetensors_header import Header, read_header
from locant.errors import InputError
from locant.files import replacing, write_whole
from locant.kernels.rotary import Layout

__all__ = ["Conversion", "convert_folder"]

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WHOLE = ("model.safetensors", "adapter_model.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
COMPANIONS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".md")
"""Kinds of files that belong to a checkpoint and know nothing of layouts, such as its tokenizer."""
LARGEST_JSON = 2**28


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What was converted: the layouts, and how much of the checkpoint changed."""

    folder: str
    output: str
    architecture: str | None
    source: str
    to: str
    files: tuple[str, ...]
    copied: tuple[str, ...]
    left_out: tuple[str, ...]
    tensors: int
    converted: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def convert_folder(
    folder: Path | str,
    output: Path | str,
    *,
    to: Layout,
    source: Layout | None = None,
    config: Path | str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Conversion:
    """Convert a folder with ``config.json`` and one safetensors file, or its shards and their index.

    The new ``config.json`` says the layout as ``rope_interleave`` wherever it is not the architecture's own, so that
    what reads it next does not turn weights in a layout that they do not have. Memory: one head of one tensor.

    Args:
        folder: holds the checkpoint, or the adapter; it stays as it is.
        output: a folder that is not there yet, or is empty.
        to, source: see `convert_layout`.
        config: a ``config.json`` elsewhere, for adapters, which have none.
        progress: is told how many bytes of how many are written.
    """
    folder, output = Path(folder), Path(output)
    _require_output(folder, output)
    facts = _read_json(folder / CONFIG if config is None else Path(config))
    change = LayoutChange(facts, to=to, source=source)
    with ExitStack() as stack:
        opened = {name: stack.enter_context(_opened(folder / name)) for name in _weight_files(folder)}
        headers = {name: read_header(file, str(folder / name)) for name, file in opened.items()}
        moves = _moves(change, headers)
        _require_index(folder, headers)
        copied, left_out = _companions(folder, headers)
        done = _Counter(progress, sum(tensor.num_bytes for header in headers.values() for tensor in header.tensors))
        with _new_folder(output) as made:
            for name, header in headers.items():
                with replacing(made / name) as path, path.open("wb") as target:
                    write_reordered(opened[name], target, header, moves, to, done)
            for name in copied:
                with replacing(made / name) as path:
                    shutil.copyfile(folder / name, path)
            if (folder / CONFIG).exists():
                write_whole(made / CONFIG, json.dumps(_with_layout(facts, change), indent=2, ensure_ascii=False) + "\n")
    return Conversion(
        folder=str(folder), output=str(output), architecture=change.architecture, source=change.source, to=to,
        files=tuple(headers), copied=copied, left_out=left_out,
        tensors=sum(len(header.tensors) for header in headers.values()), converted=len(moves), bytes=done.total,
    )  # fmt: skip


class _Counter:
    """Adds up the bytes of pieces."""

    def __init__(self, progress: Callable[[int, int], None], total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0
        progress(0, total)

    def __call__(self, num_bytes: int) -> None:
        self.done += num_bytes
        self.progress(self.done, self.total)


def _moves(change: LayoutChange, headers: Mapping[str, Header]) -> dict[str, tuple[Run, ...]]:
    """What changes in all files together; a tensor in two of them would be two things."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file, header in headers.items():
        for tensor in header.tensors:
            if tensor.name in shapes:
                raise InputError(f"got {tensor.name} a second time in {file}", "each tensor in one file")
            shapes[tensor.name] = tensor.shape
    moves = change.moves(shapes)
    require_moves(moves)
    return moves


def _weight_files(folder: Path) -> list[str]:
    """The safetensors files of a checkpoint, by name."""
    whole = [name for name in WHOLE if (folder / name).exists()]
    sharded = (folder / INDEX).exists()
    if len(whole) + sharded > 1:
        both = " and ".join([*whole, *[INDEX] * sharded])
        raise InputError(f"got {folder} with {both}, expected one of them", "a folder with the weights once")
    if sharded:
        return sorted(set(_weight_map(folder).values()))
    if not whole:
        raise _nothing_in(folder)
    return whole


def _nothing_in(folder: Path) -> InputError:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        return InputError(
            f"got {folder} with {pickles[0]}, a pickle, which can run anything when it is opened",
            "the same weights as safetensors: model.save_pretrained(folder)",
        )
    return InputError(f"got {folder} without {WHOLE[0]} or {INDEX}", "the folder of a checkpoint in safetensors")


def _weight_map(folder: Path) -> dict[str, str]:
    """Which file each tensor is in, according to the index."""
    weights = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(file, str) for file in weights.values()):
        raise InputError(f"got {folder / INDEX} without a weight_map of names to files", "the index of this checkpoint")
    for file in set(weights.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise InputError(f"got {file!r} in {folder / INDEX}, expected safetensors files beside it", "their names")
    return weights


def _require_index(folder: Path, headers: Mapping[str, Header]) -> None:
    """The index and the files have to agree, or one of them is not of this checkpoint."""
    if not (folder / INDEX).exists():
        return
    listed = set(_weight_map(folder).items())
    there = {(tensor.name, file) for file, header in headers.items() for tensor in header.tensors}
    if listed != there:
        name, file = min(listed ^ there)
        what = f"in {file} and not in the index" if (name, file) in there else f"in the index and not in {file}"
        raise InputError(f"got {folder} with {name} {what}", "the index and the files of one checkpoint")


def _companions(folder: Path, weights: Mapping[str, object]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Other files that are copied, and those that are left out."""
    others = sorted(path for path in folder.iterdir() if path.name not in (CONFIG, *weights))
    copied = [path.name for path in others if path.is_file() and _is_companion(path)]
    return tuple(copied), tuple(path.name for path in others if path.name not in copied)


def _is_companion(path: Path) -> bool:
    return path.suffix in COMPANIONS or path.stem.upper() in ("LICENSE", "NOTICE")


def _with_layout(facts: Mapping[str, Any], change: LayoutChange) -> dict[str, Any]:
    """The configuration, with the new layout in it unless it goes without saying; the text part of a multimodal one."""
    if isinstance(facts.get("text_config"), Mapping):
        return {**facts, "text_config": _with_layout(facts["text_config"], change)}
    kept = {key: value for key, value in facts.items() if key != "rope_interleave"}
    return kept if change.to == change.own else {**kept, "rope_interleave": change.to == "interleaved"}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise InputError(f"got {path} of {path.stat().st_size} bytes", "a JSON file that is smaller")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"got no {path}", "the folder of a checkpoint, or --config FILE") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"got {path}, which is not JSON", "a fresh copy of it") from None
    if not isinstance(value, dict):
        raise InputError(f"got {path}, which is no JSON object", "a fresh copy of it")
    return value


@contextmanager
def _opened(path: Path) -> Generator[BinaryIO]:
    """An open file, read in the pieces that are asked for."""
    if not path.is_file():
        raise InputError(f"got no file {path}", "the checkpoint with all of its files")
    with path.open("rb") as file:
        yield file


def _require_output(folder: Path, output: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"got {folder}, which is no folder", "the folder of a checkpoint")
    if output.resolve() == folder.resolve():
        raise InputError(f"got {output} as input and output", "another -o: what is there stays as it is")
    if output.exists() and not output.is_dir():
        raise InputError(f"got {output}, which is a file, as the folder to write", f"-o {output}-converted")
    if output.is_dir() and any(output.iterdir()):
        raise InputError(f"got {output}, which is not empty", "another -o: what is there stays as it is")
    if not output.resolve().parent.is_dir():
        raise InputError(f"got {output}, but there is no folder {output.parent}", f"mkdir -p {output.parent}")


@contextmanager
def _new_folder(output: Path) -> Generator[Path]:
    """A folder beside `output` that takes its name if the block succeeds, and vanishes if it fails."""
    place = output.resolve()
    try:
        made = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
    except OSError as error:
        raise InputError(
            f"cannot write in {place.parent}: {error.strerror}", "a folder that you may write to"
        ) from None
    try:
        yield made
        made.chmod(0o777 & ~_umask())
        made.replace(place)
        _flush(place.parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
