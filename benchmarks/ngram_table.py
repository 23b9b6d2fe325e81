"""Can a table larger than memory be trained, killed and resumed with the same bits, and what does reading it cost?

    python -m benchmarks.ngram_table FOLDER --gigabytes 16 --steps 100 --record

1. A child process trains the table of a small model without interruption, and the bytes of the file are hashed.
2. The table returns to step 0 by its undo file. Another child trains it with checkpoints, and is killed at a random
   time. A third child resumes at the last checkpoint. All bytes of the table and of the model have to be the same.
3. Rows are read cold (the page cache has none of them) and warm, with and without reading ahead, against
   `torch.nn.Embedding` in memory.

The folder must not exist, and needs as much free space as the table, and a third more for the undo files of a long run.
With `--record` the results replace those of this device in `benchmarks/results`, and the guide shows them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.__main__ import record
from benchmarks.timing import Row
from locant import NGramEmbedding
from locant.embedding import NGramHash, RowAdagrad, TableFile, read_ahead
from locant.files import replace_file
from locant.lab import environment
from locant.report.benchmarks import table

__all__ = ["main"]

VOCAB, WIDTH, HEADS, BATCH, LENGTH = 50_000, 128, 4, 4, 512
IN_MEMORY = 2**31
"""The largest table in bytes of the peer in memory."""


def hashing_of(gigabytes: float) -> NGramHash:
    """The columns of the largest table of this size: pairs and triples of tokens."""
    rows = int(gigabytes * 1e9) // (4 * WIDTH + 4)
    return NGramHash.of(orders=(2, 3), heads=HEADS, size=rows // (2 * HEADS) - 500, vocab_size=VOCAB)


def batch_of(step: int) -> Tensor:
    """Ids of one step, some of which are much more frequent than others, as in a text."""
    generator = torch.Generator().manual_seed(step)
    return (VOCAB ** torch.rand(BATCH, LENGTH, generator=generator)).long() - 1


class Model(nn.Module):
    """A model that predicts a class of the next token from the n-grams of the last ones."""

    def __init__(self, embedding: NGramEmbedding) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = embedding
        self.head = nn.Linear(embedding.output_width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.embedding(ids)[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten() % 256)


def train(folder: Path, gigabytes: float, steps: int, every: int) -> None:
    """Train to the last step, from the last checkpoint of the model. `every` 0: no checkpoint before the end."""
    saved = sorted(folder.glob("model-*.safetensors"))
    step = int(saved[-1].stem.removeprefix("model-")) if saved else 0
    file = TableFile.open(folder / "table.safetensors", step)
    with torch.device("meta"):
        embedding = NGramEmbedding(hashing_of(gigabytes), WIDTH)
    embedding.use_file(file)
    model = Model(embedding)
    if saved:
        model.head.load_state_dict(load_file(saved[-1]))
    rows = RowAdagrad([embedding.weight], lr=0.05, file=file)
    others = torch.optim.SGD(model.head.parameters(), lr=0.1)
    batches = (batch_of(number) for number in range(step, steps))
    for ids in read_ahead(batches, file, embedding.rows_of):
        loss = model(ids)
        loss.backward()
        for optimizer in (rows, others):
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
        if step == steps or (every and step % every == 0):
            file.checkpoint(step)  # first the table, then the model
            with replace_file(folder / f"model-{step:06d}.safetensors") as temporary:
                save_file(model.head.state_dict(), temporary)
            if every:
                file.forget(step)
    file.close()


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def child(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.ngram_table", str(folder), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def lines(process: subprocess.Popen[str]) -> Iterator[dict[str, float]]:
    assert process.stdout is not None
    return map(json.loads, process.stdout)


def report(text: str) -> None:
    print(text, flush=True)


def resume(folder: Path, gigabytes: float, steps: int) -> dict[str, Any]:
    """Train without interruption, then killed and resumed, and compare all bytes."""
    path, size = folder / "table.safetensors", ("--gigabytes", gigabytes, "--steps", steps)
    hashing = hashing_of(gigabytes)
    began = time.perf_counter()
    TableFile.create(path, num_rows=hashing.num_rows, width=WIDTH, std=0.02).close()
    written = time.perf_counter() - began
    report(f"table     {hashing.num_rows:,} x {WIDTH} float32, {path.stat().st_size / 1e9:.1f} GB, in {written:.0f} s")
    first = digest(path)
    whole, losses, times = child(folder, "--train", "--every", 0, *size), {}, []
    for each in lines(whole):
        losses[int(each["step"])] = each["loss"]
        times.append(time.perf_counter())
    assert whole.wait() == 0
    expected = (digest(path), digest(folder / f"model-{steps:06d}.safetensors"))
    assert expected[0] != first, "training did not change the table"
    undo = sum(each.stat().st_size for each in Path(f"{path}.undo").iterdir())
    a_step = (times[-1] - times[0]) / (steps - 1)
    report(f"trained   {steps} steps in {a_step:.2f} s each, loss {losses[1]:.3f} to {losses[steps]:.3f}, "
           f"undo file {undo / 1e9:.2f} GB")  # fmt: skip
    TableFile.open(path, 0).close()
    assert digest(path) == first, "the undo file did not give back the bytes of step 0"
    report("returned  to the bytes of step 0")
    (folder / f"model-{steps:06d}.safetensors").unlink()
    stop = steps // 2 + secrets.randbelow(max(1, steps // 4))
    killed, last = child(folder, "--train", "--every", max(steps // 4, 1), *size), 0
    for each in lines(killed):
        last = int(each["step"])
        assert each["loss"] == losses[last]
        if last == stop:
            time.sleep(secrets.randbelow(100) / 1_000)
            os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    report(f"killed    after step {last}")
    resumed = child(folder, "--train", "--every", max(steps // 4, 1), *size)
    again = {int(each["step"]): each["loss"] for each in lines(resumed)}
    assert resumed.wait() == 0
    assert all(loss == losses[step] for step, loss in again.items())
    assert (digest(path), digest(folder / f"model-{steps:06d}.safetensors")) == expected
    report(f"resumed   from step {min(again) - 1}: all bytes of the table and of the model are the same")
    return {
        "rows": hashing.num_rows, "gigabytes": round(path.stat().st_size / 1e9, 3), "steps": steps,
        "seconds_written": round(written, 1), "seconds_a_step": round(a_step, 3),
        "undo_gigabytes": round(undo / 1e9, 3), "killed_after": last, "resumed_from": min(again) - 1,
    }  # fmt: skip


def look_up(folder: Path, gigabytes: float, steps: int, contender: str) -> None:
    """Print how many rows a second one contender reads, between which a model computes for some milliseconds."""
    hashing = hashing_of(gigabytes)
    with torch.device("meta"):
        embedding = NGramEmbedding(hashing, WIDTH)
    batches = [batch_of(10_000 + number) for number in range(steps)]
    if contender == "memory":
        small = nn.Embedding(min(hashing.num_rows, IN_MEMORY // (4 * WIDTH)), WIDTH)
        source: Iterator[Tensor] = iter(batches)
        read = lambda ids: small(embedding.rows_of(ids) % small.num_embeddings)  # noqa: E731
    else:
        file = TableFile.open(folder / "table.safetensors")
        embedding.use_file(file)
        source = read_ahead(batches, file, embedding.rows_of) if "ahead" in contender else iter(batches)
        read = embedding
    work, spent, computed = torch.randn(600, 600), 0.0, 0.0
    with torch.no_grad():
        began = time.perf_counter()
        for ids in source:
            read(ids)
            before = time.perf_counter()
            for _ in range(3):
                work = (work @ work).clamp(-1, 1)
            computed += time.perf_counter() - before
        spent = time.perf_counter() - began
    count = steps * BATCH * LENGTH * hashing.num_columns
    print(json.dumps({"rows": count / (spent - computed), "seconds": spent, "computed": computed}))


def drop_cache(path: Path) -> None:
    """Ask the system to forget the pages of a file that no process has mapped."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def look_ups(folder: Path, gigabytes: float, steps: int) -> list[Row]:
    """Each contender in a process of its own. "Cold" begins with no row in memory, and "warm" reads the same rows."""
    question = f"read the n-grams of {BATCH * LENGTH:,} tokens from a table of {gigabytes:g} GB"
    names = {"memory": "torch.nn.Embedding, at most 2 GB in memory"}
    rows: list[Row] = []
    for contender in ("memory", "cold", "warm", "cold, read ahead", "warm, read ahead"):
        if contender.startswith("cold"):
            drop_cache(folder / "table.safetensors")
        process = child(folder, "--look-up", contender, "--gigabytes", gigabytes, "--steps", steps)
        (found,) = lines(process)
        assert process.wait() == 0
        report(f"{contender:18} {found['rows']:12,.0f} rows a second beside {found['computed']:.2f} s of the model, "
               f"{found['seconds']:.2f} s in all")  # fmt: skip
        milliseconds = round(1_000 * (found["seconds"] - found["computed"]) / steps, 3)
        ratio = milliseconds / rows[0].milliseconds if rows and rows[0].milliseconds else 1.0
        name = names.get(contender, f"in a file, {contender}")
        rows.append(Row(question=question, contender=name, milliseconds=milliseconds, ratio=round(ratio, 3)))
    return rows


def main() -> None:
    """Run all parts, or the part of a child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--record", action="store_true", help="write the results to benchmarks/results")
    parser.add_argument("--every", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--look-up", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.train:
        train(chosen.folder, chosen.gigabytes, chosen.steps, chosen.every)
    elif chosen.look_up:
        look_up(chosen.folder, chosen.gigabytes, chosen.steps, chosen.look_up)
    else:
        chosen.folder.mkdir(parents=True)
        resumed = resume(chosen.folder, chosen.gigabytes, chosen.steps)
        rows = look_ups(chosen.folder, chosen.gigabytes, chosen.steps)
        report(table([asdict(row) for row in rows]))
        if chosen.record:
            record("ngram_table", {"environment": environment(), "rows": [*map(asdict, rows)], "resumed": resumed})


if __name__ == "__main__":
    main()
