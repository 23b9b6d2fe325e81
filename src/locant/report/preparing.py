"""`locant prepare`: a bar on stderr while a store is made, and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from locant.report.console import counted, print_result, talk
from locant.text.prepare import Estimate
from locant.text.store import TokenStore

__all__ = ["print_estimate", "print_store", "print_task", "progress_bar"]


@contextmanager
def progress_bar() -> Generator[Callable[[int, int], None]]:
    """A bar of bytes, and what moves it; after Ctrl-C, how to go on."""
    from tqdm import tqdm

    try:
        with tqdm(disable=None, unit="B", unit_scale=True, leave=False, dynamic_ncols=True) as bar:

            def progress(done: int, total: int) -> None:
                if bar.total is None:  # what an earlier run did is not part of this one's rate
                    bar.total, bar.initial, bar.n = total, done, done
                bar.update(done - bar.n)

            yield progress
    except KeyboardInterrupt as interrupt:
        for note in getattr(interrupt, "__notes__", ()):
            talk(note)
        raise


def print_store(store: TokenStore, *, as_json: bool) -> None:
    """What is in a store."""
    tokens, documents, shards = len(store), len(store.documents) - 1, len(store.shards)
    size, dtype = tokens * store.dtype.itemsize, store.dtype.name
    facts = {
        "store": str(store.path), "tokens": tokens, "documents": documents, "shards": shards, "dtype": dtype,
        "bytes": size, "vocab_size": store.vocab_size, "end_of_text": store.end_of_text,
        "fingerprint": store.fingerprint,
    }  # fmt: skip
    where = f"{counted(documents, 'document')}, {counted(shards, 'shard')}, {dtype}, {counted(size, 'byte')}"
    print_result(facts, f"{store.path}: {counted(tokens, 'token')} in {where}", as_json=as_json)


def print_task(store: Path, task: int, num_tasks: int, *, as_json: bool) -> None:
    """That a task is done, and what is to be done when all are."""
    line = f"{store}: task {task} of {num_tasks} is done; when all are: locant prepare --finalize -o {store}"
    print_result({"store": str(store), "task": task, "num_tasks": num_tasks}, line, as_json=as_json)


def print_estimate(estimate: Estimate, *, as_json: bool) -> None:
    """What preparing would read and make."""
    about = "" if estimate.exact else "about "
    made = f"{about}{counted(estimate.documents, 'document')}, {about}{counted(estimate.tokens, 'token')}"
    store = f"{about}{counted(estimate.store_bytes, 'byte')} in the store"
    line = f"{counted(estimate.files, 'file')} of {counted(estimate.bytes, 'byte')}: {made}, {store}"
    print_result(dataclasses.asdict(estimate), line, as_json=as_json)
