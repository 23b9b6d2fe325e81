"""`locant prepare`: a bar on stderr while a store is made, and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from locant.errors import InputError
from locant.report.console import counted, print_json, talk
from locant.text import Tokenizer
from locant.text.prepare import estimate, finalize, prepare
from locant.text.store import TokenStore

__all__ = ["finalize_store", "prepare_store", "show_estimate"]


def prepare_store(
    paths: Sequence[str], out: Path | None, options: Mapping[str, Any], *, download: bool = False, as_json: bool = False
) -> None:
    """Prepare a store, or one task's share of it, and say what came of it.

    Args:
        paths: files, folders and globs; ``-`` is standard input.
        out: the folder of the store.
        options: those of `locant.text.prepare.prepare`.
        download: whether a tokenizer that is not on this machine may be fetched.
        as_json: print the facts as JSON.
    """
    from tqdm import tqdm

    paths, out, options = _required(paths), _place(out), _with_tokenizer(options, download)
    with tqdm(disable=None, unit="B", unit_scale=True, leave=False, dynamic_ncols=True) as bar:

        def advance(done: int, total: int) -> None:
            if bar.total is None:  # what an earlier run did says nothing of this one's rate
                bar.total, bar.initial, bar.n = total, done, done
            bar.update(done - bar.n)

        try:
            store = prepare(paths, out, progress=advance, **options)
        except KeyboardInterrupt:
            talk(f"stopped: the same command goes on from here, with what is done in {out}")
            raise
    if store is None:
        _say_task(out, options["task"], options["num_tasks"], as_json=as_json)
    else:
        _say_store(store, as_json=as_json)


def finalize_store(out: Path | None, *, as_json: bool = False) -> None:
    """Join what tasks have made, and say what came of it."""
    _say_store(finalize(_place(out)), as_json=as_json)


def show_estimate(
    paths: Sequence[str], options: Mapping[str, Any], *, download: bool = False, as_json: bool = False
) -> None:
    """Say what preparing would make; nothing is written."""
    names = ("tokenizer", "vocab_size", "separator", "field", "append_end_of_text")
    given = {name: value for name, value in _with_tokenizer(options, download).items() if name in names}
    found = estimate(_required(paths), **given)
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    about = "" if found.exact else "about "
    _print(
        f"{counted(found.files, 'file')} of {found.bytes:,} bytes: {about}{counted(found.documents, 'document')}, "
        f"{about}{counted(found.tokens, 'token')}, {about}{found.store_bytes:,} bytes in the store"
    )


def _required(paths: Sequence[str]) -> Sequence[str]:
    if not paths:
        raise InputError("got no PATH to read", "a file, a folder, or - for standard input")
    return paths


def _place(out: Path | None) -> Path:
    if out is None:
        raise InputError("got no folder for the store", "-o FOLDER")
    return out


def _with_tokenizer(options: Mapping[str, Any], download: bool) -> dict[str, Any]:
    """The options, with a tokenizer that may be fetched in place of its name."""
    name = options.get("tokenizer")
    if not (download and name) or name == "bytes":
        return dict(options)
    return {**options, "tokenizer": Tokenizer.load(name, download=True)}


def _say_task(out: Path, task: int, num_tasks: int, *, as_json: bool) -> None:
    if as_json:
        print_json({"store": str(out), "task": task, "num_tasks": num_tasks})
    else:
        _print(f"{out}: task {task} of {num_tasks} is done; when all are: locant prepare --finalize -o {out}")


def _say_store(store: TokenStore, *, as_json: bool) -> None:
    tokens, documents, shards = len(store), len(store.documents) - 1, len(store.shards)
    facts = {
        "store": str(store.path),
        "tokens": tokens,
        "documents": documents,
        "shards": shards,
        "dtype": store.dtype.name,
        "bytes": tokens * store.dtype.itemsize,
        "vocab_size": store.vocab_size,
        "end_of_text": store.end_of_text,
        "fingerprint": store.fingerprint,
    }
    if as_json:
        print_json(facts)
        return
    _print(
        f"{store.path}: {counted(tokens, 'token')} in {counted(documents, 'document')}, {counted(shards, 'shard')}, "
        f"{store.dtype.name}, {facts['bytes']:,} bytes"
    )


def _print(line: str) -> None:
    from locant.report.console import out

    out().print(line, soft_wrap=True)
