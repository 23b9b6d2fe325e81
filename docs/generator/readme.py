"""The parts of the README that are made from records and sources: ``python -m docs.generator.readme`` writes them.

A part is between two comments, ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. The sentences on costs in shown
warnings are brought to the record, too. `make bench` and `make real` end with this.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from docs.generator import known_bugs
from docs.generator.citation import bibtex
from docs.generator.real_models import RECORD
from docs.generator.records import ROOT
from locant.errors import InputError
from locant.files import write_whole
from locant.position_costs import costs

__all__ = ["PARTS", "README", "costs_of_bugs", "measured", "with_costs", "with_parts", "write"]

README = ROOT / "README.md"
SPEED = ROOT / "benchmarks" / "results" / "cpu.json"

BUGS = (
    "base-10000", "half-as-interleaved", "positions-bfloat16", "packed-documents-visible", "restarts", "product-tf32",
    "frequencies-bfloat16",
)  # fmt: skip
"""The rows of the table of costs: bugs that were reported in public, and one that is harmless in these models."""
COLUMNS = (("smollm2", 2048), ("smollm2", 8192), ("gemma3", 2048))
SHORT = {"smollm2": "SmolLM2", "gemma3": "Gemma 3"}


class Question(NamedTuple):
    """A row of the table of times.

    Args:
        words: the operation.
        part: the benchmark that measured it.
        pattern: how its question begins there, as a regular expression.
        ours: the contender that is this package.
        others: the names to show for other contenders.
    """

    words: str
    part: str
    pattern: str
    ours: str
    others: Mapping[str, str]


QUESTIONS = (
    Question(
        "Rotate q and k of 4,096 tokens (32 and 8 heads of 128, bfloat16)",
        "rotary",
        r"others' rotation into new memory, q 1x32x4096x128, k with 8 heads, torch\.bfloat16",
        "locant, half layout",
        {
            "usual code, torch.compile": "`torch.compile`", "transformers, eager": "`transformers`",
            "rotary-embedding-torch": "`rotary-embedding-torch`",
        },
    ),
    Question(
        "Attention with ALiBi over 8,192 tokens (8 heads of 64, float32)",
        "attention",
        "attention, forward, 8 heads of 64, 8192 tokens, torch.float32",
        "ALiBi, locant auto",
        {"plain causal SDPA, without a bias": "SDPA without ALiBi", "ALiBi, matrix through SDPA": "SDPA with a matrix"},
    ),
    Question(
        "Attention of a new token to 65,535 cached ones (32 heads, 8 of keys, bfloat16)",
        "decoding",
        r"attention of one token in each of 1 rows behind 65535 in the cache, .* torch\.bfloat16",
        "locant, without a bias",
        {"SDPA": "SDPA"},
    ),
    Question(
        "Read 60 shuffled batches of 256 windows of 256 tokens",
        "windows",
        "read 60 batches of 256, windows of 256",
        "locant Windows.loader",
        {"list of tensors, plain DataLoader": "a list of tensors in a `DataLoader`"},
    ),
    Question(
        "Turn 200 MB of text into token ids (`locant prepare` with `gigatoken`)",
        "prepare",
        "200 MB of text to tokens",
        "locant prepare",
        {
            "gigatoken alone, two processes, text in memory": "`gigatoken` alone, in memory",
            "tokenizers.encode_batch_fast, one process (1/20 of it, scaled)": "`tokenizers`, one process",
        },
    ),
)  # fmt: skip


def badges() -> str:
    """Return pictures of facts in ``pyproject.toml``, which link to the files with these facts."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch = next(each for each in project["dependencies"] if each.startswith("torch"))
    facts = {
        "Python": (project["requires-python"], "docs/guides/installation.md"),
        "PyTorch": (torch.removeprefix("torch"), "docs/guides/installation.md"),
        "licence": (project["license"], "LICENSE"),
    }
    address = "https://img.shields.io/badge"
    return "\n".join(
        f"[![{name}: {fact}]({address}/{name}-{quote(fact.replace('-', '--'), safe='')}-blue)]({link})"
        for name, (fact, link) in facts.items()
    )


