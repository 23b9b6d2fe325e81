"""The layout of a whole checkpoint on disk: a folder of safetensors files, converted into another folder.

The folder appears under its name when all of it is written and on the disk, or not at all. A file is written while it
is read: memory holds one head of one tensor, and the headers. Names, dtypes, shapes, offsets and metadata do not
change, so a header is written as it was read, byte for byte; what a byte of a tensor means is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from locant.checkpoints.checkpoint_folder import Header, TensorEntry, companions, headers_of, rewritten
from locant.checkpoints.config_source import CONFIG, as_json, read_json
from locant.checkpoints.layout import LayoutChange, row_order
from locant.errors import InputError
from locant.files import NewFile, require_new, write_whole
from locant.kernels.rotary import Layout
from locant.models.config_values import part_key
from locant.models.weights import HeadRows
from locant.spelling import dtype_name

CHUNK = 2**20
"""Bytes that are copied at once where nothing changes its place."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What was converted: the layouts, how much of the checkpoint changed, and which files were not taken along."""

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

    def __str__(self) -> str:
        moved = f"{self.converted} of {self.tensors} tensors converted"
        size = f"{self.bytes:,} bytes in {len(self.files)} file{'s' * (len(self.files) != 1)}"
        return f"{self.output}: {self.source} → {self.to}, {moved}, {size}"


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

    The new ``config.json`` has the layout as ``rope_interleave`` wherever it is not the architecture's own, so that
    it is not read with a layout that the weights do not have.

    Args:
        folder: holds the checkpoint, or the adapter; it stays as it is.
        output: a folder that is not there yet, or is empty.
        to, source: see `convert_layout`.
        config: a ``config.json`` elsewhere, for adapters, which have none.
        progress: is told how many bytes of how many are written.
    """
    if not (str(folder) and str(output)):
        raise InputError("got an empty path, expected the name of a folder", "'.' for the current one")
    folder, output = Path(folder), Path(output)
    _require_two(folder, output)
    facts = read_json(folder / CONFIG if config is None else Path(config))
    change = LayoutChange(facts, to=to, source=source)
    headers = headers_of(folder)
    moves = change.moves({tensor.name: tensor.shape for header in headers.values() for tensor in header.tensors})
    copied, left_out = companions(folder, headers)
    total = sum(tensor.num_bytes for header in headers.values() for tensor in header.tensors)
    done = 0

    def write(name: str, header: Header, target: NewFile) -> None:
        nonlocal done
        with (folder / name).open("rb") as file:
            if file.read(len(header.raw)) != header.raw:
                raise InputError(f"{folder / name} changed while it was read", "a checkpoint that no program writes to")
            for num_bytes in write_reordered(file, target, header, moves, to):
                done += num_bytes
                progress(done, total)

    with rewritten(folder, output, headers, write, copied) as new:
        if (folder / CONFIG).exists():
            write_whole(new / CONFIG, as_json(_with_layout(facts, change)))
    return Conversion(
        folder=str(folder), output=str(output), architecture=change.architecture, source=change.source, to=to,
        files=tuple(headers), copied=copied, left_out=left_out, bytes=total,
        tensors=sum(len(header.tensors) for header in headers.values()), converted=len(moves),
    )  # fmt: skip


def write_reordered(
    source: IO[bytes], target: NewFile, header: Header, moves: Mapping[str, Sequence[HeadRows]], to: Layout
) -> Iterator[int]:
    """Write the file at `source`, read up to its tensors, with the rows of those in `moves` in the order of `to`.

    Yields the number of bytes after each write.
    """
    target.write(header.raw)
    for tensor in header.tensors:
        heads = moves.get(tensor.name)
        for data in _copied(source, tensor.num_bytes) if heads is None else _moved(source, tensor, heads, to):
            target.write(data)
            yield len(data)


def _copied(source: IO[bytes], num_bytes: int) -> Iterator[bytes]:
    while num_bytes:
        data = _exactly(source, min(num_bytes, CHUNK))
        num_bytes -= len(data)
        yield data


def _moved(source: IO[bytes], tensor: TensorEntry, heads: Sequence[HeadRows], to: Layout) -> Iterator[bytes]:
    """One head after the other; what is not rotated is copied."""
    rows = sum(part.rows for part in heads)
    size, rest = divmod(tensor.num_bytes, rows)
    if rest:
        got = f"got {tensor.name} of {dtype_name(tensor.dtype)}, whose rows are no whole bytes"
        raise InputError(got, "a wider dtype")
    for part in heads:
        if not part.rotated:
            yield from _copied(source, part.rows * size)
            continue
        order = row_order(part, to)
        for _ in range(part.count):
            head = memoryview(_exactly(source, part.width * size))
            yield b"".join(head[row * size : (row + 1) * size] for row in order)


def _exactly(source: IO[bytes], num_bytes: int) -> bytes:
    data = source.read(num_bytes)
    if len(data) != num_bytes:
        got = f"{source.name} ended while it was read: {num_bytes - len(data)} bytes are missing"
        raise InputError(got, "a file that no program writes to")
    return data


def _with_layout(facts: Mapping[str, Any], change: LayoutChange) -> dict[str, Any]:
    """The configuration, with the new layout in it unless it goes without saying; the text part of a multimodal one."""
    key = part_key(facts)
    if key is not None and isinstance(facts[key], Mapping):
        return {**facts, key: _with_layout(facts[key], change)}
    kept = {key: value for key, value in facts.items() if key != "rope_interleave"}
    if change.to == change.row.rotary_keys.layout:
        return kept
    return {**kept, "rope_interleave": change.to == "interleaved"}


def _require_two(folder: Path, output: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"got {folder}, which is no folder", "the folder of a checkpoint")
    if output.resolve() == folder.resolve():
        raise InputError(f"got {output} as input and output", "another folder: what is there stays as it is")
    require_new(output)
