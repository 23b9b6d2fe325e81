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

Results go to stdout, progress to stderr. Every verb accepts `--json`. Without a file, `embed` and `compare` use a
sample text that ships with Python. No verb uses the network unless you pass `--download`. A wrong input causes a
message of one line with the cause and the remedy, and exit code 2.

{verbs}
"""


def _help(verb: str) -> str:
    shown = CliRunner().invoke(
        main, [verb, "--help"], env={"COLUMNS": "100"}, catch_exceptions=False, prog_name="locant"
    )
    return shown.stdout.strip()
