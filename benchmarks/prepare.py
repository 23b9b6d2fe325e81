"""How fast does text become a store, beside the engine alone and beside the `tokenizers` library in one process?

The text is what is at hand on every machine with this package: the documentation and the sources of Python and of the
installed packages, in files of 8 MB, natural and long-tailed. The long run reads it many times over, each time with
other numbers in it, so that an engine's cache meets new words. Everything is kept in a folder of the system's temporary
folder, and made once.

Each contender runs in a process of its own, so that none profits from what another has warmed; its seconds are its
own, without the start of the interpreter. The memory is the largest sum over all processes of a run of what belongs to
them (proportional set size), sampled twenty times a second.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from benchmarks.timing import Row

__all__ = ["rows"]

MEGABYTES = 200
LARGE_MEGABYTES = 2_000
FILE = 8_000_000
VOCAB_SIZE = 32_768
SEPARATOR = "\n\n\n"
SUFFIXES = (".rst", ".md", ".txt", ".py", ".pyi", ".html", ".h", ".json")
SLOW_SHARE = 20
"""The library in one process gets this fraction of the text: its speed is the same at any length."""

CODE = """
import json, sys, time
from pathlib import Path
folder, definition, out = map(Path, sys.argv[1:4])
def texts():
    for path in sorted(folder.glob("*.txt")):
        yield from path.read_bytes().split(SEPARATOR)
