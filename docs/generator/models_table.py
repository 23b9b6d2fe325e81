"""One table of all models: published configurations, and every architecture as its class in `transformers` has it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from docs.generator.encodings import title
from docs.generator.markdown import rows
from docs.generator.models import family_of
from docs.generator.records import ROOT
from locant.errors import LocantError
from locant.models import encoding_from_config, layer_types
from locant.models.registry import ARCHITECTURES, presets
from locant.positions.base import PositionEncoding
from locant.positions.encodings.rotary import Rotary
from locant.positions.temperature import Tempered

__all__ = ["models_table", "row_of"]

COLUMNS = (
    "model", "year", "encoding", "base", "scaling", "rotated", "layout", "windows", "without positions", "explained",
)  # fmt: skip

WORDS = """\
One row for each published configuration that ships with locant (`llama-3.1-8b`), and one for each `model_type` that it
reads, with the defaults of its class in `transformers`. Models of one type differ in base, scaling and windows, so
check your model's own file with `locant explain config.json`. Click on a heading to sort the rows. Type words in the
box to filter them: a row is kept if it contains all words.

- **rotated**: the rotated share of a head's dimensions. **windows**: the tokens that a layer sees, and the number of
  layers with this window. A window of ModernBERT has half of its tokens on each side. **without positions**: the number
  of layers without positions.
- **year**: the release of the first model of a type, if the documentation of `transformers` of January 2026 states it.
- A dash means that the defaults of the class do not determine an encoding. Each checkpoint's `config.json` does."""


def models_table() -> str:
    """The page with the table."""
    years = json.loads((ROOT / "docs" / "data" / "model_years.json").read_text(encoding="utf-8"))["years"]
    entries = [*presets().items(), *((name, {"model_type": name}) for name, _ in ARCHITECTURES.items())]
    table = rows([row_of(name, config, str(years.get(name, ""))) for name, config in entries])
    return f"""(models-table)=
# All models in one table

{WORDS}

```python
import locant
from locant.models.registry import presets

print(locant.encoding_from_config(presets()["gpt-oss-20b"]))
```
```text
{encoding_from_config(presets()["gpt-oss-20b"])}
```

```{{table}}
:class: sortable

| {" | ".join(COLUMNS)} |
|{"---|" * len(COLUMNS)}
{table}
```
"""


def row_of(name: str, config: Mapping[str, Any], year: str = "") -> tuple[str, ...]:
    """The cells of one model; a configuration of nothing but a type is that of its class.

    >>> row_of("gpt_oss", {"model_type": "gpt_oss"})[2:9]
    ('RoPE', '150,000', 'YaRN × 32', '100%', 'half', '128 in 18 of 36', '')
    """
    family = family_of(config)
    full, stated = _full(config), len(config) > 1
    encodings = _encodings(config if stated else full)
    rotary = [each for each in encodings.values() if isinstance(each, Rotary)]
    return (
        f"[`{name}`](#model-{family})",
        year,
        _joined(_kind(each) for each in encodings.values()) or "–",
        _joined(_number(each.base) for each in rotary),
        _joined(_scaling(each) for each in rotary),
        _joined(_share(each, full) for each in rotary),
        _joined(each.layout for each in rotary),
        _windows(full) if not stated or any(key in config for _, key, _ in WINDOWS) else "",
        _without(full, encodings),
        f"[explain](#explain-{name if name in presets() else family})",
    )


def _full(config: Mapping[str, Any]) -> dict[str, Any]:
    """With what the class of `transformers` takes for every key that is missing, where it has one."""
    try:
        known = CONFIG_MAPPING[config["model_type"]]
    except KeyError:
        return dict(config)
    stated = {key: value for key, value in config.items() if key != "model_type"}
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # some classes warn of their own defaults
    try:
        return known(**stated).to_dict() | stated | {"model_type": config["model_type"]}
    finally:
        logging.set_verbosity(before)


