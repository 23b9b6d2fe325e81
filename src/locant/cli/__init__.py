"""The command line. Each verb reads its options, calls the library and prints the result.

Results go to stdout, messages and progress to stderr. Exit codes: 0 for success, 2 for an error that you can mend (one
line describes how), 1 for a bug in this package, 130 after Ctrl-C, 141 if the reader of stdout went away.
``LOCANT_TRACEBACK=1`` shows the traceback of any error.
"""

import click

from locant._version import __version__
from locant.cli.errors import VerbGroup

__all__ = ["main"]

VERBS = {
    "embed": "embed.embed", "compare": "training.compare", "train": "training.train",
    "generate": "training.generate", "explain": "configs.explain", "extend": "configs.extend",
    "convert": "weights.convert", "evaluate": "training.evaluate", "tune": "training.tune",
    "neighbours": "weights.neighbours", "prepare": "stores.prepare",
    "export": "stores.export", "plot": "encodings.plot", "probe": "configs.probe",
    "audit": "weights.audit", "check-batch": "engines.check_batch", "golden": "engines.golden",
    "serve-args": "engines.serve_args",
    "explore": "explore.explore", "bench": "encodings.bench", "list": "encodings.list_",
}  # fmt: skip
REMOVED = {"vocabulary": "use mergekit's tokensurgeon for a whole model, or TokenEmbedding.resize for one table"}
"""Verbs of earlier releases, and their replacements."""

main = click.version_option(__version__, message="locant %(version)s")(
    VerbGroup(
        name="locant",
        verbs=VERBS,
        removed=REMOVED,
        help="From raw text to attention: position encodings for transformers behind one interface.",
        epilog="locant uses the network only if you pass --download.",
    )
)
