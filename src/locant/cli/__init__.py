"""The command line: one verb per file, each reading its options, calling what computes and printing the result.

Results go to stdout, talk and progress to stderr. Exit codes: 0; 2 for what you can change (one line says how); 1 for a
mistake of this package; 130 after Ctrl-C; 141 where the reader of stdout went away. ``LOCANT_TRACEBACK=1`` shows the
traceback of any of them.
"""

import click

from locant._version import __version__
from locant.cli.errors import VerbGroup

__all__ = ["main"]

VERBS = (
    "embed", "compare", "explain", "extend", "convert", "evaluate", "tune", "neighbours", "vocabulary", "prepare",
    "export", "plot", "probe", "check-batch", "golden",
    "explore", "bench", "list",
)  # fmt: skip

main = click.version_option(__version__, message="locant %(version)s")(
    VerbGroup(
        name="locant",
        verbs=VERBS,
        help="Raw text to attention-ready tensors, with every position encoding behind one interface.",
        epilog="Nothing touches the network unless --download is given.",
    )
)
