"""A program that prepares a store and is killed, or fails, after a time or at a chosen step of the file system.

It is run as a script, by `tests.text.prepare.test_crash`, and takes orders as lines of JSON on standard input.
Each order is carried out in a copy of this process (a fork, so that nothing has to be imported again), which is what
is killed. The package needs to know nothing of this: an audit hook sees every file that is opened for writing,
renamed, made or removed, and `os.write`, `os.fsync` are wrapped. Nothing is really flushed to the disk, because a
process that is killed takes nothing with it that the system was given.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import select
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove")
FAULTS = {"full": errno.ENOSPC, "broken": errno.EIO}


class Steps:
    """Counts the steps under a folder, and does something at one of them, before it happens."""

    def __init__(self, root: str, fault: str | None, at: int | None) -> None:
        self.root, self.fault, self.at = root, fault, at
        self.names: list[str] = []
        self._write, self._fsync = os.write, os.fsync

    def install(self) -> None:
        sys.addaudithook(self._audit)
        os.write, os.fsync = self._count_write, self._count_fsync

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in EVENTS or (event == "open" and not args[2] & WRITING):
            return
        path = args[1] if event == "os.rename" else args[0]
        if event in ("os.rmdir", "os.remove") and args[1] != -1:  # within a folder that is removed with all it holds
            self._step(f"{event.removeprefix('os.')} {path}", can_fail=False)
        elif isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self.root):
            cannot_fail = event in ("os.rmdir", "os.remove")  # what fails there has no remedy, and harms nothing
            self._step(f"{event.removeprefix('os.')} {os.fspath(path)[len(self.root) :]}", can_fail=not cannot_fail)

    def _count_fsync(self, handle: int) -> None:
        self._step(f"fsync {self._path(handle)}")

    def _count_write(self, handle: int, data: Any) -> int:
        path = self._path(handle)
        if path.startswith("pipe:"):
            return self._write(handle, data)
        if self.fault == "torn" and len(self.names) == self.at:
            self._write(handle, memoryview(data)[: (len(data) + 1) // 2])
        self._step(f"write {path}")
        return self._write(handle, data)

    def _path(self, handle: int) -> str:
        return str(Path(f"/proc/self/fd/{handle}").readlink()).removeprefix(self.root)

    def _step(self, name: str, *, can_fail: bool = True) -> None:
        here = len(self.names) == self.at
        self.names.append(name)
        if here and self.fault in ("kill", "torn"):
            os.kill(os.getpid(), signal.SIGKILL)
        if here and self.fault in FAULTS and can_fail:
            raise OSError(FAULTS[self.fault], os.strerror(FAULTS[self.fault]))


def carry_out(order: dict[str, Any]) -> dict[str, Any]:
    from locant import InputError, Tokenizer
    from locant.text.prepare import finalize, prepare

    steps = Steps(order["out"], order.get("fault"), order.get("at"))
    steps.install()
    options = {"tokenizer": Tokenizer.bytes(), "workers": 1, **order["options"]}
    try:
        if order.get("finalize"):
            finalize(order["out"])
        else:
            prepare(order["paths"], order["out"], **options)
    except InputError as error:
        return {"said": str(error), "steps": steps.names}
    return {"said": None, "steps": steps.names}


def in_a_copy(order: dict[str, Any]) -> dict[str, Any]:
    """Carry out an order in a copy of this process; its exit code, and what it said if it lived to say it."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        answer = b""
        try:
            answer = json.dumps(carry_out(order)).encode()
        except BaseException as error:
            answer = json.dumps({"said": repr(error), "crashed": True, "steps": []}).encode()
            raise
        finally:
            with os.fdopen(write, "wb") as file:
                file.write(answer)
            os._exit(0)
    with suppress(PermissionError, ProcessLookupError):  # whoever of the two comes first
        os.setpgid(pid, pid)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        if "after" in order and not select.select([file], [], [], order["after"])[0]:
            os.killpg(pid, signal.SIGKILL)
        answer = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"code": code, **(json.loads(answer) if code == 0 else {})}


def warm_up() -> None:
    """Whatever is imported or looked up the first time shall not be so in every copy."""
    from locant.text.prepare import prepare

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a.txt").write_text("warm")
        prepare(folder, Path(folder) / "store", tokenizer="bytes", workers=1)
    gc.freeze()


if __name__ == "__main__":
    warm_up()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(in_a_copy(json.loads(line))) + "\n")
        sys.stdout.flush()
