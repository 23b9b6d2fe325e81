"""How a wheel, or an editable installation, comes by its native kernels: hatchling runs this.

Where they can be compiled, the wheel is for this platform and holds them; elsewhere it holds Python alone, and for
every platform. One binary serves every version of Python and of torch.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


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
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _load(path: Path) -> ModuleType:
    """As a file: to import it from the package would need torch."""
    spec = importlib.util.spec_from_file_location("locant_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
