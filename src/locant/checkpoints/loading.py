"""Call `transformers` to load a model: quietly, without the network, and with one line for each error."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

from locant.errors import InputError
from locant.extras import require

SAFETENSORS = "use a model in safetensors, as save_pretrained writes it"


@contextmanager
def silence_transformers() -> Generator[None]:
    """Silence the progress bars, tables and warnings of transformers."""
    require("transformers", "loading a model")
    from transformers.utils import logging

    has_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(50)  # CRITICAL: not even errors, because locant reports them
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


@contextmanager
def translate_errors(what: object, remedy: str = SAFETENSORS) -> Generator[Any]:
    """Provide transformers, and turn any error that it raises about a model or a configuration into one line."""
    with silence_transformers():
        import transformers

        try:
            yield transformers
        except InputError:
            raise
        except Exception as error:  # a configuration can make transformers fail in any way
            why = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            why = shorten(" ".join(why[: 1 + why[0].endswith(":")]), 300, placeholder=" ...")
            got = f"got {what}, which transformers cannot load: {why}"
            raise InputError(got, remedy) from error


@contextmanager
def offline() -> Generator[None]:
    """Prevent downloads from the Hub. `transformers` looks for kernels there when it loads some GGUF files."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def require_all_weights(report: Mapping[str, Any], name: str, source: object, settings: str) -> None:
    """Raise `InputError` unless the weights of a file or folder are exactly the weights of the model class.

    Args:
        report: the ``loading_info`` of `from_pretrained`.
        name: the model class.
        settings: what states the sizes of the model, such as its config.json.
    """
    if report["mismatched_keys"]:  # transformers draws these weights at random, too
        key, has, expected = min(report["mismatched_keys"])
        got = f"got {key} of shape {tuple(has)} in {source}, but its {settings} states {tuple(expected)}"
        raise InputError(got, "use the configuration and the weights of one model")
    if report["missing_keys"]:  # transformers draws these weights at random and lists them in a table
        got = f"got {source} without {min(report['missing_keys'])}, a weight of {name}"
        raise InputError(got, "use a causal language model with its head")
    if report["unexpected_keys"]:
        got = (
            f"got {source} with {min(report['unexpected_keys'])}, a weight that {name} of its {settings} does not have"
        )
        raise InputError(got, "use the configuration and the weights of one causal language model")
