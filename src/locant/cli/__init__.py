"""The command line: one verb per file, each reading its options, calling what computes and printing the result.

Results go to stdout, talk and progress to stderr. Exit codes: 0; 2 for what you can change (one line says how); 1 for a
mistake of this package; 130 after Ctrl-C; 141 where the reader of stdout went away. ``LOCANT_TRACEBACK=1`` shows the
traceback of any of them.
"""

from locant.cli.errors import VerbGroup
from locant.cli.options import show_version

__all__ = ["main"]

VERBS = ("embed", "compare", "explain", "extend", "convert", "prepare", "export", "plot", "bench", "list")

main = VerbGroup(
    name="locant",
    verbs=VERBS,
    params=[show_version],
    help="Raw text to attention-ready tensors, with every position encoding behind one interface.",
    epilog="Nothing touches the network unless --download is given.",
)
