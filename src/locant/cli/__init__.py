"""The command line: one verb per file, each reading its options, calling what computes and printing the result.

Results go to stdout, talk and progress to stderr. Exit codes: 0; 2 for what you can change (one line says how); 1 for a
mistake of this package; 130 after Ctrl-C; 141 where the reader of stdout went away. ``LOCANT_TRACEBACK=1`` shows the
traceback of any of them.
"""

from locant.cli.errors import VerbGroup
from locant.cli.options import show_version

__all__ = ["main"]

VERBS = {
    "embed": "Turn text into ids, windows and embeddings, and show each step.",
    "compare": "Train every encoding at a short length, and measure it at longer ones.",
    "explain": "Say what a model does about position, in words and numbers.",
    "extend": "Write the configuration of a model for a longer context.",
    "convert": "Change which dimensions rotary positions pair, in the weights of a checkpoint.",
    "prepare": "Make a token store from files of text.",
    "export": "Write a token store in the format of another program, or one of theirs as a locant store.",
    "plot": "Draw a picture of an encoding.",
    "bench": "Show what was measured against other people's code, on which device.",
    "list": "List every encoding, what it does and costs; or one in full, with its numbers.",
}

main = VerbGroup(
    name="locant",
    verbs=VERBS,
    params=[show_version],
    help="Raw text to attention-ready tensors, with every position encoding behind one interface.",
    epilog="Nothing touches the network unless --download is given.",
)
