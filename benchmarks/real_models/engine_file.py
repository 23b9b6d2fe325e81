"""Does llama.cpp read the same file as `transformers` does, and what does a wrong flag cost?

llama.cpp reads the GGUF file, and `transformers` the dequantised weights with the same scaling. llama.cpp also rounds
the inputs of each product to eight bits, so single tokens differ. Longer texts than the model was trained with are read
with the flags that `locant serve-args` prints. Only a few hundred tokens have their logits in memory at a time.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.real_models import weights
from benchmarks.real_models.cost_of_bugs import texts, windows
from benchmarks.real_models.lies import edit_gguf
from benchmarks.real_models.record import RESULTS, Record
from locant.engines.serve_args import serve_arguments
from locant.errors import InputError

__all__ = ["READINGS", "Reading", "context_options", "run", "summary"]

PART = "engines"
ENGINE = "xllamacpp"
TO = 16_384
"""The length for which the flags are printed."""
BEYOND = 10_240
"""The tokens that are read with these flags, 2,048 more than SmolLM2 was trained with."""
TRAINED = 8192
EDGES = (0, 2048, TRAINED, BEYOND)
"""The positions between which losses are summarised."""
BLOCK = 128
CHUNK = 2**26
"""The largest number of logits in memory."""
TYPES = {"none": 0, "linear": 1, "yarn": 2}
"""The numbers of llama.cpp for its types of scalings."""
PRINTED = "those of `locant serve-args`"


class Reading(NamedTuple):
    """A reading of a file in llama.cpp.

    Args:
        model: the model of `weights.MODELS`.
        length: the number of tokens.
        flags: what the command line of llama.cpp would say. ``None`` means what `locant serve-args` prints.
        metadata: a key of the file and another number for it.
        rope: the rope parameters with which `transformers` computes the same. Empty means those of the file, and
            ``None`` means that it is read by llama.cpp alone.
        config: other keys of the configuration with which `transformers` computes the same.
        right: the name of the right reading, or empty if this is one.
    """

    model: str
    length: int
    flags: str | None = ""
    metadata: tuple[str, float] | None = None
    rope: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = {}
    right: str = ""


YARN = {"rope_type": "yarn", "factor": TO / TRAINED, "original_max_position_embeddings": TRAINED}
LINEAR = {"rope_type": "linear", "factor": 4.0}

READINGS: dict[str, Reading] = {
    "smollm2-512": Reading("smollm2", 512, rope={}),
    "smollm2-2048": Reading("smollm2", 2048, rope={}),
    "base": Reading("smollm2", 2048, "--rope-freq-base 10000", rope={"rope_theta": 1e4}, right="smollm2-2048"),
    "linear": Reading("smollm2", 2048, "--rope-scaling linear --rope-scale 4", rope=LINEAR, right="smollm2-2048"),
    "yarn-unasked": Reading(
        "smollm2", 2048, f"--rope-scaling yarn --rope-scale 2 --yarn-orig-ctx {TRAINED}", right="smollm2-2048"
    ),
    "gemma3-512": Reading("gemma3", 512, rope={}),
    "gemma3-2048": Reading("gemma3", 2048, rope={}),
    "gemma3-base": Reading("gemma3", 2048, "--rope-freq-base 10000", right="gemma3-2048"),
    "gemma3-window": Reading(
        "gemma3", 2048, metadata=("gemma3.attention.sliding_window", 128), rope={}, config={"sliding_window": 128},
        right="gemma3-2048",
    ),
    "gemma3-window-lost": Reading(
        "gemma3", 2048, metadata=("gemma3.attention.sliding_window", 4096), right="gemma3-2048"
    ),
    "yarn": Reading("smollm2", BEYOND, None, rope=YARN),
    "no-flags": Reading("smollm2", BEYOND, f"-c {TO}", right="yarn"),
    "yarn-factor": Reading(
        "smollm2", BEYOND, f"--rope-scaling yarn --rope-scale 8 --yarn-orig-ctx {TRAINED} -c {TO}", right="yarn"
    ),
    "yarn-context": Reading(
        "smollm2", BEYOND, f"--rope-scaling yarn --rope-scale 2 --yarn-orig-ctx 2048 -c {TO}", right="yarn"
    ),
    "linear-for-yarn": Reading("smollm2", BEYOND, f"--rope-scaling linear --rope-scale 2 -c {TO}", right="yarn"),
}  # fmt: skip
"""The readings, in their order. Each right reading is before the readings that are compared with it."""


def context_options(flags: str) -> dict[str, Any]:
    """Return the fields of llama.cpp's context that its command line would set.

    >>> context_options("--rope-scaling yarn --rope-scale 4 -c 512")
    {'rope_scaling_type': 2, 'rope_freq_scale': 0.25, 'n_ctx': 512}
    """
    words = flags.split()
    fields = {
        "--rope-scaling": lambda value: ("rope_scaling_type", TYPES[value]),
        "--rope-scale": lambda value: ("rope_freq_scale", 1 / float(value)),
        "--yarn-orig-ctx": lambda value: ("yarn_orig_ctx", int(value)),
        "--rope-freq-base": lambda value: ("rope_freq_base", float(value)),
        "-c": lambda value: ("n_ctx", int(value)),
    }
    return dict(fields[flag](value) for flag, value in zip(words[::2], words[1::2], strict=True))


def _flags(reading: Reading) -> str:
    """Return the flags of a reading, as `locant serve-args` prints them if the reading states none."""
    if reading.flags is not None:
        return reading.flags
    import transformers

    config = transformers.AutoConfig.from_pretrained(weights.folder(reading.model)).to_dict()
    return " ".join(serve_arguments(config, to=TO, engine="llama.cpp").arguments)


def _ids(model: str, length: int) -> torch.Tensor:
    """Return ``length + 1`` tokens of the documentation inside Python, after the tokens that begin every text."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(weights.folder(model))
    tokens = {"documentation": tokenizer(texts()["documentation"], add_special_tokens=False).input_ids}
    return windows(tokens, tokenizer("").input_ids, length, 1)[0]


