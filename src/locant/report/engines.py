"""Print the positions in llama.cpp for `locant explain FILE.gguf`, and the flags of a server for `serve-args`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from locant.engines.gguf import GgufComparison, GgufModel
from locant.engines.serve_args import ServeArguments
from locant.report.console import MISSING, NamedRows, named_rows, out, show
from locant.spelling import spell


def print_gguf(model: GgufModel, comparison: GgufComparison | None, source: str) -> None:
    """Print the positions of the file `source` and, if it exists, its comparison with a configuration."""
    show(named_rows(_rows(model, comparison, source)))


def _rows(model: GgufModel, comparison: GgufComparison | None, source: str) -> NamedRows:
    yield "model", f"{source} ({model.architecture})"
    yield "context", f"{model.n_ctx:,} positions allocated"
    yield "encoding", str(model.encoding)
    yield "note", model.notes
    if comparison is not None:
        yield "differs", comparison.differences
        yield "ignored", (f"{key}: {reason}" for key, reason in comparison.ignored.items())
        yield "q and k", comparison.weights or ()
        if comparison.agrees:
            yield "agrees", f"within this context. Cosines and sines differ by {spell(comparison.cos_sin_error, 1)}"


def gguf_facts(model: GgufModel, comparison: GgufComparison | None, source: str) -> dict[str, Any]:
    """Return the facts of `print_gguf` as plain values, for JSON."""
    facts = {
        "file": source, "architecture": model.architecture, "n_ctx": model.n_ctx, "encoding": str(model.encoding),
        "notes": model.notes,
    }  # fmt: skip
    if comparison is None:
        return facts
    compared = {name: getattr(comparison, name) for name in ("agrees", "cos_sin_error", "differences", "weights")}
    return {**facts, **compared, "ignored": dict(comparison.ignored)}


def serving_facts(served: ServeArguments, source: str, losses: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags for a model and the facts about them, as plain values."""
    extension = served.extension
    return {
        "model": source, "engine": served.engine, "scaling": extension.method, "trained": extension.trained,
        "to": extension.to, "arguments": served.arguments, "override": dict(served.override),
        "ignored": dict(served.ignored), "notes": extension.notes, "losses": dict(losses),
    }  # fmt: skip


def print_serving(served: ServeArguments, losses: Mapping[str, Any]) -> None:
    """Print the flags on one line for a shell, or the keys of the configuration for `transformers`."""
    out().print(shlex.join(served.arguments) or json.dumps(served.override), soft_wrap=True)
    ignored = [f"{key}: {why}" for key, why in served.ignored.items()]
    rows: list[tuple[str, Any]] = [("ignored", ignored), ("note", served.extension.notes)]
    for length, loss in losses.items():
        before, after = (MISSING if each is None else f"{each:.4f}" for each in (loss["before"], loss["after"]))
        rows.append(("loss", f"{before} before, {after} after, in nats per token at {int(length):,} tokens"))
    show(named_rows(rows))
