"""Options that several verbs share, and the kinds of values they take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from locant.errors import InputError
from locant.figures import SIZES
from locant.spelling import dtype_name, whole_number

F = TypeVar("F", bound=Callable[..., Any])


class Whole(click.IntRange):
    """A whole number, which may be written as 8192, 8_192 or 1e6."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = whole_number(value) if isinstance(value, str) else value
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a whole number such as 8192, 8_192 or 1e6", param, ctx)
        return super().convert(number, param, ctx)


class OneOf(click.Choice[str]):
    """One of several names, in any case; `read` returns the name that another spelling means, or ``None``."""

    def __init__(self, names: Iterable[str], read: Callable[[str], str | None] = str) -> None:
        super().__init__([*names], case_sensitive=False)
        self.read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(self.read(value) or value, param, ctx)


SEED = Whole(min=0, max=2**63 - 1)


class Place(click.Path):
    """A file or folder. An empty name, as an unset variable of a shell leaves it, would mean the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty, expected the name of a file or folder", param, ctx)
        return super().convert(value, param, ctx)


class Picture(Place):
    """A file of a picture, whose suffix is its format."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from locant.figures.canvas import require_figure

        path = super().convert(value, param, ctx)
        require_figure(path)
        return path


device = click.option(
    "--device", metavar="NAME", help="cpu, cuda, cuda:1, ... Default: cuda where there is one, else cpu."
)

dtype = click.option(
    "--dtype", type=OneOf(("auto", "float32", "bfloat16", "float16"), dtype_name),
    help="What the model is read in. Default: auto, as it was saved.",
)  # fmt: skip

files = click.argument("files", nargs=-1, type=str, metavar="[FILE]...")


def output(help_text: str, kind: Place = Place(), **more: Any) -> Callable[[F], F]:  # noqa: B008  # it holds nothing
    """The place to write to."""
    return click.option("-o", "--output", type=kind, help=help_text, **more)


def count(*names: str, low: int = 1, **more: Any) -> Callable[[F], F]:
    """An option that is a whole number."""
    return click.option(*names, type=Whole(min=low), **more)


def positive(*names: str, **more: Any) -> Callable[[F], F]:
    """An option that is a number above 0."""
    return click.option(*names, type=click.FloatRange(min=0, min_open=True), **more)


def _together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, which the help shows in this order."""
    return lambda function: functools.reduce(lambda verb, option: option(verb), reversed(options), function)


tokenizer_options = _together(
    click.option(
        "--tokenizer",
        metavar="NAME|PATH|bytes",
        help="A tokenizer.json, a folder that holds one, a name such as gpt2 in local caches, or bytes. "
        "Default: a BPE trained on the text.",
    ),
    click.option(
        "--vocab-size",
        type=Whole(),
        metavar="N",
        help="Entries of the byte-level BPE that is trained on the text; more than 256.",
    ),
    click.option("--download", is_flag=True, help="Allow fetching the tokenizer from the network."),
)
"""Which tokenizer reads the text, and whether one may be fetched."""


def text_of(options: dict[str, Any]) -> dict[str, Any]:
    """Takes `tokenizer_options` out of all options."""
    return {name: options.pop(name) for name in ("tokenizer", "vocab_size", "download")}


encoding_options = _together(
    count("--d-model", help="Width of embeddings.", show_default=str(SIZES["d_model"])),
    count("--head-dim", help="Width of a head.", show_default=str(SIZES["head_dim"])),
    count("--num-heads", help="Heads.", show_default=str(SIZES["num_heads"])),
    positive("--base", help="Base of the frequencies."),
)
"""The sizes of one encoding, which is taken for a small model where they are not given."""


def require_taken(name: str, given: dict[str, Any], verb: str) -> None:
    """Raise unless the encoding of this name takes these options, in the words of the command line."""
    from inspect import signature

    from locant.positions.registry import find
    from locant.positions.scaling import scaling_name

    if scaling := scaling_name(name.rpartition("+")[2]):
        remedy = "--encoding rotary" if verb == "embed" else f"locant plot rotary --scaling {scaling}:4"
        raise InputError(f"got {name}, which is a scaling of rotary", remedy)
    takes = signature(find(name)).parameters
    if foreign := [flag_of(option) for option in given if option not in takes]:
        options = [option for option in ("d_model", "head_dim", "num_heads", "base", "scaling") if option in takes]
        words = ", ".join(map(flag_of, options)) or "none of these"
        example = f" {flag_of(options[0])} {SIZES.get(options[0], 16)}" if options else ""
        raise InputError(f"got {', '.join(foreign)} for {name}, which takes {words}", f"locant {verb} {name}{example}")


def flag_of(name: str) -> str:
    """An option or argument of this verb, or an option of another one, as it is typed."""
    for one in click.get_current_context().command.params:
        if one.name == name:
            return one.opts[-1] if isinstance(one, click.Option) else one.human_readable_name
    return "--" + name.replace("_", "-")


def typed(*options: str) -> list[str]:
    """Those of these options that stand on the command line."""
    source = click.get_current_context().get_parameter_source
    return [flag_of(option) for option in options if source(option) is ParameterSource.COMMANDLINE]


def only_given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, for functions that know their own defaults."""
    return {name: value for name, value in options.items() if value is not None}