def _encodings(config: Mapping[str, Any]) -> dict[str | None, PositionEncoding]:
    """Of each kind of layers; none, where the configuration does not say enough."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return {kind: encoding_from_config(config, layer_type=kind) for kind in layer_types(config) or (None,)}
        except LocantError:
            return {}


def _kind(encoding: PositionEncoding) -> str:
    return "none" if _is_none(encoding) else title(type(encoding))


def _is_none(encoding: PositionEncoding) -> bool:
    """Queries that grow with their position (Llama 4) tell no distance."""
    return type(encoding) in (PositionEncoding, Tempered)


def _scaling(rotary: Rotary) -> str:
    scaling = rotary.scaling
    name, factor = type(scaling).__name__, getattr(scaling, "factor", None)
    if name == "Unscaled":
        return ""
    return f"{name} × {factor:g}" if isinstance(factor, (int, float)) else name


def _share(rotary: Rotary, config: Mapping[str, Any]) -> str:
    """In latent attention the rotated part of a head is an encoding of its own, beside a part without positions.

    The share that is stated counts, since heads of the class by default may be no multiple of anything.
    """
    ropes = config.get("rope_parameters")
    share = {**(ropes if isinstance(ropes, Mapping) else {}), **config}.get("partial_rotary_factor")
    if isinstance(share, (int, float)):
        return f"{share:.0%}"
    beside = config.get("qk_nope_head_dim") if "qk_rope_head_dim" in config else 0
    return f"{rotary.rotary_dim / (rotary.head_dim + (beside or 0)):.0%}"


WINDOWS = (
    ("sliding_attention", "sliding_window", ""), ("chunked_attention", "attention_chunk_size", "chunks of "),
    ("sliding_attention", "local_attention", ""),  # ModernBERT: half of it on each side
    ("local", "window_size", ""),  # GPT-Neo
    ("attention", "attention_window_size", ""),  # RecurrentGemma
)  # fmt: skip
"""The name of a kind of layers, the key with its window, and words before the number."""


def _windows(config: Mapping[str, Any]) -> str:
    """The window of a model's layers, and the number of layers with it.

    >>> types = ["global", "local"] * 12
    >>> _windows({"attention_layers": types, "window_size": 256})
    '256 in 12 of 24'
    >>> blocks = ["recurrent", "recurrent", "attention"]
    >>> _windows({"block_types": blocks, "attention_window_size": 2048, "num_hidden_layers": 26})
    '2,048 in 8 of 26'
    >>> _windows({"window_size": 7, "depths": [2, 2, 6, 2]})  # of an image, not of a text
    ''
    """
    kinds = list(config.get("layer_types") or config.get("attention_layers") or ())
    if not kinds and (blocks := config.get("block_types")):
        layers = config["num_hidden_layers"]
        kinds = (blocks * layers)[:layers]
    for kind, key, word in WINDOWS:
        width, count = config.get(key), kinds.count(kind)
        usual = key in ("sliding_window", "attention_chunk_size")
        if isinstance(width, int) and (count or (usual and not kinds)) and config.get("use_sliding_window", True):
            return f"{word}{_number(width)}" + (f" in {count} of {len(kinds)}" if count else "")
    return ""


def _without(config: Mapping[str, Any], encodings: Mapping[str | None, PositionEncoding]) -> str:
    """How many layers attend without positions."""
    none = [kind for kind, encoding in encodings.items() if _is_none(encoding)]
    if not none or len(none) == len(encodings):
        return "all" if none else ""
    listed, kinds = config.get("no_rope_layers"), config.get("layer_types") or ()
    count = list(listed).count(0) if listed else sum(kind in none for kind in kinds)
    total = len(listed or kinds)
    return f"{count} of {total}" if count else "some"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _joined(words: Iterator[str]) -> str:
    return ", ".join(each for each in dict.fromkeys(words) if each)
