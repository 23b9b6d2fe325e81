"""The wheel and the source distribution install into an empty environment, with native kernels where there is gcc."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or not shutil.which("gcc"), reason="there is no gcc"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("build", "hatchling")),
        reason="build and hatchling are not installed",
    ),
]


def run(command: list[str | Path], folder: Path, **surroundings: str) -> str:
    """What it prints, in another folder than this and without what points to this one."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LOCANT_NATIVE", "CC")}
    done = subprocess.run(
        command, cwd=folder, env={**kept, **surroundings}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """gcc, which leaves out what takes it most of the time."""
    script = tmp_path_factory.mktemp("compiler") / "gcc"
    script.write_text('#!/bin/sh\nexec gcc "$@" -O0\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, hasty: str) -> Path:
    """A folder with both, the wheel made from the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT], folder, CC=hasty)
    return folder


def environment(wheel: Path, folder: Path) -> Path:
    """The Python of a new environment with this wheel, which sees the packages of ours behind its own."""
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "ours.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")) + "\n")
    python = folder / "bin" / "python"
    options = ["--no-deps", "--no-index", "--no-cache-dir", "--disable-pip-version-check"]
    run([python, "-m", "pip", "install", *options, wheel], folder)
    return python


USE = """
import numpy as np, torch, locant
from locant.kernels import native
print(locant.__file__)
print(locant.Windows(np.arange(9, dtype=np.uint16), 4).__getitems__([1])["targets"].tolist())
q = torch.ones(1, 1, 2, 4)
print(locant.Rotary(4).rotate_one(q, locant.Positions.arange(2)).shape)
print(native.status())
"""


def test_the_wheel_is_native_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert "-py3-none-manylinux_2_" in wheel.name or "-py3-none-musllinux_" in wheel.name
    with zipfile.ZipFile(wheel) as file:
        packed = {*file.namelist()}
    assert sum(name.endswith(".so") for name in packed) == 1
    sources = [path for path in (ROOT / "src" / "locant").rglob("*.*") if path.suffix not in (".so", ".pyc")]
    assert {path.relative_to(ROOT / "src").as_posix() for path in sources} <= packed, "templates and stubs, too"
    python = environment(wheel, tmp_path)
    where, batch, shape, status = run([python, "-c", USE], tmp_path).splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert (batch, shape) == ("[[5, 6, 7, 8]]", "torch.Size([1, 1, 2, 4])")
    assert status.startswith("used, for ")


def test_a_wheel_for_macos_is_for_the_version_that_is_compiled_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    monkeypatch.setattr(hook, "platform_tags", lambda: iter(["macosx_15_0_arm64", "macosx_14_0_arm64"]))
    (tmp_path / "library.so").touch()
    for target, tag in ((None, "macosx_15_0_arm64"), ("14.0", "macosx_14_0_arm64")):
        if target:
            monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", target)
        else:
            monkeypatch.delenv("MACOSX_DEPLOYMENT_TARGET", raising=False)
        assert hook._platform(tmp_path / "library.so") == tag


def test_the_source_distribution_needs_no_compiler_and_says_what_is_missing(
    built: Path, hasty: str, tmp_path: Path
) -> None:
    (packed,) = built.glob("*.tar.gz")
    with tarfile.open(packed) as file:
        names = file.getnames()
        assert not [name for name in names if name.endswith(".so")]
        file.extractall(tmp_path, filter="data")
    source = tmp_path / names[0].split("/")[0]
    said = run([sys.executable, "-m", "build", "--wheel", "--no-isolation", source], tmp_path, CC="false")
    assert "without native kernels, slower on a CPU: false ended with code 1" in said
    (wheel,) = source.glob("dist/*-py3-none-any.whl")
    python = environment(wheel, tmp_path / "environment")
    *_, batch, shape, status = run([python, "-c", USE], tmp_path).splitlines()
    assert (batch, shape) == ("[[5, 6, 7, 8]]", "torch.Size([1, 1, 2, 4])")
    assert status == "not built; with a C compiler: python -m locant.kernels.native build"
    assert status in run([python, "-m", "locant", "bench", "rotary"], tmp_path).splitlines()[-1]
    assert "native kernels are used" in run([python, "-m", "locant.kernels.native", "build"], tmp_path, CC=hasty)