def losses_of_llama_cpp(path: Path, ids: Sequence[int], flags: str, threads: int) -> np.ndarray:
    """Return the nats of each token but the first, as llama.cpp computes them."""
    from tests.engines.llama_cpp import LlamaCpp

    options = {"n_ctx": len(ids), "n_threads": threads, "n_threads_batch": threads, **context_options(flags)}
    losses = list[np.ndarray]()
    with LlamaCpp(path, options.pop("n_ctx"), n_batch=512, n_ubatch=512, **options) as llama:
        chunk = min(512, CHUNK // llama.vocab_size)
        for begin in range(0, len(ids) - 1, chunk):
            read = ids[begin : min(begin + chunk, len(ids) - 1)]
            logits = torch.from_numpy(llama.logits(read, begin, keep=begin > 0))
            targets = torch.tensor(ids[begin + 1 : begin + 1 + len(read)])
            losses.append(F.cross_entropy(logits, targets, reduction="none").numpy())
    return np.concatenate(losses)


@torch.inference_mode()
def losses_of_transformers(reading: Reading, ids: torch.Tensor) -> np.ndarray:
    """Return the nats of each token but the first, as `transformers` computes them with the dequantised weights."""
    import transformers

    folder = weights.folder(reading.model)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.rope_parameters.update(reading.rope or {})
    for key, value in reading.config.items():
        setattr(config, key, value)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    hidden = model.get_decoder()(ids[None, :-1], use_cache=False).last_hidden_state[0]
    head = model.get_output_embeddings()
    parts = zip(
        *(each.split(max(1, CHUNK // head.weight.shape[0])) for each in (hidden, ids[1:])), strict=True
    )  # fmt: skip
    return torch.cat([F.cross_entropy(head(states), part, reduction="none") for states, part in parts]).numpy()


def _blocks(losses: np.ndarray) -> list[float]:
    return [round(float(block.mean()), 5) for block in np.split(losses, range(BLOCK, len(losses), BLOCK))]


def _read(reading: Reading) -> dict[str, Any]:
    """Read a text in llama.cpp, and in `transformers` if it can compute the same."""
    ids, flags = _ids(reading.model, reading.length), _flags(reading)
    with tempfile.TemporaryDirectory() as folder:
        path = weights.path(reading.model)
        if reading.metadata is not None:
            edit_gguf(path, Path(folder) / path.name, *reading.metadata)
            path = Path(folder) / path.name
        theirs = losses_of_llama_cpp(path, ids.tolist(), flags, torch.get_num_threads())
    found = {"flags": flags, "mean": round(float(theirs.mean()), 5), "blocks": _blocks(theirs)}
    if reading.rope is not None:
        ours = losses_of_transformers(reading, ids)
        by_token = np.abs(theirs - ours)
        found["transformers"] = {
            "mean": round(float(ours.mean()), 5), "blocks": _blocks(ours),
            "difference": {
                "mean": round(float(by_token.mean()), 5), "99 %": round(float(np.quantile(by_token, 0.99)), 5),
                "largest": round(float(by_token.max()), 5),
            },
        }  # fmt: skip
    return found


def run(*, anew: bool = False, folder: Path = RESULTS) -> None:
    """Read every text with right and wrong flags."""
    try:
        import llama_cpp_py_sync  # noqa: F401
        import xllamacpp  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(f"found no {error.name}", "pip install -e '.[dev]'") from error
    record = Record(PART, ["smollm2", "gemma3"], packages=[ENGINE], anew=anew, folder=folder, summary=summary)
    for name, reading in READINGS.items():
        record.measure(name, reading._asdict(), lambda reading=reading: _read(reading))
    record.write()


def summary(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each wrong flag costs, by position, and how far both programs are from each other."""
    rows = {}
    for name, reading in READINGS.items():
        if name not in measured or reading.right not in ("", *measured):
            continue
        got = measured[name]
        row = {
            "model": reading.model, "length": reading.length, "flags": got["flags"], "metadata": reading.metadata,
            "right": reading.right, "loss": got["mean"], "by_position": _stretches(got["blocks"], reading.length),
        }  # fmt: skip
        if reading.right:
            right = measured[reading.right]
            row["cost"] = round(got["mean"] - right["mean"], 4)
            row["cost_by_position"] = [
                [begin, end, round(one - other, 4)]
                for (begin, end, one), (_, _, other) in zip(
                    row["by_position"], _stretches(right["blocks"], reading.length), strict=True
                )
            ]
        if (second := got.get("transformers")) is not None:
            row["transformers"] = {"loss": second["mean"], "difference": second["difference"]}
            if reading.right:
                row["transformers"]["cost"] = round(second["mean"] - measured[reading.right]["transformers"]["mean"], 4)
        rows[name] = row
    return {"rows": rows}


def _stretches(blocks: Sequence[float], length: int) -> list[list[float]]:
    return [[*each] for each in _means(blocks, length)]


def _means(blocks: Sequence[float], length: int) -> Iterator[tuple[int, int, float]]:
    for begin, end in itertools.pairwise(EDGES):
        if begin < length:
            chosen = blocks[begin // BLOCK : min(end, length) // BLOCK]
            yield begin, min(end, length), round(sum(chosen) / len(chosen), 5)
