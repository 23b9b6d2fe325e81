"""Golden vectors are right by 50-digit arithmetic, and the ports on the page about them agree with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import mpmath
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors import safe_open

from locant.cli import main
from tests.engines.record import record
from tests.tolerances import ANGLE, POWER_IN_DOUBLE, ROTATED_TOKEN

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "engines.md"


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("golden") / "golden.safetensors"
    result = CliRunner().invoke(main, ["golden", "-o", str(path)])
    assert result.exit_code == 0, result.output
    assert "100 tensors" in result.output
    with safe_open(path, framework="np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        tensors["encodings"] = json.loads(file.metadata()["encodings"])
    return tensors


def _frequency(encoding: dict[str, Any], pair: int) -> Any:
    """Of the scalings with a formula in a line."""
    base, factor, dim = mpmath.mpf(encoding["base"]), encoding.get("factor", 1), 64
    plain = base ** (-mpmath.mpf(2 * pair) / dim)
    match encoding["scaling"]:
        case "Unscaled":
            return plain
        case "Linear":
            return plain / factor
        case "NTK":
            return (base * mpmath.mpf(factor) ** (mpmath.mpf(dim) / (dim - 2))) ** (-mpmath.mpf(2 * pair) / dim)
        case "LongRoPE":
            return plain / mpmath.mpf(encoding["long_factor"][pair])
        case "Llama3":
            rotations = encoding["original_max_seq_len"] * plain / (2 * mpmath.pi)
            low, high = encoding["low_freq_factor"], encoding["high_freq_factor"]
            share = min(max((rotations - low) / (high - low), 0), 1)
            return (1 - share) * plain / factor + share * plain
        case scaling:
            raise AssertionError(scaling)


@pytest.mark.parametrize("name", ["none/1e4", "linear/5e5", "ntk/1e4", "llama3/5e5", "longrope/1e4"])
def test_angles_are_those_of_fifty_digits(name: str, golden: dict[str, Any]) -> None:
    encoding = golden["encodings"][name]
    with mpmath.workdps(50):
        for pair in (0, 1, 13, 31):
            frequency = _frequency(encoding, pair)
            assert abs(golden[f"{name}/inv_freq"][pair] / frequency - 1) < POWER_IN_DOUBLE
            for slot, position in enumerate(golden["positions"].tolist()):
                cos, sin = mpmath.cos(position * frequency), mpmath.sin(position * frequency)
                for kind, exact in (("cos", cos), ("sin", sin)):
                    stored = mpmath.mpf(float(golden[f"{name}/exact/{kind}"][slot, pair]))
                    assert abs(stored - exact * encoding["attention_factor"]) < 2 * ANGLE


def test_every_encoding_is_different(golden: dict[str, Any]) -> None:
    tables = [golden[f"{name}/exact/cos"] for name in golden["encodings"]]
    assert len({table.tobytes() for table in tables}) == len(tables) == 14


ENGINES = {"numpy": "NumPy", "jax": "JAX", "mlx": "MLX"}


@pytest.mark.parametrize("library", ENGINES)
def test_a_port_on_the_page_agrees(library: str, golden: dict[str, Any]) -> None:
    pytest.importorskip({"mlx": "mlx.core"}.get(library, library))
    port = ModuleType("port")
    code = re.findall(rf"```python\n(import {library}.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(code) == 1
    assert len([line for line in code[0].splitlines() if line.strip()]) <= 10
    exec(compile(code[0], library, "exec"), vars(port))  # noqa: S102 - running our page is the test
    reach = slice(0, 4) if library == "mlx" else slice(None)  # its rope takes tokens in order
    for name, encoding in golden["encodings"].items():
        x, positions, inv_freq = golden["x"][reach], golden["positions"][reach], golden[f"{name}/inv_freq"]
        rotated = port.rotate(x, positions, inv_freq, encoding["attention_factor"])
        difference = float(np.abs(np.asarray(rotated) - golden[f"{name}/half"][reach]).max())
        record(ENGINES[library], "the port on this page, golden vectors", difference, package=library, unit="absolute")
        assert difference < ROTATED_TOKEN


def test_another_suffix_raises(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["golden", "-o", str(tmp_path / "golden.npz")])
    assert result.exit_code == 2
    assert not [*tmp_path.iterdir()]
