"""The process of a comparison that the page starts: as `locant compare`, and a line of JSON for every step.

It gets its texts, options and folder as JSON. An interrupt ends it as it ends ``locant compare``, at the latest with
the next step: Python drops a `KeyboardInterrupt` that is raised while an object is cleaned up.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from locant.errors import LocantError
from locant.lab.comparison import Progress, compare_files
from locant.report.comparison.terminal import Screen

__all__ = ["Told"]


class Told(Screen):
    """Writes every step to stdout."""

    interrupted = False

    def interrupt(self, *_: object) -> None:
        """The handler of the signal."""
        self.interrupted = True
        raise KeyboardInterrupt

    def advance(self, progress: Progress) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        step = {"encoding": progress.encoding, "seed": progress.seed, "loss": progress.loss, "total": progress.total}
        sys.stdout.write(json.dumps(step) + "\n")
        sys.stdout.flush()


def _run(files: list[str], options: dict[str, Any], folder: str) -> None:
    told = Told()
    signal.signal(signal.SIGINT, told.interrupt)
    try:
        compare_files(files, options, folder=Path(folder), force=False, watcher=told, tokenizer=None, vocab_size=None,
                      download=False)  # fmt: skip
    except LocantError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    _run(**json.loads(sys.argv[1]))
