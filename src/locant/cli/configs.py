"""``locant explain``, ``extend`` and ``probe``: what the configuration of a model says of positions, and does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from locant.cli.answers import Answer, answers, drawn
from locant.cli.options import SEED, Picture, count, device, only_given, output
from locant.errors import InputError

METHODS = ("yarn", "linear", "ntk", "dynamic", "longrope", "llama3")

picture = output("Also draw a picture; its suffix (.png, .svg, .pdf) is the format.", Picture())


@click.command("explain")
@click.argument("config")
@click.option("--against", metavar="CONFIG", help="Of a GGUF file: what it was made from, to be compared with it.")
@count("--n-ctx", help="Of a GGUF file: the context that is allocated, llama.cpp's -c.")
@picture
@answers
def explain(config: str, against: str | None, n_ctx: int | None, output: Path | None) -> Answer:
    """Show how a model encodes positions, in words and numbers.

    CONFIG is a config.json, the folder of a model, or the name of a preset such as llama-3.1-8b; a wrong name lists
    them all. It may be the folder of a pipeline of diffusers, whose transformer is told. It may also be a GGUF file:
    then what llama.cpp does with it is told, and with --against where that differs from a configuration; beside the
    safetensors of a folder, also whether q and k are in the right order. Exit code 1: they differ.
    """
    if config.lower().endswith(".gguf"):
        return _explain_gguf(config, against, n_ctx, output)
    if against is not None or n_ctx is not None:
        raise InputError(f"got --against or --n-ctx for {config}, which is no GGUF file", "FILE.gguf --against CONFIG")
    from locant.checkpoints.config_source import read_source
    from locant.checkpoints.explanation import explain
    from locant.figures.plot import draw_explanation
    from locant.report.explain import explanation_facts, print_explanation

    transformer = Path(config) / "transformer"
    read = read_source(transformer if transformer.is_dir() else config)
    if "_class_name" in read:
        return _explain_diffusers(read, output)
    explanation = explain(read)
    facts = {"config": config, **explanation_facts(explanation), "figure": output and str(output)}
    figures = drawn(output, lambda: draw_explanation(explanation, read, config))
    return Answer(facts, lambda: print_explanation(explanation, config), files=figures)


def _explain_diffusers(config: dict[str, Any], output: Path | None) -> Answer:
    from locant.engines.diffusers import encoding_from_diffusers, transformer_of
    from locant.figures.plot import plot

    encoding, row = encoding_from_diffusers(config), transformer_of(config)
    text = "not rotated" if row.text is None else f"counts on {row.text}" if row.text else "at 0 on all axes"
    facts = {"transformer": config["_class_name"], "encoding": repr(encoding), "axes": row.axes, "text": text}
    words = "\n".join(f"{name}: {fact}" for name, fact in facts.items())
    return Answer(facts, words, files=drawn(output, lambda: plot(encoding)))


def _explain_gguf(file: str, against: str | None, n_ctx: int | None, output: Path | None) -> Answer:
    from locant.checkpoints.config_source import read_source
    from locant.engines.gguf import compare_gguf, read_gguf
    from locant.figures.plot import plot
    from locant.report.engines import gguf_facts, print_gguf

    if against is None:
        model, comparison = read_gguf(file, n_ctx), None
    else:
        folder = Path(against) if any(Path(against).glob("*.safetensors*")) else None
        comparison = compare_gguf(file, read_source(against), n_ctx=n_ctx, folder=folder)
        model = comparison.model
    figures = drawn(output, lambda: plot(model.encoding))
    agrees = comparison is None or comparison.agrees
    facts = gguf_facts(model, comparison, file)
    return Answer(facts, lambda: print_gguf(model, comparison, file), files=figures, code=0 if agrees else 1)


@click.command("extend")
@click.argument("config")
@count("--to", required=True, metavar="TOKENS", help="The new length.")
@click.option("--method", type=click.Choice(METHODS), default=METHODS[0], show_default=True, help="How to stretch.")
@click.option("--search", metavar="TEXT", help="With longrope: search its factors on this text, with the model itself.")
@count("--generations", low=0, help="Of the search, 12 forward passes each. Default: 8.")
@count("--windows", help="At most so many of TOKENS from TEXT. Default: 4.")
@click.option("--seed", type=SEED, help="Of the search. Default: 0.")
@device
@output("The new configuration. Default: NAME-METHOD-TOKENS.json.")
@click.option("--figure", type=Picture(), help="Also draw a picture (.png, .svg, .pdf).")
@answers
def extend(
    config: str, search: str | None, figure: Path | None, to: int, method: str, output: Path | None, **of_search: Any
) -> Answer:
    """Write the configuration of a model for a longer context.

    CONFIG is a config.json, the folder of a model, or the name of a preset. Only what has to change changes. Whether
    the model then reads that far is for a measurement, and often for some training.
    A search needs the folder, with weights and tokenizer. What it measures is kept beside the new configuration, in
    NAME.search.json, and a second call goes on from there.
    """
    from locant.checkpoints.extension import write_extension
    from locant.figures.plot import draw_extension
    from locant.report.explain import extension_facts, print_extension

    def draw(extension: Any) -> None:
        drawn(figure, lambda: draw_extension(extension, config))

    asked: dict[str, Any] = {"to": to, "method": method, "output": output}
    factors, given = None, only_given(of_search)
    if search is not None:
        factors = _searched(config, search, asked, given)
    elif given:
        raise InputError(f"got --{next(iter(given))} without a search", "--method longrope --search my.txt")
    extension, written = write_extension(config, **asked, factors=factors, beside=draw)
    files = [written, *([figure] if figure else [])]
    facts = {"written": str(written), "figure": figure and str(figure)}
    facts = {"config": config, **extension_facts(extension), **facts}
    return Answer(facts, lambda: print_extension(extension, config), files=files)


def _searched(config: str, text: str, asked: dict[str, Any], given: dict[str, Any]) -> Any:
    from locant.checkpoints.config_source import read_source
    from locant.checkpoints.extension import extend, extension_path
    from locant.files import require_file
    from locant.report.console import progress_bar

    if asked["method"] != "longrope":
        raise InputError(f"got --search for {asked['method']}, which has no factors to search", "--method longrope")
    path = extension_path(config, **asked)
    require_file(path)  # a search can take hours
    extension = extend(read_source(config), to=asked["to"], method=asked["method"])
    from locant.lab.factor_search import search_factors

    with progress_bar("set") as progress:
        record = path.with_name(f"{path.name.removesuffix('.json')}.search.json")
        return search_factors(config, [text], extension, record=record, on_step=progress, **given)


@click.command("probe")
@click.argument("model")
@click.option("--layer-type", help="Which layers, where they differ. Default: the first kind.")
@picture
@answers
def probe(model: str, layer_type: str | None, output: Path | None) -> Answer:
    """Measure what the rotary positions of a model do, without reading its code.

    MODEL is a config.json, the folder of a model, the name of a preset such as llama-3.1-8b, or a model_type or class
    that the installed transformers knows, such as qwen3 or Qwen3ForCausalLM. Its rotary module is built from the
    configuration and run: no weights, no code of the folder and no network.
    """
    from locant.checkpoints.config_source import read_source
    from locant.figures.plot import plot
    from locant.probing.probe import config_by_name, probe

    config = None if Path(model).exists() else config_by_name(model)
    report = probe(read_source(model) if config is None else config, layer_type=layer_type)
    facts = {"model": model, **report.to_dict(), "figure": output and str(output)}
    return Answer(facts, str(report), files=drawn(output, lambda: plot(report)))
