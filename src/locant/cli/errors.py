"""The click group of all verbs. It imports a verb when the verb is called, and prints each error as one line."""

from __future__ import annotations

import difflib
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from locant.errors import InputError, LocantError, PythonRemedy, Remedy
from locant.registry import PlugIn, plug_in_of, plug_ins_by_module
from locant.shell import shell_word
from locant.spelling import number_list

OUR_MISTAKE = 1
WRONG_INPUT = 2
INTERRUPTED = 130
READER_GONE = 141
TRACEBACK = "LOCANT_TRACEBACK"
NO_MEMORY = ("can't allocate memory", "not enough memory", "overflow", "out of memory", "Invalid buffer size")
"""Phrases in torch's RuntimeErrors about too little memory."""

QUIET = {"TRANSFORMERS_VERBOSITY": "critical", "HF_HUB_VERBOSITY": "critical", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Environment variables that silence other libraries, unless the user sets them."""


class VerbGroup(click.Group):
    """The command ``locant VERB``.

    Args:
        verbs: the ``module.function`` in ``locant.cli`` for each verb.
        removed: the remedy for each verb that locant no longer has.
    """

    def __init__(self, *, verbs: dict[str, str], removed: dict[str, str], **options: Any) -> None:
        super().__init__(**options)
        self.verbs = verbs
        self.removed = removed

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Return the command of a verb. Raise `InputError` with the nearest verb if no verb has this name."""
        if cmd_name in self.verbs:
            module, _, name = self.verbs[cmd_name].partition(".")
            return getattr(import_module(f"locant.cli.{module}"), name)
        if cmd_name in self.removed:
            raise InputError(f"got verb {cmd_name!r}, which locant no longer has", self.removed[cmd_name])
        close = difflib.get_close_matches(cmd_name.lower(), self.verbs, n=1, cutoff=0.5)
        remedy = f"locant {close[0]}" if close else "locant --help"
        raise InputError(f"got verb {cmd_name!r}, expected one of {', '.join(self.verbs)}", remedy)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every verb with the first line of its help."""
        with formatter.section("Verbs"):
            helps = {name: self.get_command(ctx, name).help or "" for name in self.verbs}
            formatter.write_dl([(name, text.partition("\n")[0]) for name, text in helps.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb. If the reader of stdout went away, exit with `READER_GONE`, not with click's 1."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter, which flushes at exit
            ctx.exit(READER_GONE)
        except LocantError as error:
            if (verb := ctx.invoked_subcommand) is not None:
                error.remedy = as_typed(error.remedy, self.get_command(ctx, verb))
            raise
        return result

    def main(  # type: ignore[override]  # the other parameters are click's own
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **options: Any
    ) -> Any:
        """Run a verb, or print the help if there is none."""
        words = [*(sys.argv[1:] if args is None else args)] or ["--help"]
        run = functools.partial(super().main, words, prog_name or "locant", standalone_mode=False, **options)
        sys.exit(_run_and_print_errors(run))


def _run_and_print_errors(run: Callable[[], int | None]) -> int:
    """Call `run`, and return the exit code. Print each error as one line, or raise it if `TRACEBACK` is set.

    `run` returns a code only for ``--help``, and None otherwise.
    """
    _prepare_streams()
    os.environ.update(QUIET | os.environ)
    if os.environ.get(TRACEBACK):
        return run() or 0
    _end_on_signals()
    try:
        return run() or 0
    except (KeyboardInterrupt, click.Abort):
        return _print_error("interrupted", "", INTERRUPTED)
    except click.ClickException as error:
        return _print_error(*_describe_usage_error(error))
    except LocantError as error:
        return _print_error(error.cause, error.remedy)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        cause = f"the system reports {(error.strerror or str(error)).lower()!r}{where}"
        return _print_error(cause, "use a folder that you can read and write, on a disk with free space")
    except Exception as error:  # too little memory, or a bug in a plug-in or in locant
        raise SystemExit(_print_error(*_describe_unexpected_error(error))) from error


def _prepare_streams() -> None:
    """Discard output to a stream that a shell closed (``>&-``), and escape characters that an encoding lacks."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # open until the end
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _end_on_signals() -> None:
    """Make the signals of a scheduler end a run as Ctrl-C does, so that no partial file is left."""
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            if hasattr(signal, name):  # not every system has both
                signal.signal(getattr(signal, name), signal.default_int_handler)


def _print_error(cause: str, remedy: str, code: int = WRONG_INPUT) -> int:
    lines = f"locant: {cause}{f'; try: {remedy}' if remedy else ''}".splitlines()
    click.echo(" ".join(filter(None, map(str.strip, lines))), err=True)
    return code


def as_typed(remedy: str, verb: click.Command) -> str:
    """Return a remedy in words of the command line: its arguments, such as ``head_dim=64``, as options of this verb."""
    if isinstance(remedy, PythonRemedy):
        encodings = [_with_encoding(name, verb) for name in remedy.encodings]
        return " or ".join(encodings) or remedy.words
    options = {name: one for one in verb.params if isinstance(one, click.Option) for name in _names_of(one)}

    def option(name: str, value: Any) -> str:
        if name not in options:
            return Remedy(**{name: value})
        flag = options[name].opts[-1]
        if value is None or value is False:
            return next(iter(options[name].secondary_opts), f"no {flag}")
        typed = number_list(value) if isinstance(value, (list, tuple)) else value
        return flag if value is True or value is ... else f"{flag} {shell_word(str(typed))}"

    if not isinstance(remedy, Remedy):
        return remedy
    return remedy.text.format(*(option(name, value) for name, value in remedy.arguments.items()))


def _names_of(option: click.Option) -> list[str]:
    """Return the names of an option in Python: of its parameter, and of its flags (``--with`` sets ``way``)."""
    return [str(option.name), *(flag.lstrip("-").replace("-", "_") for flag in option.opts)]


def _with_encoding(name: str, verb: click.Command) -> str:
    """Return how to give an encoding to this verb: as an option, or as an argument of the command."""
    flags = [flag for one in verb.params for flag in one.opts if flag in ("--encoding", "--encodings", "--with")]
    return f"{flags[0]} {name}" if flags else f"locant {verb.name} {name}"


def _describe_usage_error(error: click.ClickException) -> tuple[str, str]:
    """Return the cause and the remedy of a click error. The remedy is click's suggestion or the verb's help."""
    message = " ".join(error.format_message().split()).rstrip(".")  # click lists choices line by line
    context = error.ctx if isinstance(error, click.UsageError) else None
    remedy = f"{context.command_path if context else 'locant'} --help"
    if isinstance(error, click.NoSuchOption):
        message = f"there is no option {error.option_name}"
        remedy = min(error.possibilities or [remedy])
    return message[0].lower() + message[1:], remedy


def _describe_unexpected_error(error: Exception) -> tuple[str, str, int]:
    """Return cause, remedy and exit code of an unexpected error.

    The cause is too little memory, or a bug in a plug-in or in locant.
    """
    lacks_memory = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    if lacks_memory or isinstance(error, MemoryError):
        return "there is not enough memory", "use smaller sizes", WRONG_INPUT
    last = traceback.extract_tb(error.__traceback__)[-1]
    description = f"{type(error).__name__}: {error} at {Path(last.filename).name}:{last.lineno}"
    if (plug_in := _find_plug_in(error)) is not None:
        remedy = f"pip install -U {plug_in.package}, or {TRACEBACK}=1 locant ... to see more"
        return f"{plug_in} fails: {description}", remedy, WRONG_INPUT
    cause = f"this is a mistake in locant: {description}"
    return cause, f"{TRACEBACK}=1 locant ..., and report what it prints", OUR_MISTAKE


def _find_plug_in(error: Exception) -> PlugIn | None:
    """Return the plug-in that caused an error, or ``None`` if no plug-in did.

    The frames are searched from the innermost one for a local variable that is an object of a plug-in, because a method
    of a plug-in may fail, or may accept or return the wrong thing. If no frame has such a variable, the frames are
    searched for code of a plug-in's package.
    """
    if not (by_module := plug_ins_by_module()):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    values = [value for frame in frames for value in frame.f_locals.values()]
    modules = [*(frame.f_globals.get("__name__") for frame in frames), *(type(value).__module__ for value in values)]
    owners = (by_module.get(str(module).partition(".")[0]) for module in modules)
    return next(filter(None, map(plug_in_of, values)), None) or next(filter(None, owners), None)
