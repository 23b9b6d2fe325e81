"""``python -m locant.kernels.native`` prints whether native kernels are used. With ``build`` it first compiles them."""

from __future__ import annotations

import sys

from locant.kernels.native import status
from locant.kernels.native.build import BuildError, build

if __name__ == "__main__":
    if sys.argv[1:] == ["build"]:
        try:
            sys.stdout.write(f"built {build()}\n")
        except BuildError as error:
            sys.exit(f"locant works without native kernels, but slower on a CPU: {error}")
    elif sys.argv[1:]:
        sys.exit("usage: python -m locant.kernels.native [build]")
    sys.stdout.write(f"native kernels are {status()}\n")
