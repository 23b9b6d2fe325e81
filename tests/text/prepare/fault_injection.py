"""Running `tests.text.prepare.fault_process`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")


class FaultInjector:
    """Prepares a small corpus in a process that can be killed, or fails, at a chosen moment."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, options: dict[str, Any]) -> None:
        self.process, self.options = process, options
        self.corpus, self.out = folder / "corpus", folder / "store"

    def run(self, **order: Any) -> dict[str, Any]:
        order = {"paths": [str(self.corpus)], "out": str(self.out), "options": self.options, **order}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert not answer.get("crashed"), answer
        return answer


@contextmanager
def fault_injector(folder: Path, **options: Any) -> Iterator[FaultInjector]:
    """Three files of a few documents each, shards of 80 tokens: two parts, of four shards and of two."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for number in range(3):
        (corpus / f"{number}.txt").write_text("\n\n".join(f"document {number}.{i} " * (1 + i % 3) for i in range(6)))
    script = Path(__file__).with_name("fault_process.py")
    with subprocess.Popen(
        [sys.executable, "-P", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ONE_THREAD},
    ) as process:
        yield FaultInjector(process, folder, {"separator": "\n\n", "shard_size": 80, **options})
        process.stdin.close()
