"""Options that several verbs share, and the kinds of values they take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from locant._version import __version__
from locant.errors import InputError
from locant.figures import SIZES

__all__ = [
    "Factor", "Listed", "Place", "as_json", "encoding_options", "files", "only_given", "output", "require_taken",
    "show_version", "tokenizer_options",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])


class Listed(click.ParamType):
    """Values between commas, such as ``0,1,2``."""

    def __init__(self, kind: type[int] | type[str]) -> None:
        self.kind = kind
        self.name = f"{'numbers' if kind is int else 'names'},..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int | str, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self.kind(part.strip()) for part in str(value).split(",") if part.strip())
        except ValueError:
            self.fail(f"{value!r} is not a list of {self.name.split(',')[0]} such as 0,1,2", param, ctx)


class Factor(click.ParamType):
    """A number, or the name of a rule that gives one."""

    name = "number|rule"
    rules = ("sqrt_d_model", "sqrt_d_model_rounded")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        if value in self.rules:
            return value
        try:
            return float(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor {' nor '.join(self.rules)}", param, ctx)


class Place(click.Path):
    """A file or folder. An empty name, as an unset variable of a shell leaves it, would mean the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty, expected the name of a file or folder", param, ctx)
        return super().convert(value, param, ctx)


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"locant {__version__}")
        ctx.exit()


show_version = click.Option(
    ["--version"],
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and exit.",
)

as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else, on stdout.")

files = click.argument("files", nargs=-1, type=str, metavar="[FILE]...")


def output(help_text: str, default: str | None = None) -> Callable[[F], F]:
    """The place to write to."""
    return click.option("-o", "--output", type=Place(), default=default, help=help_text)


def tokenizer_options(function: F) -> F:
    """Which tokenizer reads the text, and whether one may be fetched."""
    for option in (
        click.option("--download", is_flag=True, help="Allow fetching the tokenizer from the network."),
        click.option(
            "--vocab-size",
            type=int,
            metavar="N",
            help="Entries of the byte-level BPE that is trained on the text; more than 256.",
        ),
        click.option(
            "--tokenizer",
            metavar="NAME|PATH|bytes",
            help="A tokenizer.json, a folder that holds one, a name such as gpt2 in local caches, or bytes. "
            "Default: a BPE trained on the text.",
        ),
    ):
        function = option(function)
    return function


def encoding_options(function: F) -> F:
    """The sizes of one encoding, which is taken for a small model where they are not given."""
    positive = click.IntRange(min=1)
    for option in (
        click.option("--base", type=click.FloatRange(min=0, min_open=True), help="Base of the frequencies."),
        click.option("--num-heads", type=positive, help="Heads.", show_default=str(SIZES["num_heads"])),
        click.option("--head-dim", type=positive, help="Width of a head.", show_default=str(SIZES["head_dim"])),
        click.option("--d-model", type=positive, help="Width of embeddings.", show_default=str(SIZES["d_model"])),
    ):
        function = option(function)
    return function


def require_taken(name: str, given: dict[str, Any], verb: str) -> None:
    """Raise unless the encoding of this name takes these options, in the words of the command line."""
    from inspect import signature

    from locant.positions.registry import find
    from locant.positions.scaling import SCALINGS

    if (scaling := name.rpartition("+")[2]) in SCALINGS:
        raise InputError(f"got {name}, which is a scaling of rotary", f"locant plot rotary --scaling {scaling}:4")
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
