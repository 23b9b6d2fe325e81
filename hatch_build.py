"""How a wheel, or an editable installation, comes by its native kernels: hatchling runs this.

Where they can be compiled, the wheel is for this platform and holds them; elsewhere it holds Python alone, and is for
every platform. One binary serves every version of Python and of torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

OLDEST_GLIBC = 17
"""2.17: the oldest that installers still look for."""


class NativeKernels(BuildHookInterface):
    """Compiles the C sources of the package before it is packed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is ``"editable"`` where the package stays where it is, and with it the library."""
        build = _load(Path(self.root) / "src" / "locant" / "kernels" / "native" / "build.py")
        try:
            library = build.build()
        except build.BuildError as error:
            self.app.display_warning(f"without native kernels, slower on a CPU: {error}")
            return
        if version != "editable":
            build_data["force_include"][str(library)] = f"locant/kernels/native/{library.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform(library)}"


def _platform(library: Path) -> str:
    """This platform; where its C library is glibc, the oldest one that has all that the kernels call.

    On macOS the version that clang compiles for, which is that of ``MACOSX_DEPLOYMENT_TARGET`` where it is set.
    """
    known = list(platform_tags())
    if known[0].startswith("macosx") and (oldest := os.environ.get("MACOSX_DEPLOYMENT_TARGET")):
        return re.sub(r"_\d+_\d+", f"_{oldest.replace('.', '_')}", known[0], count=1)
    newest = next((tag for tag in known if not tag.startswith("linux")), known[0])  # which no index takes
    asked = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())]
    return re.sub(r"^manylinux_2_\d+", f"manylinux_2_{max([OLDEST_GLIBC, *asked])}", newest)


def _load(path: Path) -> ModuleType:
    """As a file: to import it from the package would need torch."""
    spec = importlib.util.spec_from_file_location("locant_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
