"""The page of known bugs: the five most famous with a picture each, and every entry with its cost in trained models.

What happened, the threads and the checks come from the docstrings of the tests, costs from the record of ``make real``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from docs.generator.markdown import picture
from docs.generator.real_models import RECORD
from locant.explore.screens.known_bugs import BUGS, ENTRIES
from locant.figures.canvas import ONE_SIGN, THEMES
from locant.position_costs import SMALL, Cost

__all__ = ["FAMOUS", "cost", "draw", "entries", "famous", "pictures"]

IMPROVEMENTS = {"exact-angles"}
"""Changes in the record that are not bugs."""


class Famous(NamedTuple):
    """A famous bug: lines of code that have it, and lines without it."""

    code: str
    fix: str
    words: str
    """How to find the lines and what else fixes them."""
    related: tuple[str, ...] = ()
    """The numbers of other entries with the same cause."""


FAMOUS = {
    "other-layout": Famous(
        "a, b = x[..., 0::2], x[..., 1::2]  # pairs are neighbours, but weights have halves",
        "a, b = x.chunk(2, dim=-1)  # or Rotary(head_dim, layout='half')",
        "One line of code decides the layout, and a configuration does not state it. `locant convert` moves the rows "
        "of weights to the layout of your code.",
        ("53", "54", "109"),
    ),
    "bfloat16-positions": Famous(
        "positions = torch.arange(seq_len, dtype=x.dtype)  # x is in bfloat16",
        "positions = torch.arange(seq_len)  # integers, and angles in float32",
        "The same happens in a product of positions and frequencies under autocast. `Rotary` takes integers, and its "
        "angles are exact.",
        ("2",),
    ),
    "padding-counted": Famous(
        "positions = torch.arange(attention_mask.shape[1])  # counts the padding on the left",
        "positions = locant.Positions.from_mask(attention_mask)  # .index has the position ids",
        "Rotary positions depend only on distances, so a mask that hides the padding makes the bug harmless there. "
        "Learned and sinusoidal positions differ, and so does a cache that is filled without padding.",
    ),
    "documents-run-on": Famous(
        "positions = torch.arange(sum(lengths))  # three documents in one row",
        "positions = locant.Positions.packed(lengths)  # restarts, mask and cu_seqlens",
        "Position ids that restart are not enough: the mask must hide the other documents, too. `Positions` has both.",
        ("78", "121"),
    ),
    "mixed-frequencies": Famous(
        "keys = torch.cat([keys, rotary.for_length(n).rotate_one(k, new)], dim=2)",
        "keys = rotary.rerotate(keys, old, n - 1, n)\n"
        "keys = torch.cat([keys, rotary.for_length(n).rotate_one(k, new)], dim=2)",
        "If the largest length is known, `rotary.for_length(largest)` for all keys does the same at no cost.",
        ("46",),
    ),
}  # fmt: skip
"""The five bugs of the gallery, by the name of their drawing in the explorer."""

SUBJECTS = {
    "rows": "Padding, packing, caches and ranks", "angles": "Angles", "casts": "Casts to half precision",
    "layouts": "Layouts of pairs", "partial_rotation": "Partial rotary", "scaling_keys": "Scalings in configurations",
    "scaling_lengths": "Scalings that depend on the length", "batches": "Training batches and converters",
    "scores": "Biases and scales", "rotary_kernels": "Rotary kernels", "fused_norms": "Kernels with norm and rotation",
    "moved_keys": "Reused keys", "buffers": "Buffers", "compilation": "Compilation and CUDA graphs",
    "processes": "Training on several processes", "gpu_memory": "Memory of GPU kernels", "ids": "Ids out of range",
    "token_tables": "Embedding tables", "texts": "Tokenizers", "token_store": "Files of tokens",
    "windows": "Training windows",
}  # fmt: skip
"""The headings of the page, by the name of the file of tests."""


def entries(bugs: Sequence[Mapping[str, Any]] | None = None, record: Mapping[str, Any] | None = None) -> str:
    """Return all entries by subject: what happened, where, what it cost, how to check other code, and the test."""
    bugs, record = _bugs() if bugs is None else bugs, _record() if record is None else record
    costs = {each["entry"]: cost(each["entry"], record) for each in bugs}
    measured = sum(map(bool, costs.values()))
    parts = [
        f"""(all-known-bugs)=
## All {len(bugs)} entries

