"""Options that several verbs share, and the kinds of values they take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from locant.errors import InputError
from locant.figures import SIZES

__all__ = [
    "SEED", "Place", "as_json", "device", "encoding_options", "files", "listed", "only_given", "output",
    "require_taken", "tokenizer_options",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])

SEED = click.IntRange(min=0, max=2**63 - 1)


def listed(kind: type[int] | type[str]) -> Callable[[str], tuple[int | str, ...]]:
    """Reads values between commas, such as ``0,1,2``."""

    def read(text: str) -> tuple[int | str, ...]:
        try:
            return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a list of numbers such as 0,1,2") from None

    return read


class Place(click.Path):
    """A file or folder. An empty name, as an unset variable of a shell leaves it, would mean the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty, expected the name of a file or folder", param, ctx)
        return super().convert(value, param, ctx)


as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else, on stdout.")

device = click.option(
    "--device", metavar="NAME", help="cpu, cuda, cuda:1, ... Default: cuda where there is one, else cpu."
)

files = click.argument("files", nargs=-1, type=str, metavar="[FILE]...")


def output(help_text: str, default: str | None = None) -> Callable[[F], F]:
    """The place to write to."""
    return click.option("-o", "--output", type=Place(), default=default, help=help_text)


def _together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, which the help shows in this order."""
    return lambda function: functools.reduce(lambda made, option: option(made), reversed(options), function)


tokenizer_options = _together(
    click.option(
        "--tokenizer",
        metavar="NAME|PATH|bytes",
        help="A tokenizer.json, a folder that holds one, a name such as gpt2 in local caches, or bytes. "
        "Default: a BPE trained on the text.",
    ),
    click.option(
        "--vocab-size",
        type=int,
        metavar="N",
        help="Entries of the byte-level BPE that is trained on the text; more than 256.",
    ),
    click.option("--download", is_flag=True, help="Allow fetching the tokenizer from the network."),
)
"""Which tokenizer reads the text, and whether one may be fetched."""


def _size(name: str, help_text: str) -> Callable[[F], F]:
    flag = f"--{name.replace('_', '-')}"
    return click.option(flag, type=click.IntRange(min=1), help=help_text, show_default=str(SIZES[name]))


encoding_options = _together(
    _size("d_model", "Width of embeddings."),
    _size("head_dim", "Width of a head."),
    _size("num_heads", "Heads."),
    click.option("--base", type=click.FloatRange(min=0, min_open=True), help="Base of the frequencies."),
)
"""The sizes of one encoding, which is taken for a small model where they are not given."""


def require_taken(name: str, given: dict[str, Any], verb: str) -> None:
    """Raise unless the encoding of this name takes these options, in the words of the command line."""
    from inspect import signature

    from locant.positions.registry import find
    from locant.positions.scaling import SCALINGS

    if (scaling := name.rpartition("+")[2]) in SCALINGS:
        remedy = "--encoding rotary" if verb == "embed" else f"locant plot rotary --scaling {scaling}:4"
        raise InputError(f"got {name}, which is a scaling of rotary", remedy)
    takes = signature(find(name)).parameters
    if foreign := [_typed(option) for option in given if option not in takes]:
        known = [option for option in ("d_model", "head_dim", "num_heads", "base", "scaling") if option in takes]
        words = ", ".join(map(_typed, known)) or "none of these"
        example = f" {_typed(known[0])} {SIZES.get(known[0], 16)}" if known else ""
        raise InputError(f"got {', '.join(foreign)} for {name}, which takes {words}", f"locant {verb} {name}{example}")


def _typed(option: str) -> str:
    return "--" + option.replace("_", "-")


def only_given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, for functions that know their own defaults."""
    return {name: value for name, value in options.items() if value is not None}
