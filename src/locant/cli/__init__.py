"""The command line: verbs that read their options, call what computes and print the result.

Results go to stdout, talk and progress to stderr. Exit codes: 0; 2 for what you can change (one line says how); 1 for a
mistake of this package; 130 after Ctrl-C; 141 where the reader of stdout went away. ``LOCANT_TRACEBACK=1`` shows the
traceback of any of them.
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
GONE = {"vocabulary": "use mergekit's tokensurgeon for a whole model, or TokenEmbedding.resize for one table"}
"""Verbs of earlier releases, and what to do instead."""

main = click.version_option(__version__, message="locant %(version)s")(
    VerbGroup(
        name="locant",
        verbs=VERBS,
        gone=GONE,
        help="Raw text to attention-ready tensors, with every position encoding behind one interface.",
        epilog="Nothing touches the network unless --download is given.",
    )
)
