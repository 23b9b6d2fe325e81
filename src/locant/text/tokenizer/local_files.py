"""Finding a tokenizer by path or by name: in files, in local caches, and on the network only if that is asked for.

A name such as ``gpt2`` or ``someone/something`` is looked up where the Hugging Face libraries keep what they have
downloaded, then where `tiktoken` does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from locant.arguments import shown
from locant.errors import InputError
from locant.text.reading import read_texts
from locant.text.tokenizer.tiktoken_files import cached_encoding, tiktoken_cache

__all__ = ["find"]

FILE = "tokenizer.json"
REMEDY = f"the path of a {FILE}, download=True, or a tokenizer trained on a text of yours"

# The first models of the hub had a name without an owner; these accounts hold them now.
_FIRST_OWNERS = ("openai-community", "google-bert", "FacebookAI", "google-t5", "distilbert", "albert", "xlnet")


def find(path_or_name: str | Path, *, download: bool) -> tuple[str, str]:
    """The text of a `tokenizer.json`, and where it was found."""
    if not isinstance(path_or_name, (str, Path)):
        raise InputError(f"got {shown(path_or_name)} as a tokenizer, expected a path or a name", REMEDY)
    path = Path(path_or_name)
    if str(path_or_name) and os.path.exists(path):  # noqa: PTH110  # which has an answer to names that cannot be one
        if path.is_dir() and not (path / FILE).is_file():
            cause = f"got the folder {path}, which holds no {FILE}"
            raise InputError(cause, f"the path of a {FILE}, or a folder with one")
        return _read(path / FILE if path.is_dir() else path)
    name = str(path_or_name)
    if isinstance(path_or_name, str) and name:
        if (cached := _in_hub_cache(name)) is not None:
            return _read(cached)
        if (definition := cached_encoding(name)) is not None:
            return json.dumps(definition), f"{name} in tiktoken's cache"
        if download:
            return _read(_download(name))
    places = f"{_hub_cache()} or {tiktoken_cache()}"
    raise InputError(f"found no tokenizer {name!r}: neither a file or folder of this name, nor in {places}", REMEDY)


def _read(path: Path) -> tuple[str, str]:
    return read_texts(path)[0], str(path)


def _hub_cache() -> Path:
    """Where the Hugging Face libraries keep downloads, by their own rules."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if given:
        return Path(os.path.expandvars(given)).expanduser()
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.path.expandvars(os.environ.get("HF_HOME") or usual)).expanduser() / "hub"


def _in_hub_cache(name: str) -> Path | None:
    names = [name] if "/" in name else [name, *(f"{owner}/{name}" for owner in _FIRST_OWNERS)]
    folders = [_hub_cache() / ("models--" + each.replace("/", "--")) for each in names]
    return next((file for folder in folders if (file := _in_snapshot(folder)) is not None), None)


def _in_snapshot(folder: Path) -> Path | None:
    """The file in the snapshot that `main` stands for, or in the only one that has it if `main` was never fetched."""
    reference = folder / "refs" / "main"
    if os.path.exists(reference):  # noqa: PTH110
        file = folder / "snapshots" / reference.read_text(encoding="utf-8").strip() / FILE
        return file if file.is_file() else None
    files = sorted(folder.glob(f"snapshots/*/{FILE}")) if os.path.exists(folder) else []  # noqa: PTH110
    if len(files) > 1:
        cause = f"got {len(files)} revisions in {folder}, none of which is main"
        raise InputError(cause, f"the path of one, such as {files[0]}")
    return files[0] if files else None


def _download(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import EntryNotFoundError

    try:
        return Path(hf_hub_download(name, FILE))
    except (OSError, ValueError, EntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"cannot download {FILE} of {name!r}: {reason}",
            f"a name as on the hub (owner/model), the path of a {FILE}, or a tokenizer trained on a text of yours",
        ) from None
