"""A Python that refuses locant what Windows lacks: every process that finds this folder on its path loads this file.

Of Windows it has: modules and functions that are missing; folders that cannot be opened, flushed, or replaced by a
rename; files that are open or mapped anywhere, which nobody moves, replaces or removes; names that are not allowed;
processes that are spawned. It is no Windows: paths, line ends, the code page and Ctrl-Break are those of this system.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import fcntl
import io
import mmap
import multiprocessing
import os
import signal
import types
from pathlib import Path

MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "selectors", "syslog", "termios", "triton", "tty"}
"""Missing, or (`selectors`) of no use with pipes."""
NAMES = {
    mmap: ("MAP_ANONYMOUS", "MAP_PRIVATE", "MAP_SHARED", "PROT_EXEC", "PROT_READ", "PROT_WRITE"),
    os: (
        "O_DIRECTORY", "fchmod", "fchown", "fork", "forkpty", "getuid", "geteuid", "killpg", "mkfifo", "pread",
        "preadv", "pwrite", "pwritev", "register_at_fork", "sched_getaffinity", "statvfs", "supports_dir_fd", "sysconf",
    ),
    signal: ("SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "alarm", "pthread_sigmask", "setitimer"),
}  # fmt: skip
FORBIDDEN = set('<>:"|?*')

plain = {
    name: getattr(os, name) for name in ("open", "fsync", "replace", "rename", "unlink", "remove", "rmdir", "mkdir")
}
import_plain, open_plain, library_plain = builtins.__import__, builtins.open, ctypes.CDLL.__init__


def refusal(number: int, path: object) -> OSError:
    return OSError(number, os.strerror(number), str(path))


def import_known(name, *args, **options):
    """What locant imports; the rest of Python is that of this system, which needs them."""
    module = import_plain(name, *args, **options)
    importing = (args[0] if args else options.get("globals")) or {}
    if not str(importing.get("__name__")).startswith("locant"):
        return module
    if name.partition(".")[0] in MODULES:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if module not in NAMES:
        return module
    less = types.ModuleType(name)
    less.__dict__.update({key: value for key, value in vars(module).items() if key not in NAMES[module]})
    return less


def library(self, name, *args, **options):
    if name is None and type(self) is ctypes.CDLL:
        raise TypeError("argument of type 'NoneType' is not iterable")
    library_plain(self, name, *args, **options)


def require_free(path: str | Path) -> None:
    """Raise if any process has this file, or one in this folder, open or mapped."""
    place = os.path.realpath(path)
    for process in Path("/proc").glob("[0-9]*"):
        held = [line.split(maxsplit=5)[-1].rstrip() for line in lines_of(process / "maps")]
        with contextlib.suppress(OSError):  # it has ended
            for link in [*(process / "fd").iterdir()]:
                with contextlib.suppress(OSError):  # closed meanwhile
                    held.append(str(link.readlink()))
        if any(each == place or each.startswith(f"{place}/") for each in held):
            raise refusal(errno.EACCES, f"{path}, open in process {process.name}")


def lines_of(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8").splitlines()
    except OSError:
        return []


def require_name(path: object) -> None:
    if not isinstance(path, int) and (FORBIDDEN & {*Path(os.fsdecode(path)).name} or str(path).endswith((" ", "."))):
        raise refusal(errno.EINVAL, path)


def open_handle(path, flags, mode=0o777, *, dir_fd=None):
    if Path(os.fsdecode(path)).is_dir():
        raise refusal(errno.EACCES, path)
    if flags & os.O_CREAT:
        require_name(path)
    return plain["open"](path, flags, mode)


def open_file(file, mode="r", *args, **options):
    if mode[0] != "r":
        require_name(file)
    return open_plain(file, mode, *args, **options)


def fsync(handle):
    if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise refusal(errno.EBADF, handle)
    plain["fsync"](handle)


def replace(source, target, **options):
    require_name(target)
    if Path(os.fsdecode(target)).is_dir():
        raise refusal(errno.EACCES, target)
    for path in (source, target):
        require_free(path)
    plain["replace"](source, target, **options)


def mkdir(path, *args, **options):
    require_name(path)
    plain["mkdir"](path, *args, **options)


def removing(name):
    def remove(path, **options):
        require_free(path)
        plain[name](path, **options)

    return remove


if __name__ == "sitecustomize":  # and not where pytest looks for examples in docstrings
    multiprocessing.set_start_method("spawn")
    builtins.__import__, builtins.open, io.open, ctypes.CDLL.__init__ = import_known, open_file, open_file, library
    os.open, os.fsync, os.replace, os.rename, os.mkdir = open_handle, fsync, replace, replace, mkdir
    os.unlink, os.remove, os.rmdir = (removing(name) for name in ("unlink", "remove", "rmdir"))
