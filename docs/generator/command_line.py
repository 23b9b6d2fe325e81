"""The page of the command line: what every verb says with ``--help``."""

from __future__ import annotations

import click
from click.testing import CliRunner

from locant.cli import main

__all__ = ["command_line"]


def command_line() -> str:
    """What is true of all verbs, and the help of each."""
    context = click.Context(main)
    verbs = "\n\n".join(f"## locant {verb}\n\n```text\n{_help(verb)}\n```" for verb in main.list_commands(context))
    return f"""(command-line)=
# The command line

Results go to stdout, progress to stderr. Every verb takes `--json`. Without a file, `embed` and `compare` use the
sample text that ships inside Python. Nothing touches the network unless `--download` is given. A wrong input is
answered by one line, with the cause and what to try, and exit code 2.

{verbs}
"""


def _help(verb: str) -> str:
    shown = CliRunner().invoke(
        main, [verb, "--help"], env={"COLUMNS": "100"}, catch_exceptions=False, prog_name="locant"
    )
    return shown.stdout.strip()
