"""Commands that are shown can be pasted: a shell reads the words that were meant."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from locant.cli import VERBS
from locant.shell import shell_path, shell_word
from locant.spelling import number_list, numbers, whole_number

NAMES = [
    b"plain.txt", b"-x.tar.gz", b"--help", b"-", b"a b.txt", b"it's $HOME `date` \"q\".txt", b"a\\nb", b"two  blanks",
    b"line\nbreak", b"tab\tand 'quote'", b"-\n", b"latin-1 \xe9.txt", "größer".encode(), b"~", b"*?[a]", b"#1", b"",
]  # fmt: skip
SOURCE = Path(__file__).resolve().parents[1] / "src" / "locant"
COMMAND = re.compile(
    rf"(?:\blocant (?:{'|'.join(VERBS)}) |\b(?:rm|tar|unzip|jq|cat|llama-gguf-split) |< |-dc )(?:-[\w-]+ )*$"
)
"""The end of a text that is followed by a word of a shell command."""
NAMES_ALONE = {"benchmarks[0]", "scaling", "lengths", "file", "_word(way)"}
"""Values that are names of benchmarks, scalings or encodings, or words already."""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", NAMES)
def test_a_shell_reads_the_path(name: bytes) -> None:
    word = shell_path(os.fsdecode(name))
    assert word.isprintable()
    line = f"printf '%s\\0' {word} {shell_word(os.fsdecode(name))}".encode()
    path, text = subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout.split(b"\0")[:2]
    assert text == name
    assert path in (name, b"./" + name)
    assert path == b"-" or not path.startswith(b"-")


def test_every_command_in_a_message_uses_it() -> None:
    found = [
        f"{file.relative_to(SOURCE)}:{part.lineno}: {ast.unparse(part.value)}"
        for file in SOURCE.rglob("*.py")
        for text in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(text, ast.JoinedStr)
        for before, part in zip(text.values, text.values[1:], strict=False)
        if isinstance(before, ast.Constant) and COMMAND.search(before.value) and isinstance(part, ast.FormattedValue)
        if not ast.unparse(part.value).startswith(("shell_path(", "shell_word("))
        and ast.unparse(part.value) not in NAMES_ALONE
    ]
    assert not found, "\n".join(found)
    assert not [file for file in SOURCE.rglob("*.py") if "shlex.quote" in file.read_text() and file.name != "shell.py"]


@pytest.mark.parametrize("values", [[1, 200], [128, 256], [64, 512, 2048], [1, 200, 2, 400], [512, 1024], [7]])
def test_a_list_in_a_command_is_read_as_that_list(values: list[int]) -> None:
    assert [*numbers(number_list(values), whole_number)] == values