def costs_of_bugs(record: Mapping[str, Any] | None = None) -> str:
    """Return the table of what position bugs cost in trained models."""
    record = json.loads(RECORD.read_text(encoding="utf-8")) if record is None else record
    rows = record["summary"]["rows"]
    head = ["bug", "reported in", *(f"{SHORT[model]}, {length:,}" for model, length in COLUMNS)]
    lines = [f"| {' | '.join(head)} |", "|---|---|" + len(COLUMNS) * "--:|"]
    for key in BUGS:
        sentence, source = rows[key]["sentence"], rows[key]["source"]
        link = f"[{source.partition('/')[2]}](https://github.com/{source.replace('#', '/issues/')})"
        found = [_cost(rows[key]["costs"].get(model, {}).get(str(length))) for model, length in COLUMNS]
        lines.append(f"| {' | '.join([sentence[0].upper() + sentence[1:], link, *found])} |")
    return "\n".join(lines)


def famous_bugs() -> str:
    """Return a line for each of the five most famous bugs, with the first thread that reported it."""
    bugs = {each["entry"]: each for each in json.loads(known_bugs.ENTRIES.read_text(encoding="utf-8"))}
    return "\n".join(
        f"- **{drawn.title}** ([{name}]({address})): {drawn.story}"
        for drawn in (known_bugs.BUGS[each] for each in known_bugs.FAMOUS)
        for name, address in bugs[drawn.entry]["sources"][:1]
    )


def measured(record: Mapping[str, Any] | None = None) -> str:
    """Return the table of times beside those of other code, with the machine."""
    record = json.loads(SPEED.read_text(encoding="utf-8")) if record is None else record
    lines = ["| operation | locant | other code |", "|---|--:|---|"]
    lines += [f"| {question.words} | {' | '.join(_times(question, record))} |" for question in QUESTIONS]
    machines = {_machine(record[question.part]["environment"]): None for question in QUESTIONS}
    return "\n".join([*lines, "", f"Measured with {'; and '.join(machines)}."])


def citation() -> str:
    """Return the entry for BibTeX."""
    return f"```bibtex\n{bibtex()}\n```"


PARTS = {
    "badges": badges, "costs": costs_of_bugs, "famous bugs": famous_bugs, "times": measured, "citation": citation,
}  # fmt: skip
"""What makes each part, by its name."""


def with_parts(text: str) -> str:
    """Return the README in which every part is made again."""
    for name, part in PARTS.items():
        before, begin, rest = text.partition(f"<!-- begin {name} -->\n")
        _, end, after = rest.partition(f"<!-- end {name} -->")
        if not end:
            raise InputError(f"found no place for {name} in the README", f"add <!-- begin {name} --> and its end")
        text = f"{before}{begin}{part()}\n{end}{after}"
    return with_costs(text)


def with_costs(text: str) -> str:
    """Return a page in whose shown warnings the sentences on costs are those of the record."""
    for cost in costs().values():
        text = re.sub(
            rf"This (?:hardly )?matters: if {re.escape(cost.mistake)}, .*", lambda _, cost=cost: str(cost), text
        )
    return text


def write() -> None:
    """Bring the README to the records."""
    costs.cache_clear()
    write_whole(README, with_parts(README.read_text(encoding="utf-8")))


def _cost(each: Mapping[str, Any] | None) -> str:
    """Return a cost, if it was measured.

    >>> _cost({"cost": 4.7373}), _cost({"cost": -0.0006}), _cost(None)
    ('+4.74', '0.00', '–')
    """
    return "–" if each is None else f"{each['cost']:+.2f}".replace("+0.00", "0.00").replace("-0.00", "0.00")


def _times(question: Question, record: Mapping[str, Any]) -> Iterator[str]:
    rows = {
        row["contender"]: row
        for row in record[question.part]["rows"]
        if re.match(question.pattern, row["question"])
    }  # fmt: skip
    ours = rows[question.ours]
    yield _time(ours)
    yield ", ".join(
        f"{name}: {_time(rows[contender])} ({rows[contender]['milliseconds'] / ours['milliseconds']:.1f} ×)"
        for contender, name in question.others.items()
    )


def _time(row: Mapping[str, Any]) -> str:
    """Return a time, with the memory if it was measured.

    >>> _time({"milliseconds": 4319.5, "megabytes": None}), _time({"milliseconds": 17.5086, "megabytes": 4429.2})
    ('4.3 s', '17.5 ms and 4,429 MB')
    """
    milliseconds = row["milliseconds"]
    time = f"{milliseconds / 1000:.1f} s" if milliseconds >= 1000 else f"{milliseconds:.3g} ms"
    return time if row["megabytes"] is None else f"{time} and {row['megabytes']:,.0f} MB"


def _machine(made: Mapping[str, Any]) -> str:
    return (
        f"{made['cpu_count']} CPU cores ({made['machine']}, {made['system']}), PyTorch {made['torch']} on "
        f"{made['torch_threads']} threads and Python {made['python']}"
    )


if __name__ == "__main__":
    write()
