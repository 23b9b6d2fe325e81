"""``locant explain``, ``extend`` and ``probe``: the position encoding that a model's configuration describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from locant.cli.answers import Answer, answers, draw_into
from locant.cli.options import SEED, OneOf, Picture, count, device, flag_of, model, only_given, output
from locant.errors import InputError
from locant.shell import shell_path

METHODS = ("yarn", "linear", "ntk", "dynamic", "longrope", "llama3")


def _scaling_name(text: str) -> str | None:
    from locant.positions.scaling import scaling_name  # needs torch

    return scaling_name(text)


METHOD = OneOf(METHODS, _scaling_name)
"""The option type of a scaling, which accepts any of its names."""

picture = output("Also draw a picture. Its suffix (.png, .svg or .pdf) sets the format.", Picture())


@click.command("explain")
@click.argument("config")
@click.option("--against", metavar="CONFIG", help="Compare with another model, such as the target of a draft model.")
@count("--n-ctx", help="For a GGUF file: the context length that llama.cpp allocates (its -c).")
@picture
@answers
def explain(config: str, against: str | None, n_ctx: int | None, output: Path | None) -> Answer:
    """Show how a model encodes positions, in words and numbers.

    CONFIG is a config.json, Mistral's params.json, the folder of a model, the name of a preset such as llama-3.1-8b, or
    a model_type or class of the installed transformers, such as qwen3, for the default configuration of that class. A
    wrong name lists the presets. CONFIG can also be the folder of a diffusers pipeline, or a GGUF file, which is
    explained as llama.cpp reads it.

    --against compares two models and lists the positions at which they differ, for each layer type. A GGUF file is
    compared with the configuration that it was made from, and with the safetensors in that folder. Exit code 1 means
    that the two differ.
    """
    if (gguf := _gguf_of(config)) is not None:
        return _explain_gguf(str(gguf), against, n_ctx, output)
    if n_ctx is not None:
        raise InputError(f"got --n-ctx for {config}, which is not a GGUF file", "locant explain FILE.gguf --n-ctx 4096")
    from locant.checkpoints.config_source import find_source, missing_weights
    from locant.checkpoints.explanation import explain
    from locant.figures.plot import draw_explanation
    from locant.models.config_values import config_dict
    from locant.report.explain import explanation_facts, print_explanation

    if against is not None:
        return _compare(config, against, output)
    transformer = Path(config) / "transformer"
    source = str(transformer) if transformer.is_dir() else config
    read, note = find_source(source)
    note = _join_notes(note, missing_weights(source))
    if isinstance(read, dict) and "_class_name" in read:
        return _explain_diffusers(read, note, output)
    explanation = explain(read)
    draw_into(output, lambda: draw_explanation(explanation, config_dict(read), config))
    facts = {"config": config, "note": note, **explanation_facts(explanation), "figure": output and str(output)}
    return Answer(facts, lambda: print_explanation(explanation, config, note), files=[output])


def _join_notes(*notes: str | None) -> str | None:
    """Join the notes about a configuration and about its folder, which can both exist."""
    return "; ".join(note for note in notes if note) or None


def _gguf_of(config: str) -> Path | None:
    """Return the GGUF file that a path means, unless it is a folder with a configuration."""
    from locant.checkpoints.config_source import CONFIG
    from locant.gguf_file import find_gguf

    return None if (Path(config) / CONFIG).exists() else find_gguf(config)


def _compare(config: str, against: str, output: Path | None) -> Answer:
    from locant.checkpoints.config_comparison import compare_configs
    from locant.checkpoints.config_source import find_source, missing_weights
    from locant.report.explain import comparison_facts, print_comparison

    if _gguf_of(against) is not None:
        got = f"got the GGUF file {against} for --against, expected a configuration"
        raise InputError(got, f"locant explain {shell_path(against)} --against {shell_path(config)}")
    if output is not None:
        raise InputError("got --output with --against, but there is no picture of two models", "omit --output")
    sources = find_source(config), find_source(against)
    comparison = compare_configs(sources[0].config, sources[1].config)
    notes = [
        _join_notes(source.note, missing_weights(name)) for name, source in zip((config, against), sources, strict=True)
    ]
    names = [f"{name}: {note}" if note else name for name, note in zip((config, against), notes, strict=True)]
    facts = comparison_facts(comparison, config, against)
    return Answer(facts, lambda: print_comparison(comparison, *names), code=0 if comparison.agrees else 1)


def _explain_diffusers(config: dict[str, Any], note: str | None, output: Path | None) -> Answer:
    from locant.engines.diffusers import encoding_from_diffusers, transformer_of
    from locant.figures.plot import plot

    encoding, row = encoding_from_diffusers(config), transformer_of(config)
    text = "not rotated" if row.text is None else f"counts on {row.text}" if row.text else "at 0 on all axes"
    facts = {"transformer": config["_class_name"], "encoding": repr(encoding), "axes": row.axes, "text": text}
    facts |= {} if note is None else {"note": note}
    draw_into(output, lambda: plot(encoding))
    return Answer(facts, "\n".join(f"{name}: {fact}" for name, fact in facts.items()), files=[output])


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
    draw_into(output, lambda: plot(model.encoding))
    code = 0 if comparison is None or comparison.agrees else 1
    facts = gguf_facts(model, comparison, file)
    return Answer(facts, lambda: print_gguf(model, comparison, file), files=[output], code=code)


@click.command("extend")
@click.argument("config")
@count("--to", required=True, metavar="TOKENS", help="The new length.")
@click.option("--method", type=METHOD, default=METHODS[0], show_default=True, help="The scaling to use.")
@click.option(
    "--search", metavar="TEXT", help="With longrope: search for the factors by running the model on this text."
)
@count("--generations", low=0, help="Generations of the search, of 12 forward passes each. Default: 8.")
@count("--windows", help="Maximum number of windows of TOKENS from TEXT. Default: 4.")
@click.option("--seed", type=SEED, help="Random seed of the search. Default: 0.")
@device
@output("The new configuration. Default: NAME-METHOD-TOKENS.json.")
@click.option("--figure", type=Picture(), help="Also draw a picture (.png, .svg, .pdf).")
@answers
def extend(
    config: str,
    search: str | None,
    figure: Path | None,
    to: int,
    method: str,
    output: Path | None,
    **search_options: Any,
) -> Answer:
    """Write the configuration of a model for a longer context.

    CONFIG is a config.json, the folder of a model, or the name of a preset. Only the necessary keys are changed. The
    model may need evaluation, and often fine-tuning, before it works at this length.
    A search needs a folder with weights and tokenizer. It saves its measurements next to the new configuration, in
    NAME.search.json, and a second call continues from them.
    """
    from locant.checkpoints.extension import write_extension
    from locant.figures.plot import draw_extension
    from locant.report.console import progress_bar
    from locant.report.explain import extension_facts, print_extension

    settings: dict[str, Any] = {"to": to, "method": method, "output": output}
    factors, search_settings = None, only_given(search_options)
    if search is not None:
        from locant.lab.factor_search import search_for_extension

        with progress_bar("set") as progress:
            factors = search_for_extension(config, [search], **settings, on_step=progress, **search_settings)
    elif search_settings:
        got = f"got {flag_of(next(iter(search_settings)))} without a search"
        raise InputError(got, "add --method longrope --search my.txt")
    extension, written = write_extension(
        config,
        **settings,
        factors=factors,
        write_related=lambda new: draw_into(figure, lambda: draw_extension(new, config)),
    )
    facts = {"config": config, **extension_facts(extension), "written": str(written), "figure": figure and str(figure)}
    return Answer(facts, lambda: print_extension(extension, config), files=[written, figure])


@click.command("probe")
@model(None)
@click.option("--layer-type", help="The layer type to probe, if layers differ. Default: the type of the first layer.")
@picture
@answers
def probe(model: str, layer_type: str | None, output: Path | None) -> Answer:
    """Measure the rotary positions of a model by running them, without reading its code.

    MODEL is a config.json, the folder of a model or a .gguf file, the name of a preset such as llama-3.1-8b, or a
    model_type or class of the installed transformers, such as qwen3 or Qwen3ForCausalLM. Its rotary module is built
    from the configuration and run, without weights, without code from the folder and without the network. The encoding
    of a model that `locant train` wrote is measured with its learned weights.
    """
    from locant.figures.plot import plot
    from locant.probing.probe import probe

    report = probe(model, layer_type=layer_type)
    draw_into(output, lambda: plot(report))
    facts = {"model": model, **report.to_dict(), "figure": output and str(output)}
    return Answer(facts, str(report), files=[output])
