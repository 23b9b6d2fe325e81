"""Entry 84e: a preparation that was interrupted, and what is loaded afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from locant import Tokenizer
from locant.text.prepare import prepare
from locant.text.store import TokenStore
from tests.known_bugs.exhibit import exhibit

TEXTS = [f"document {number}. " * (1 + number % 3) for number in range(8)]
WHOLE = [byte for text in TEXTS for byte in [*text.encode(), 256]]


class Killed(BaseException):
    """Nothing catches it, and nobody cleans up after it: the folder is copied away before it is raised."""


@dataclass(frozen=True)
class Subject:
    """What prepares the texts in a folder, and what loads them."""

    prepare: Callable[[Path, Path, Callable[[int, int], None]], None]
    """From a file, to a folder, calling a function now and then."""
    load: Callable[[Path], list[int] | None]
    """The ids, or ``None`` where it says that there are none."""


def check(subject: Subject, folder: Path) -> None:
    """Killed at any call of its progress: what is loaded then, and after going on, is everything or nothing."""
    text = folder / "texts.txt"
    text.write_text("\n\n".join(TEXTS))
    for calls in range(1, 40):
        out, copy = folder / f"store{calls}", folder / f"killed{calls}"
        counter = iter(range(calls))

        def die(done: int, total: int, counter: Iterator[int] = counter, out: Path = out, copy: Path = copy) -> None:
            if next(counter, None) is None:
                shutil.copytree(out, copy)
                raise Killed

        try:
            subject.prepare(text, out, die)
        except Killed:
            assert subject.load(copy) in (None, WHOLE), "half a cache is loaded as if it were whole"
            subject.prepare(text, copy, lambda done, total: None)
            assert subject.load(copy) == WHOLE, "what goes on does not end where a run in one go ends"
        else:
            assert calls > 5, "it has hardly any place to be killed at"
            return
    pytest.fail("it never comes to an end")


def _prepare(text: Path, out: Path, progress: Callable[[int, int], None]) -> None:
    prepare(text, out, tokenizer=Tokenizer.bytes(), separator="\n\n", shard_size=10, workers=1, progress=progress)


def _load(out: Path) -> list[int] | None:
    try:
        return TokenStore(out)[:].tolist()
    except ValueError:
        return None


def _write_to_the_cache(text: Path, out: Path, progress: Callable[[int, int], None]) -> None:
    """A file that is appended to under its final name, and taken for done because it is there."""
    out.mkdir(exist_ok=True)
    if (out / "cache.bin").exists():
        return
    texts = text.read_text().split("\n\n")
    with (out / "cache.bin").open("wb") as file:
        for number, one in enumerate(texts):
            file.write(np.array([*one.encode(), 256], dtype="<u2").tobytes())
            file.flush()
            progress(number, len(texts))
    (out / "info.json").write_text(json.dumps({"texts": len(texts)}))


def _read_the_cache(out: Path) -> list[int] | None:
    return np.fromfile(out / "cache.bin", dtype="<u2").tolist()


def test_84e_half_a_cache_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface/datasets#460 and NVIDIA/Megatron-LM#852: an interrupted run left half of its output under the final
    name, and the next one took it for the whole.

    A death at every call here; at every step of the file system, and at random moments, in tests/text/prepare.
    """
    monkeypatch.setattr("os.fsync", lambda _: None)
    places = iter(range(100))

    def checked(subject: Subject) -> None:
        place = tmp_path / str(next(places))
        place.mkdir()
        check(subject, place)

    twin = Subject(_write_to_the_cache, _read_the_cache)
    exhibit(checked, Subject(_prepare, _load), twin=twin, because="half a cache is loaded")
