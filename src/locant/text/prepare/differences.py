"""What makes two requests different, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from locant.text.prepare.pieces import Source

__all__ = ["differences"]

NAMED = 3
"""How many differences are told; the others are counted."""


def differences(
    old: tuple[Mapping[str, Any], Sequence[Source]], new: tuple[Mapping[str, Any], Sequence[Source]]
) -> list[str]:
    """What makes two requests (options and sources) different, in words; nothing if they give the same store."""
    names = [*old[0], *(name for name in new[0] if name not in old[0])]
    found = [
        f"{name} was {_words(old[0].get(name))} and is {_words(new[0].get(name))}"
        for name in names
        if old[0].get(name) != new[0].get(name)
    ]
    found += _changed_sources(old[1], new[1])
    return [*found[:NAMED], f"{len(found) - NAMED} more"] if len(found) > NAMED else found


def _words(value: object) -> str:
    return repr(value) if isinstance(value, str) else f"{value}"


def _changed_sources(old: Sequence[Source], new: Sequence[Source]) -> list[str]:
    before, after = ({source.path: source for source in sources} for sources in (old, new))
    found = [f"{path} is no longer an input" for path in before if path not in after]
    found += [f"{path} is a new input" for path in after if path not in before]
    for path in before:
        if path in after and before[path] != after[path]:
            found.append(f"{path} changed from {_state(before[path])} to {_state(after[path])}")
    if not found and [*before] != [*after]:
        found.append("the inputs come in another order")
    return found


def _state(source: Source) -> str:
    if source.mtime_ns is None:
        return f"{source.size} bytes"
    # The zone of the reader, who compares it with what `ls --full-time` says, to the last digit.
    seconds, rest = divmod(source.mtime_ns, 10**9)
    when = f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}.{rest:09d}"
    how = ", ".join(f"{name} {value!r}" for name, value in (("separator", source.separator), ("field", source.field)))
    return f"{source.size} bytes of {when} ({source.kind}, {how})"
