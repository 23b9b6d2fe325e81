"""Write paths and commands for a POSIX shell, so that a user can paste them."""

from __future__ import annotations

import os
import shlex


def shell_path(path: str | os.PathLike[str]) -> str:
    r"""Return a path as one word of a shell command.

    A name with a leading dash would be an option, so it gets ``./``. Characters that a terminal does not show, and
    bytes that are not UTF-8, are written as ``$'...'``, which bash, zsh and ksh read. A single dash is standard input.

    >>> print(shell_path("-x.tar.gz"), shell_path("my text.txt"), shell_path("-"), shell_path("a\nb"))
    ./-x.tar.gz 'my text.txt' - $'a\nb'
    """
    text = os.fspath(path)
    text = f"./{text}" if text.startswith("-") and text != "-" else text
    return shell_word(text)


def shell_word(text: str) -> str:
    r"""Return a text as one word of a shell command.

    >>> print(shell_word("it's"), shell_word("$HOME"), shell_word("a\tb"))
    'it'"'"'s' '$HOME' $'a\tb'
    """
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_escape, text))}'"


def _escape(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    named = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}
    return named.get(character) or "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape"))
