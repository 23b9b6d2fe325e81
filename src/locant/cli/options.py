"""Options that several verbs share, and the types of their values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from locant.cli.answers import GGUF
from locant.errors import InputError
from locant.figures import SIZES
from locant.spelling import dtype_name, real_number, whole_number

F = TypeVar("F", bound=Callable[..., Any])
MAX_SEED = 2**63 - 1
"""The largest seed of torch's generators."""


class Whole(click.IntRange):
    """A whole number in one of the forms of `whole_number`."""

    def _describe_range(self) -> str:
        """Return the range for help and errors. click's own words for a number without bounds are ``x<=None``."""
        if self.min is None and self.max is None:
            return ""
        return super()._describe_range().replace(str(MAX_SEED), "2^63 - 1")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = whole_number(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return super().convert(number, param, ctx)


class Number(click.FloatRange):
    """A number in one of the forms of `real_number`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = real_number(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return super().convert(number, param, ctx)


if TYPE_CHECKING:
    _Choice = click.Choice[str]
else:
    _Choice = click.Choice  # not generic before click 8.2


class OneOf(_Choice):
    """One of several names, in upper or lower case. `read` maps another spelling to a name, or to ``None``."""

    def __init__(self, names: Iterable[str], read: Callable[[str], str | None] = str) -> None:
        super().__init__([*names], case_sensitive=False)
        self.read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(self.read(value) or value, param, ctx)


SEED = Whole(min=0, max=MAX_SEED)


class PathOption(click.Path):
    """A file or folder. An empty name, from an unset shell variable, is an error, because it would mean ``.``."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty, expected the name of a file or folder", param, ctx)
        return super().convert(value, param, ctx)


class ModelPath(click.ParamType):
    """The path of a model: a folder or a GGUF file. ``~`` is the home folder.

    If it is a GGUF file, the answer of the verb states what became of its weights.

    Args:
        reads: what the verb reads of the model: its ``"weights"``, its ``"table"`` of tokens, or ``None`` of them.
    """

    name = "model"

    def __init__(self, reads: str | None = "weights") -> None:
        self.reads = reads

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from locant.gguf_file import find_gguf

        value = str(Path(value).expanduser()) if value.startswith("~") else value
        if ctx is not None and self.reads is not None and (file := find_gguf(value)) is not None:
            ctx.meta[GGUF] = file, self.reads
        return value


def model(reads: str | None = "weights") -> Callable[[F], F]:
    """Return the argument for a model, a folder or a GGUF file. See `ModelPath`."""
    return click.argument("model", type=ModelPath(reads))


class Picture(PathOption):
    """The file of a picture. Its suffix sets the format."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from locant.figures.canvas import require_figure

        path = super().convert(value, param, ctx)
        require_figure(path)
        return path


device = click.option(
    "--device", metavar="NAME", help="cpu, cuda, cuda:1, ... Default: cuda if available, otherwise cpu."
)

dtype = click.option(
    "--dtype", type=OneOf(("auto", "float32", "bfloat16", "float16"), dtype_name),
    help="The dtype to load the model in. Default: auto, the dtype it was saved in.",
)  # fmt: skip

files = click.argument("files", nargs=-1, type=str, metavar="[FILE]...")


def output(help_text: str, kind: PathOption = PathOption(), **more: Any) -> Callable[[F], F]:  # noqa: B008  # it has no state
    """Return the option ``-o``, the file or folder to write."""
    return click.option("-o", "--output", type=kind, help=help_text, **more)


def count(*names: str, low: int = 1, **more: Any) -> Callable[[F], F]:
    """Return an option for a whole number."""
    return click.option(*names, type=Whole(min=low), **more)


def positive(*names: str, **more: Any) -> Callable[[F], F]:
    """Return an option for a number above 0."""
    return click.option(*names, type=Number(min=0, min_open=True), **more)


def _combine(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Combine several options into one decorator. The help lists them in this order."""
    return lambda function: functools.reduce(lambda verb, option: option(verb), reversed(options), function)


tokenizer_options = _combine(
    click.option(
        "--tokenizer",
        metavar="NAME|PATH|bytes",
        help="A tokenizer.json, a folder that holds one, a name such as gpt2 in local caches, or bytes. "
        "Default: train a BPE on the text.",
    ),
    click.option(
        "--vocab-size",
        type=Whole(),
        metavar="N",
        help="Vocabulary size of the byte-level BPE that is trained on the text. Must exceed 256.",
    ),
    click.option("--download", is_flag=True, help="Allow downloading the tokenizer."),
)
"""The options that choose the tokenizer and allow its download."""


def text_of(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the values of `tokenizer_options` from all options, and return them."""
    return {name: options.pop(name) for name in ("tokenizer", "vocab_size", "download")}


encoding_options = _combine(
    count("--d-model", help="Width of embeddings.", show_default=str(SIZES["d_model"])),
    count("--head-dim", help="Width of a head.", show_default=str(SIZES["head_dim"])),
    count("--num-heads", help="Number of heads.", show_default=str(SIZES["num_heads"])),
    positive("--base", help="Base of the frequencies."),
)
"""The options for the sizes of one encoding. They default to the sizes of a small model."""


def require_taken(name: str, given: dict[str, Any], verb: str) -> None:
    """Raise `InputError` unless the encoding with this name accepts these options. The error lists valid options."""
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
    """Return an option or argument of this verb, or an option of another verb, as users type it."""
    for one in click.get_current_context().command.params:
        if one.name == name:
            return one.opts[-1] if isinstance(one, click.Option) else one.human_readable_name
    return "--" + name.replace("_", "-")


def flags_on_command_line(*options: str) -> list[str]:
    """Return the flags of these options that are on the command line."""
    source = click.get_current_context().get_parameter_source
    return [flag_of(option) for option in options if source(option) is ParameterSource.COMMANDLINE]


def only_given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are not None, for functions with their own defaults."""
    return {name: value for name, value in options.items() if value is not None}
