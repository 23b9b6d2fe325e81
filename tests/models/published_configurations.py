"""Published `config.json` files: whether locant rotates as the modules do that `transformers` builds from them.

``python -m tests.models.published_configurations [FOLDER] [PART_OF_A_NAME]`` prints a table of files and verdicts.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import os
import sys
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from locant import LocantError, Positions, Rotary, ShapeError
from locant.models import encoding_from_config, layer_types
from tests.models.rotary_modules import Case, Outcome, is_rotary, layer_types_of, theirs
from tests.tolerances import ROTATED_TOKEN

__all__ = ["FOLDER", "FOREIGN", "NO_ROTARY_MODULE", "REFUSED", "UNBUILT", "outcome_of"]

FOLDER = Path(os.environ.get("LOCANT_CONFIGS", Path(__file__).parents[3] / "shared" / "configs"))

FOREIGN, UNBUILT, NO_ROTARY_MODULE, REFUSED = "unknown to transformers", "not built", "no rotary module", "refused"


def outcome_of(values: dict[str, Any]) -> Outcome:
    """Whether locant rotates as the modules do that `transformers` builds from this file."""
    if values.get("model_type") not in CONFIG_MAPPING:
        return Outcome(FOREIGN, _read(values))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            part = text_part(CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(values)))
            found = _cases(part)
    except Exception as error:  # noqa: BLE001  # whatever its own code stumbles over
        return Outcome(UNBUILT, f"{type(error).__name__}: {str(error)[:160]} | {_read(values)}")
    if not found:
        return Outcome(NO_ROTARY_MODULE, _read(values))
    worst = Outcome("same bits")
    for case in found:
        result = _compared(values, case)
        if result.verdict not in ("same bits", "equal"):
            return replace(result, detail=f"{case.name}: {result.detail}")
        worst = result if result.verdict == "equal" else worst
    return worst


def text_part(config: Any) -> Any:
    """The part of a model's configuration that its language model is built from."""
    own = () if hasattr(config, "hidden_size") else OTHER_PARTS
    for name in ("thinker_config", "text_config", "language_config", "llm_config", *own):
        inside = getattr(config, name, None)
        if isinstance(inside, PreTrainedConfig):
            return text_part(inside)
    return config


OTHER_PARTS = ("decoder_config", "decoder", "global_config", "encoder_config", "audio_config")


def _cases(config: Any) -> list[Case]:
    """The rotary modules of the folder that take this class of configurations."""
    parts = type(config).__module__.split(".")
    if parts[:2] != ["transformers", "models"]:
        return []
    code = importlib.import_module(".".join([*parts[:-1], parts[-1].replace("configuration_", "modeling_")]))
    classes = [cls for name, cls in vars(code).items() if is_rotary(name, cls, code) and "DiT" not in name]
    named = [cls for cls in classes if _takes(cls, config, code)]
    if not named and getattr(config, "rope_parameters", None):  # the annotation is of another part, or of the whole
        named = [cls for cls in classes if ("Vision" in cls.__name__) == ("Vision" in type(config).__name__)]
    return [Case(parts[2], cls, config, layer_type) for cls in named for layer_type in layer_types_of(cls, config)]


def _takes(cls: type, config: Any, code: Any) -> bool:
    hint = next(iter([*inspect.signature(cls.__init__).parameters.values()][1:])).annotation
    hint = getattr(code, hint, None) if isinstance(hint, str) else hint
    return inspect.isclass(hint) and isinstance(config, hint)


def _read(values: dict[str, Any]) -> str:
    """The result of locant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            kinds = layer_types(values)
            return f"read as {type(encoding_from_config(values, layer_type=next(iter(kinds), None))).__name__}"
        except LocantError as error:
            return f"refused: {error}"


def _compared(values: dict[str, Any], case: Case) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            rotary = Rotary.from_config(copy.deepcopy(values), layer_type=case.layer_type, angles="float32")
            for kind in layer_types(values) or (None,):
                encoding_from_config(values, layer_type=kind)
        except LocantError as error:
            return Outcome(REFUSED, str(error))
    try:
        index, turn = theirs(case)
    except (RuntimeError, TypeError, ValueError) as error:  # what its own code stumbles over, such as an odd width
        return Outcome(UNBUILT, f"{type(error).__name__}: {error}")
    q = 2 * torch.rand(1, 2, index.shape[1], rotary.head_dim, generator=torch.Generator().manual_seed(0)) - 1
    with torch.no_grad():
        try:
            expected, ours = turn(q), rotary.rotate_one(q, Positions.of(index))
        except (RuntimeError, ShapeError) as error:
            return Outcome("differs", f"{type(error).__name__}: {error}")
    if torch.equal(ours, expected):
        return Outcome("same bits")
    error = (ours - expected).abs().max().item()
    return Outcome("equal" if error <= ROTATED_TOKEN else "differs", f"{error:.1e}")


def main(folder: Path, part: str) -> None:
    count: Counter[str] = Counter()
    for path in sorted(folder.glob("*.json")):
        if part not in path.name:
            continue
        values = json.loads(path.read_text())
        try:
            result = outcome_of(values)
        except Exception as error:  # noqa: BLE001  # the table shall show it
            result = Outcome("crashed", f"{type(error).__name__}: {error}")
        count[result.verdict] += 1
        sys.stdout.write(f"{path.name}\t{values.get('model_type')}\t{result.verdict}\t{result.detail}\n")
    sys.stdout.writelines(f"{number:4d} {verdict}\n" for verdict, number in count.most_common())


if __name__ == "__main__":
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, sys.argv[2] if len(sys.argv) > 2 else "")
