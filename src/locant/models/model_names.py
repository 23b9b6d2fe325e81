"""Recognise the names of published models, and return the encodings of their positions."""

from __future__ import annotations

import re
import warnings

from locant.errors import LocantError
from locant.models.config_values import HEADS, LENGTHS, NUM_LAYERS, WIDTHS
from locant.models.encodings import encoding_from_config, layer_types
from locant.models.parts import TYPE_OF_PART
from locant.models.registry import ARCHITECTURES, with_defaults
from locant.positions.base import PositionEncoding
from locant.positions.encodings.rotary import Rotary

PUBLISHED_AS = {
    "gpt": "gpt2", "gpt1": "openai-gpt", "gpt3": "gpt2", "pythia": "gpt_neox", "starcoder": "gpt_bigcode",
    "galactica": "opt", "codellama": "llama", "tinyllama": "llama", "smollm": "llama", "smollm2": "llama",
    "vicuna": "llama", "alpaca": "llama", "yi": "llama", "zephyr": "mistral", "qwen1.5": "qwen2", "qwq": "qwen2",
    "deepseekr1": "deepseek_v3", "debertav3": "deberta-v2", "minilm": "bert", "nllb": "m2m_100", "byt5": "t5",
    "xlmr": "xlm-roberta",
}  # fmt: skip
"""The ``model_type`` of models that are published under another name."""

SMALL = {
    **dict.fromkeys(WIDTHS, 64), **dict.fromkeys(HEADS, 4), **dict.fromkeys(LENGTHS, 512), NUM_LAYERS[0]: 4,
    "relative_attention": True,  # as in all published DeBERTas, although it is not the default
}  # fmt: skip
"""Sizes of a small configuration, for architectures without a preset."""


def model_type_in(name: str) -> str | None:
    """Return the ``model_type`` of the model with this name, or ``None`` if it is unknown.

    The name may belong to a repository, a class or a family. Other words may precede and follow it.

    >>> model_type_in("bert-base-uncased"), model_type_in("openai/whisper-tiny"), model_type_in("CLIP")
    ('bert', 'whisper', 'clip_text_model')
    >>> model_type_in("Qwen2RotaryEmbedding"), model_type_in("Bertha")
    ('qwen2', None)
    """
    types = {_letters(model_type): model_type for model_type, _ in ARCHITECTURES.items()}
    types |= {_letters(whole): part for whole, part in TYPE_OF_PART.items()}
    types |= {_letters(other): model_type for other, model_type in PUBLISHED_AS.items()}
    begins = [place.start() for place in re.finditer(r"(^|(?<=[/_-]))\w", name)]
    ends = [place.start() for place in re.finditer(r"(?![a-z]|(?<=[0-9])[0-9])", name)]
    for begin in begins:
        for end in reversed(ends):
            if end > begin and (named_type := types.get(_letters(name[begin:end]))) is not None:
                return named_type
    return None


def position_classes(model_type: str) -> list[type[PositionEncoding]]:
    """Return the class of each position encoding in a model, or an empty list if the configuration decides.

    >>> [kind.__name__ for kind in position_classes("whisper")], position_classes("falcon")
    (['Sinusoidal', 'Learned'], [])
    """
    architecture = ARCHITECTURES.find(model_type)
    if architecture.encoding is None:
        return [Rotary]
    if architecture.rotary is not None and architecture.layer_types is None:  # a key decides whether it is rotary
        return []
    config = with_defaults({**next(iter(architecture.presets.values()), SMALL), "model_type": model_type})
    try:
        with warnings.catch_warnings(action="ignore"):  # warnings about the sizes, which the caller does not see
            kinds = layer_types(config) or (None,)
            encodings = [encoding_from_config(config, layer_type=kind) for kind in kinds]
    except LocantError:
        return []
    return [kind for kind in dict.fromkeys(map(type, encodings)) if kind.info.name]


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