The cost of {measured} entries was measured in [trained models](#guide-position-bugs). The numbers of the
entries are those of the tests in `tests/known_bugs`."""
    ]
    for subject, heading in SUBJECTS.items():
        members = [each for each in bugs if _subject(each) == subject]
        if members:
            parts.append(f"### {heading}")
            parts += ["\n".join(_entry(each, costs[each["entry"]])) for each in members]
    return "\n\n".join(parts)


def famous() -> str:
    """Return the gallery: a picture of each famous bug, the line that has it, the fix, and the cost."""
    bugs, record = {each["entry"]: each for each in _bugs()}, _record()
    return "\n\n".join(_famous(name, bugs, record) for name in FAMOUS)


def pictures() -> dict[str, Callable[..., Any]]:
    """Return what draws the gallery, by path."""
    return {f"known_bugs/{name}": partial(draw, name) for name in FAMOUS}


def cost(number: str, record: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each measured bug of an entry.

    >>> row = {"sentence": "keys are late", "entries": ["7"], "costs": {"m": {"2048": {"cost": 0.5}}}}
    >>> record = {"weights": {"m": {"title": "M"}}, "summary": {"rows": {"late": row}}}
    >>> cost("7", record)
    ['If keys are late, the loss rises by 0.50 nats at 2,048 tokens in M.']
    >>> row["costs"]["m"]["2048"]["cost"] = -0.2
    >>> cost("7", record)
    ['If keys are late, the loss does not rise: it falls by 0.20 nats at 2,048 tokens in M.']
    """
    titles = {model: facts["title"] for model, facts in record["weights"].items()}
    found = [
        Cost(row["sentence"], {titles[model]: _by_length(costs) for model, costs in row["costs"].items() if costs})
        for key, row in record["summary"]["rows"].items()
        if number in row["entries"] and key not in IMPROVEMENTS and any(row["costs"].values())
    ]
    return [_falls(each) if each.worst < -SMALL else f"If {str(each).partition(': if ')[2]}" for each in found]


def draw(name: str, theme: str = "light") -> Any:
    """Draw a bug beside what is right: two curves, or two maps."""
    bug, colors = BUGS[name], THEMES[theme]
    places, right, wrong = bug.draw(bug.first)
    figure = colors.blank(6.4, 2.7)
    x, y = bug.axes
    if right.ndim == 1:
        axes = figure.subplots()
        drawn_as = "steps-mid" if name == "bfloat16-positions" else "default"  # one position for each token
        for number, (values, label) in enumerate(((right, "right"), (wrong, "with the bug"))):
            color, dash, _ = colors.stroke(number)
            axes.plot(places, values, color=color, linestyle=dash, linewidth=1.8, drawstyle=drawn_as, label=label)
        axes.xaxis.set_major_formatter("{x:,g}")
        colors.style_axes(axes, title="", x=x, y=y, grid=True)
        colors.legend(axes)
        return figure
    high = float(np.nanmax(wrong))
    panels = zip(figure.subplots(1, 2, sharey=True), ((right, "right"), (wrong, "with the bug")), strict=True)
    for number, (axes, (values, label)) in enumerate(panels):
        bar = "distance" if number else ""
        colors.heat_map(axes, values, ONE_SIGN, 0.0, high, label, x, "" if number else y, bar)
    return figure


def _bugs() -> list[dict[str, Any]]:
    return json.loads(ENTRIES.read_text(encoding="utf-8"))


def _record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def _subject(bug: Mapping[str, Any]) -> str:
    return bug["test"].partition("test_")[2].partition(".py")[0]


def _entry(bug: Mapping[str, Any], costs: Sequence[str]) -> Iterator[str]:
    yield f"(known-bug-{bug['entry']})="
    yield f"#### {bug['entry']}. {bug['title']}\n"
    yield f"{bug['story']}\n"
    yield f"- **Reported in** {_links(bug)}"
    yield from (f"- **Cost**: {each}" for each in costs)
    yield f"- **Check your code**: {bug['check']}"
    yield f"- **Test**: `{bug['test']}`"


def _famous(name: str, bugs: Mapping[str, Mapping[str, Any]], record: Mapping[str, Any]) -> str:
    drawn, famous = BUGS[name], FAMOUS[name]
    bug, numbers = bugs[drawn.entry], (drawn.entry, *famous.related)
    costs = [f"- **Cost**: {each}" for number in numbers for each in cost(number, record)]
    facts = [
        *dict.fromkeys(costs),
        f"- **Check your code**: {bug['check']}",
        f"- **Reported in** {_links(bug)}",
        f"- **Entries**: {', '.join(f'[{number}](#known-bug-{number})' for number in numbers)}",
    ]
    return f"""(famous-{name})=
### {drawn.title}

{drawn.story} {famous.words}

{picture(f"known_bugs/{name}", f"{drawn.title}: right, and with the bug")}

The bug:

```python
{famous.code}
```

The fix:

```python
{famous.fix}
```

{chr(10).join(facts)}"""


def _links(bug: Mapping[str, Any]) -> str:
    return ", ".join(f"[{name}]({address})" if address else name for name, address in bug["sources"])


def _by_length(costs: Mapping[str, Mapping[str, Any]]) -> dict[int, float]:
    return {int(length): each["cost"] for length, each in costs.items()}


def _falls(cost: Cost) -> str:
    least = [
        f"{-by_length[max(by_length)]:.2f} nats at {max(by_length):,} tokens in {title}"
        for title, by_length in cost.nats.items()
    ]
    return f"If {cost.mistake}, the loss does not rise: it falls by {' and '.join(least)}."
