"""The group of verbs: loads a verb when it is called, and turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import difflib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from locant.errors import InputError, LocantError

__all__ = ["VerbGroup"]

WRONG_INPUT = 2
INTERRUPTED = 130
READER_GONE = 141
TRACEBACK = "LOCANT_TRACEBACK"
NO_MEMORY = ("can't allocate memory", "not enough memory", "overflow", "out of memory", "Invalid buffer size")
"""How torch words it, as a RuntimeError, when a tensor is larger than the machine."""


class VerbGroup(click.Group):
    """``locant VERB``: the module ``locant.cli.VERB`` holds the command, called ``verb``."""

    def __init__(self, *, verbs: Sequence[str], **options: Any) -> None:
        super().__init__(**options)
        self.verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return import_module(f"locant.cli.{cmd_name}").verb if cmd_name in self.verbs else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Every verb with the first line of its help."""
        commands = ((name, self.get_command(ctx, name)) for name in self.verbs)
        with formatter.section("Verbs"):
            formatter.write_dl([(name, (verb.help or "").partition("\n")[0]) for name, verb in commands if verb])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """An unknown verb gets the nearest known one."""
        if args and args[0] not in self.verbs and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0].lower(), self.verbs, n=1, cutoff=0.5)
            remedy = f"locant {close[0]}" if close else "locant --help"
            raise InputError(f"got verb {args[0]!r}, expected one of {', '.join(self.verbs)}", remedy)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the verb; a reader of stdout that went away is no error, and click would exit with 1."""
        try:
            returned = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _close_stdout()
            ctx.exit(READER_GONE)
        return returned

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs a verb, or prints the help where none is given; outside `standalone_mode` errors are raised."""
        args = sys.argv[1:] if args is None else [*args]

        def run() -> object:
            return super(VerbGroup, self).main(
                args or ["--help"], prog_name or "locant", complete_var, standalone_mode=False, **extra
            )

        return sys.exit(_guarded(run)) if standalone_mode else run()


def _guarded(run: Callable[[], object]) -> int:
    """The exit code of a run; with `TRACEBACK` set, errors are raised as they are."""
    _open_closed_streams()
    if os.environ.get(TRACEBACK):
        return _code(run())
    _print_anything()
    _clean_up_when_told_to_stop()
    try:
        code = _code(run())
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted", "", INTERRUPTED)
    except click.ClickException as error:
        return _say(*_usage(error), WRONG_INPUT)
    except LocantError as error:
        return _say(error.cause, error.remedy, WRONG_INPUT)
    except MemoryError:
        return _say("there is not enough memory", "smaller sizes", WRONG_INPUT)
    except OSError as error:
        return _say(_system(error), "a place with room that you may read and write", WRONG_INPUT)
    except RuntimeError as error:
        if any(words in str(error) for words in NO_MEMORY):
            return _say("there is not enough memory for tensors of these sizes", "smaller sizes", WRONG_INPUT)
        sys.excepthook = _report_bug
        raise
    except BaseException:
        sys.excepthook = _report_bug
        raise
    return code


def _clean_up_when_told_to_stop() -> None:
    """What a scheduler sends ends a run as Ctrl-C does: nothing half-written stays behind."""
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            if hasattr(signal, name):  # not every system has both
                signal.signal(getattr(signal, name), signal.default_int_handler)


def _code(returned: object) -> int:
    """Click hands back the code of ``--help``; verbs return nothing."""
    return returned if isinstance(returned, int) else 0


def _say(cause: str, remedy: str, code: int) -> int:
    line = " ".join(f"locant: {cause}{f'; try: {remedy}' if remedy else ''}".split())
    click.echo(line, err=True)
    return code


def _usage(error: click.ClickException) -> tuple[str, str]:
    """Click's own complaint, with its suggestion or the verb's help as the remedy."""
    message = error.format_message().splitlines()[0].rstrip(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    remedy = f"{context.command_path if context else 'locant'} --help"
    if isinstance(error, click.NoSuchOption):
        message = f"there is no option {error.option_name}"
        if error.possibilities:
            remedy = min(error.possibilities)
    return message[0].lower() + message[1:], remedy


def _system(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    return f"the system says {(error.strerror or str(error)).lower()!r}{where}"


def _open_closed_streams() -> None:
    """A shell can start a program with a stream closed (``>&-``): what is printed there is discarded."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # open until the end


def _print_anything() -> None:
    """Show as an escape what the encoding of stdout cannot write: a lone surrogate, or under ASCII most of a text."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _close_stdout() -> None:
    """The reader of stdout is gone; without this the interpreter would print an error when it flushes it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _report_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """One line for what should not have happened; the interpreter exits with 1."""
    frames = traceback.extract_tb(trace)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    cause = f"this is a mistake in locant: {kind.__name__}: {error}{where}"
    _say(cause, f"{TRACEBACK}=1 locant ..., and report what it prints", 1)
