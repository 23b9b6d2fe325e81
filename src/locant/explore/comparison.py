"""A comparison that the page starts, in a separate process that runs this module.

The process works like `locant compare`, and writes a line of JSON for every step. Its texts, options and folder
arrive as JSON. An interrupt ends it as it ends ``locant compare``. If Python drops the `KeyboardInterrupt`, as it does
while an object is cleaned up, the process ends at the next step.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from locant.errors import LocantError
from locant.lab.comparison import Progress, compare_files
from locant.report.comparison import Screen

STOP, STOPPED = (getattr(signal, name, signal.SIGINT) for name in ("CTRL_BREAK_EVENT", "SIGBREAK"))
"""The signal to send and the signal that arrives. On Windows a process group can receive Ctrl-Break but not Ctrl-C."""
GROUP = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)


class Comparison:
    """A process that trains and measures, and writes an ordinary report. `options` are the fields of `Settings`."""

    def __init__(self, files: list[str], options: dict[str, Any], folder: Path) -> None:
        self.files, self.options, self.folder = files, options, folder
        self.losses: dict[str, list[float]] = {}
        self.total = 0
        self.stopped = False
        self._last_line = ""  # the last line that is not a step
        arguments = json.dumps({"files": files, "options": options, "folder": str(folder)})
        self._process = subprocess.Popen(  # noqa: S603  # this Python, with our own module
            [sys.executable, "-m", __name__, arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, creationflags=GROUP,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, args=[self._process.stdout], daemon=True)
        self._reader.start()

    @property
    def state(self) -> str:
        """``running``, ``finished``, ``stopped``, or an error message."""
        code = self._process.poll()
        if code is None:
            return "running"
        self._reader.join()
        if code == 0 or self.stopped:
            return "stopped" if code else "finished"
        return self._last_line or f"ended with code {code}"

    @property
    def num_steps(self) -> int:
        """The number of steps of all trainings so far."""
        return sum(map(len, self.losses.values()))

    def stop(self, *, wait: bool = False) -> None:
        """Stop the process as Ctrl-C does. The process writes a report of the finished measurements.

        With `wait`, return when it has ended.
        """
        if self._process.poll() is None:
            self.stopped = True
            self._process.send_signal(STOP)
        if wait:
            self._process.wait()

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                if not line.startswith("{"):
                    self._last_line = line.strip() or self._last_line
                    continue
                step = json.loads(line)
                self.total = step["total"]
                self.losses.setdefault(f"{step['encoding']}, seed {step['seed']}", []).append(step["loss"])


class StepWriter(Screen):
    """A `Screen` that writes every step to stdout."""

    interrupted = False

    def interrupt(self, *_: object) -> None:
        """Handle the signal by an exception."""
        self.interrupted = True
        raise KeyboardInterrupt

    def advance(self, progress: Progress) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        its = progress.training
        step = {"encoding": its.encoding, "seed": its.seed, "loss": progress.loss, "total": progress.total}
        sys.stdout.write(json.dumps(step) + "\n")
        sys.stdout.flush()


def _run(files: list[str], options: dict[str, Any], folder: str) -> None:
    writer = StepWriter()
    signal.signal(STOPPED, writer.interrupt)
    try:
        compare_files(files, options, folder=Path(folder), force=False, watcher=writer, tokenizer=None, vocab_size=None,
                      download=False)  # fmt: skip
    except LocantError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    _run(**json.loads(sys.argv[1]))
