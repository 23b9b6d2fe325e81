"""Packages that only an extra of this package installs: imported here, or named in an error with what installs them."""

from __future__ import annotations

import re
from collections import Counter
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from typing import Any

from locant.errors import InputError

REQUIREMENT = re.compile(r"([\w.-]+).*;.*\bextra == ['\"]([\w-]+)['\"]")


def require(package: str, purpose: str, *, distribution: str = "") -> Any:  # an untyped module
    """Import a package that only an extra installs.

    Args:
        package: as it is imported, such as ``"matplotlib"``.
        purpose: what needs it, the subject of the error.
        distribution: as it is installed, if its name is another.

    Raises:
        InputError: it is not installed.

    >>> require("math", "counting").floor(1.5)
    1
    >>> require("abacus_of_stone", "counting")
    Traceback (most recent call last):
    ...
    locant.errors.InputError: counting needs abacus_of_stone, which is not installed; try: pip install abacus_of_stone
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is there, and lacks something itself
            raise
    distribution = distribution or package
    raise InputError(f"{purpose} needs {distribution}, which is not installed", install_command(distribution))


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return find_spec(package) is not None


def install_command(package: str) -> str:
    """Return what installs a package: the smallest extra that has it, read from the metadata of locant.

    >>> install_command("matplotlib"), install_command("umap-learn")
    ("pip install 'locant[lab]'", 'pip install umap-learn')
    """
    try:
        matches = [REQUIREMENT.match(one) for one in requires("locant") or []]
    except PackageNotFoundError:  # run from its source
        matches = []
    found = [(match[1].lower(), match[2]) for match in matches if match]
    sizes = Counter(extra for _, extra in found)
    extras = sorted((extra for name, extra in found if name == package), key=lambda extra: sizes[extra])
    return f"pip install 'locant[{extras[0]}]'" if extras else f"pip install {package}"