SEPARATOR = b"\\n\\n\\n"
"""

PREPARE = """
import locant
from locant.text.prepare import prepare
tokenizer = locant.Tokenizer.load(definition)
began = time.perf_counter()
store = prepare(folder, out, tokenizer=tokenizer, separator=SEPARATOR.decode(), workers=2)
print(json.dumps([time.perf_counter() - began, len(store)]))
"""

ENGINE = """
import multiprocessing
from locant import Tokenizer
from locant.text.tokenizer.engine import Engine
def work(share, ready, go, tell):
    documents = [*texts()][share::2]
    engine = Engine(Tokenizer.load(definition), "gigatoken", parallel=False)
    batches, size = [[]], 0
    for document in documents:
        if size > 2**20:
            batches.append([])
            size = 0
        batches[-1].append(document)
        size += len(document)
    ready.release()
    go.wait()
    began = time.perf_counter()
    tokens = sum(len(engine.encode(batch)[0]) for batch in batches)
    tell.put((began, time.perf_counter(), tokens))
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ready, go, tell = context.Semaphore(0), context.Event(), context.Queue()
    workers = [context.Process(target=work, args=(share, ready, go, tell)) for share in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        ready.acquire()
    go.set()
    found = [tell.get() for _ in workers]
    seconds = max(end for _, end, _ in found) - min(began for began, _, _ in found)
    print(json.dumps([seconds, sum(tokens for *_, tokens in found)]))
"""

LIBRARY = f"""
import numpy as np
import tokenizers
library = tokenizers.Tokenizer.from_file(str(definition))
share = [*texts()][::{SLOW_SHARE}]
began = time.perf_counter()
with out.open("wb") as file:
    tokens = 0
    for first in range(0, len(share), 512):
        batch = [document.decode(errors="replace") for document in share[first : first + 512]]
        for encoding in library.encode_batch_fast(batch, add_special_tokens=False):
            file.write(np.array(encoding.ids, dtype=np.uint16).tobytes())
            tokens += len(encoding.ids) + 1
seconds = time.perf_counter() - began
print(json.dumps([seconds * sum(map(len, texts())) / sum(map(len, share)), tokens]))
"""


def rows() -> list[Row]:
    """Seconds, as megabytes of text per second; then the memory."""
    place = Path(tempfile.gettempdir()) / "locant-benchmark"
    text = _made(place / f"text-{MEGABYTES}", MEGABYTES)
    definition = _tokenizer(place / "tokenizer.json", text)
    large = _made(place / f"text-{LARGE_MEGABYTES}", LARGE_MEGABYTES, text)
    found = [
        ("locant prepare", *_measured(PREPARE, text, definition)),
        ("gigatoken alone, two processes, text in memory", *_measured(ENGINE, text, definition)),
        (
            f"tokenizers.encode_batch_fast, one process (1/{SLOW_SHARE} of it, scaled)",
            *_measured(LIBRARY, text, definition),
        ),
    ]
    first = found[0][1]
    question = f"{MEGABYTES} MB of text to tokens, two cores"
    speed = [
        Row(question=question, contender=name, milliseconds=round(1000 * seconds, 1), ratio=round(seconds / first, 3))
        for name, seconds, _ in found
    ]
    return [*speed, *_memory(found[0][2], _measured(PREPARE, large, definition))]


def _memory(small: float, large: tuple[float, float]) -> list[Row]:
    """Ratios are of the memory."""
    question = "largest memory of all processes together"
    contender = f"locant prepare, {MEGABYTES} MB"
    return [
        Row(question=question, contender=contender, milliseconds=None, ratio=1.0, megabytes=round(small, 1)),
        Row(
            question=question,
            contender=f"locant prepare, {LARGE_MEGABYTES} MB",
            milliseconds=round(1000 * large[0], 1),
            ratio=round(large[1] / small, 3),
            megabytes=round(large[1], 1),
        ),
    ]


# ------------------------------------------------------------------ running and watching


def _measured(code: str, folder: Path, definition: Path) -> tuple[float, float]:
    """Seconds and megabytes of a run."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        words = [sys.executable, "-c", CODE + code, str(folder), str(definition), str(Path(scratch) / "out")]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env, cwd=scratch) as process:
            watch = _Watch(process.pid)
            out, _ = process.communicate()
            peak = watch.stop()
    assert process.returncode == 0, f"a contender failed: {code}"
    return json.loads(out)[0], peak / 1e6


class _Watch:
    """Samples the memory of a process and all its children."""

    def __init__(self, pid: int) -> None:
        self.pid, self.peak, self.done = pid, 0, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.done.wait(0.05):
            self.peak = max(self.peak, sum(map(_memory_of, _family(self.pid))))

    def stop(self) -> int:
        self.done.set()
        self.thread.join()
        return self.peak


def _family(pid: int) -> Iterator[int]:
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from _family(int(child))


def _memory_of(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", text, flags=re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


# ------------------------------------------------------------------ the text


def _made(folder: Path, megabytes: int, source: Path | None = None) -> Path:
    """A folder of files with so much text, made unless it is there."""
    if not folder.exists():
        temporary = folder.with_name(f"{folder.name}.new")
        temporary.mkdir(parents=True, exist_ok=True)
        blocks = _natural() if source is None else _varied(source)
        for number in range(megabytes * 1_000_000 // FILE):
            (temporary / f"{number:04d}.txt").write_bytes(next(blocks))
        temporary.rename(folder)
    return folder


def _natural() -> Iterator[bytes]:
    """Documentation and sources, as they come, in blocks of a file each; over again where they do not suffice."""
    block = b""
    while True:
        for root in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
            for path in sorted(Path(root).rglob("*")):
                if path.suffix in SUFFIXES and path.is_file():
                    data = path.read_bytes()
                    if b"\0" not in data:
                        block += data.decode(errors="replace").encode() + SEPARATOR.encode()
                while len(block) >= FILE:
                    yield block[:FILE].decode(errors="ignore").encode()
                    block = block[FILE:]


def _varied(source: Path) -> Iterator[bytes]:
    """The same files again and again, each time with another ending on some of their words."""
    for turn in range(1_000):
        ending = f"{turn}".encode()
        for path in sorted(source.glob("*.txt")):
            data = path.read_bytes()
            yield re.sub(rb"\b([a-z]*[aeiou][a-z]{5,})\b", rb"\g<1>" + ending, data) if turn % 2 else data


def _tokenizer(path: Path, text: Path) -> Path:
    """A BPE trained on a bit of every file."""
    from locant import Tokenizer

    if not path.exists():
        bits = [file.read_bytes()[:300_000].decode(errors="ignore") for file in sorted(text.glob("*.txt"))]
        Tokenizer.train(bits, VOCAB_SIZE).save(path)
    return path
