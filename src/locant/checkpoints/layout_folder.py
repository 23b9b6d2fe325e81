"""The layout of a whole checkpoint on disk: a folder of safetensors files, converted into another folder.

The folder appears under its name when all of it is written and on the disk, or not at all. Files are streamed, see
`layout_stream`: memory is one head of one tensor, and the headers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locant.checkpoints.checkpoint_folder import companions, headers_of, opened
from locant.checkpoints.config_source import CONFIG, read_json
from locant.checkpoints.layout import LayoutChange
from locant.checkpoints.layout_stream import write_reordered
from locant.checkpoints.safetensors_header import read_header
from locant.errors import InputError
from locant.files import new_folder, replacing, require_new, write_whole
from locant.kernels.rotary import Layout

__all__ = ["Conversion", "convert_folder"]


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

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    with new_folder(output) as made:
        for name, header in headers.items():
            with opened(folder / name) as file, replacing(made / name) as path, path.open("wb") as target:
                if read_header(file, str(folder / name)) != header:
                    raise InputError(f"{folder / name} changed while it was read", "a checkpoint that nobody writes to")
                write_reordered(file, target, header, moves, to, count)
        for name in copied:
            with replacing(made / name) as path:
                shutil.copyfile(folder / name, path)
        if (folder / CONFIG).exists():
            write_whole(made / CONFIG, json.dumps(_with_layout(facts, change), indent=2, ensure_ascii=False) + "\n")
    return Conversion(
        folder=str(folder), output=str(output), architecture=change.architecture, source=change.source, to=to,
        files=tuple(headers), copied=copied, left_out=left_out, bytes=total,
        tensors=sum(len(header.tensors) for header in headers.values()), converted=len(moves),
    )  # fmt: skip


def _with_layout(facts: Mapping[str, Any], change: LayoutChange) -> dict[str, Any]:
    """The configuration, with the new layout in it unless it goes without saying; the text part of a multimodal one."""
    if isinstance(facts.get("text_config"), Mapping):
        return {**facts, "text_config": _with_layout(facts["text_config"], change)}
    kept = {key: value for key, value in facts.items() if key != "rope_interleave"}
    if change.to == change.row.rotary_keys.layout:
        return kept
    return {**kept, "rope_interleave": change.to == "interleaved"}


def _require_two(folder: Path, output: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"got {folder}, which is no folder", "the folder of a checkpoint")
    if output.resolve() == folder.resolve():
        raise InputError(f"got {output} as input and output", "another -o: what is there stays as it is")
    require_new(output)
