"""`locant convert`: a checkpoint in, one in the other layout out, and a line about what changed."""

from __future__ import annotations

from pathlib import Path

from locant.checkpoints.layout_folder import Conversion, convert_folder
from locant.kernels.rotary import Layout
from locant.report.console import print_json, talk

__all__ = ["convert_checkpoint"]


def convert_checkpoint(
    folder: Path,
    output: Path,
    *,
    to: Layout,
    source: Layout | None = None,
    config: Path | None = None,
    as_json: bool = False,
) -> None:
    """Convert a folder, with a bar on stderr while it is written, and say what came of it.

    Args:
        folder, output, to, source, config: see `locant.checkpoints.layout_folder.convert_folder`.
        as_json: print the facts as JSON.
    """
    from tqdm import tqdm

    with tqdm(disable=None, unit="B", unit_scale=True, leave=False, dynamic_ncols=True) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        conversion = convert_folder(folder, output, to=to, source=source, config=config, progress=advance)
    if conversion.left_out:
        talk(f"left out: {', '.join(conversion.left_out)}")
    if as_json:
        print_json(conversion.to_dict())
    else:
        _print(conversion)


def _print(conversion: Conversion) -> None:
    from locant.report.console import out

    moved = f"{conversion.converted} of {conversion.tensors} tensors"
    size = f"{conversion.bytes:,} bytes in {len(conversion.files)} file{'s' * (len(conversion.files) != 1)}"
    out().print(
        f"{conversion.output}: {conversion.source} -> {conversion.to}, {moved} converted, {size}", soft_wrap=True
    )
