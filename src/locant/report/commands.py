"""The shell command that repeats a reported measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from locant.lab.settings import size_of
from locant.shell import shell_path, shell_word
from locant.spelling import number_list

OTHER_NAMES = {"num_steps": "steps", "batch_size": "batch"}
"""Settings whose option of ``locant compare`` has another name."""


def command(settings: Mapping[str, Any]) -> str:
    """Return the shell command that repeats a comparison, from the settings in its results.

    It contains the number of steps instead of the `minutes` that chose this number.

    >>> text = {"files": ["my text.txt"], "tokenizer": "bytes"}
    >>> command({"seeds": [0, 1], "minutes": 2.0, "num_steps": 170, "text": text})
    "locant compare 'my text.txt' --tokenizer bytes --seeds 0,1 --steps 170"
    """
    if settings.get("suite"):
        chosen = {"suite": settings["suite"], "size": size_of(settings), "encodings": settings["encodings"]}
        return shell_line("compare", [], chosen)
    text = settings.get("text", {})
    tokenizer = text.get("tokenizer") or None
    options = {"tokenizer": tokenizer, "vocab_size": None if tokenizer else text.get("asked_vocab_size")}
    others = (item for item in settings.items() if item[0] not in ("text", "minutes", "suite"))
    options |= {OTHER_NAMES.get(name, name): value for name, value in others}
    return shell_line("compare", text.get("files", []), options)


def shell_line(verb: str, paths: Sequence[str], options: Mapping[str, Any]) -> str:
    """Return the shell command for a verb. Leave out empty and false options, and write true options as flags.

    >>> shell_line("evaluate", ["model"], {"with": ["own", "yarn:4"], "tasks": [], "keys": 0, "far": True})
    'locant evaluate model --with own,yarn:4 --keys 0 --far'
    """
    line = ["locant", verb, *map(shell_path, paths)]
    for name, value in options.items():
        if value is not None and value is not False and value != []:
            line.append(f"--{name.replace('_', '-')}")
            several = isinstance(value, (list, tuple))
            line += [] if value is True else [shell_word(number_list(value) if several else str(value))]
    return " ".join(line)
