"""Import packages that only an extra of this package installs, or raise an error with the command to install them."""

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
        package: the name to import, such as ``"matplotlib"``.
        purpose: the part of locant that needs the package. It is the subject of the error.
        distribution: the name to install, if it differs from the name to import.

    Raises:
        InputError: the package is not installed.

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
        if error.name != package:  # it is installed, but a package that it imports is not
            raise
    distribution = distribution or package
    raise InputError(f"{purpose} needs {distribution}, which is not installed", install_command(distribution))


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return find_spec(package) is not None


def install_command(package: str) -> str:
    """Return the command that installs a package, with the smallest extra in our metadata that contains it.

    >>> install_command("matplotlib"), install_command("umap-learn")
    ("pip install 'locant[lab]'", 'pip install umap-learn')
    """
    try:
        matches = [REQUIREMENT.match(one) for one in requires("locant") or []]
    except PackageNotFoundError:  # locant runs from its source and is not installed
        matches = []
    requirements = [(match[1].lower(), match[2]) for match in matches if match]
    sizes = Counter(extra for _, extra in requirements)
    extras = sorted((extra for name, extra in requirements if name == package), key=lambda extra: sizes[extra])
    return f"pip install 'locant[{extras[0]}]'" if extras else f"pip install {package}"
