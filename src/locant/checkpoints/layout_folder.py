"""Convert the layout of a whole checkpoint on disk, from one folder of safetensors files to another.

The new folder gets its name only after all files are written to the disk. A file is written while it is read, so memory
holds only the headers and one head of one tensor. Names, dtypes, shapes, offsets and metadata do not change, so a
header is copied byte for byte. The values of tensors are not interpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from locant.checkpoints.checkpoint_folder import Header, TensorEntry, companions, read_headers, rewrite_folder
from locant.checkpoints.config_source import CONFIG, as_json, read_json
from locant.checkpoints.layout import LayoutChange, row_order
from locant.errors import InputError
from locant.files import NewFile, require_new, write_whole
from locant.kernels.rotary import Layout
from locant.models.config_values import part_key
from locant.models.weights import HeadRows
from locant.spelling import dtype_name

CHUNK = 2**20
"""The number of bytes copied at once, for parts whose order does not change."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The result of a conversion: the layouts, the size of the change, and the files that were not copied."""

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

    The new ``config.json`` states the layout as ``rope_interleave`` if it is not the layout of the architecture, so
    that the weights are not read with a wrong layout.

    Args:
        folder: the folder of the checkpoint or the adapter. It is not changed.
        output: a new or empty folder.
        to, source: see `convert_layout`.
        config: a ``config.json`` of another folder, for adapters without one.
        progress: is called with the number of bytes written and their total.

    Raises:
        InputError: the folder has no configuration or no safetensors, the model has no layout or has it already, its
            weights are quantised, or `output` holds other files or is the folder itself.
        ShapeError: a weight does not fit the configuration.
        RangeError: `to` or `source` is not a layout.
    """
    if not (str(folder) and str(output)):
        raise InputError("got an empty path, expected the name of a folder", "use '.' for the current one")
    folder, output = Path(folder), Path(output)
    _require_two(folder, output)
    facts = read_json(folder / CONFIG if config is None else Path(config))
    change = LayoutChange(facts, to=to, source=source)
    headers = read_headers(folder)
    moves = change.moves({tensor.name: tensor.shape for header in headers.values() for tensor in header.tensors})
    copied, left_out = companions(folder, headers)
    total = sum(tensor.num_bytes for header in headers.values() for tensor in header.tensors)
    done = 0

    def write(name: str, header: Header, target: NewFile) -> None:
        nonlocal done
        with (folder / name).open("rb") as file:
            if file.read(len(header.raw)) != header.raw:
                raise InputError(f"{folder / name} changed while it was read", "stop the program that writes to it")
            for num_bytes in write_reordered(file, target, header, moves, to):
                done += num_bytes
                progress(done, total)

    with rewrite_folder(folder, output, headers, write, copied) as new:
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
    """Write the part of `source` after the header, with the rows of the tensors in `moves` in the order of `to`.

    Yield the number of bytes of each write.
    """
    target.write(header.raw)
    for tensor in header.tensors:
        heads = moves.get(tensor.name)
        for data in _copy(source, tensor.num_bytes) if heads is None else _reorder(source, tensor, heads, to):
            target.write(data)
            yield len(data)


def _copy(source: IO[bytes], num_bytes: int) -> Iterator[bytes]:
    while num_bytes:
        data = _read_exactly(source, min(num_bytes, CHUNK))
        num_bytes -= len(data)
        yield data


def _reorder(source: IO[bytes], tensor: TensorEntry, heads: Sequence[HeadRows], to: Layout) -> Iterator[bytes]:
    """Yield the bytes of a tensor head by head, with rotated rows reordered and other rows copied."""
    rows = sum(part.rows for part in heads)
    size, rest = divmod(tensor.num_bytes, rows)
    if rest:
        got = f"got {tensor.name} of {dtype_name(tensor.dtype)}, whose rows are not whole bytes"
        raise InputError(got, "use weights of a wider dtype")
    for part in heads:
        if not part.rotated:
            yield from _copy(source, part.rows * size)
            continue
        order = row_order(part, to)
        for _ in range(part.count):
            head = memoryview(_read_exactly(source, part.width * size))
            yield b"".join(head[row * size : (row + 1) * size] for row in order)


def _read_exactly(source: IO[bytes], num_bytes: int) -> bytes:
    data = source.read(num_bytes)
    if len(data) != num_bytes:
        got = f"{source.name} ended while it was read: {num_bytes - len(data)} bytes are missing"
        raise InputError(got, "stop the program that writes to it")
    return data


def _with_layout(facts: Mapping[str, Any], change: LayoutChange) -> dict[str, Any]:
    """Return the configuration with the new layout in its text part, or without a layout if this is the default."""
    key = part_key(facts)
    if key is not None and isinstance(facts[key], Mapping):
        return {**facts, key: _with_layout(facts[key], change)}
    others = {key: value for key, value in facts.items() if key != "rope_interleave"}
    if change.to == change.row.rotary_keys.layout:
        return others
    return {**others, "rope_interleave": change.to == "interleaved"}


def _require_two(folder: Path, output: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"got {folder}, which is not a folder", "pass the folder of a checkpoint")
    if output.resolve() == folder.resolve():
        raise InputError(f"got {output} as input and output", "write to another folder, because the input is kept")
    require_new(output)
