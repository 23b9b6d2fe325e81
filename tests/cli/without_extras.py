"""Run in a process of its own, where no package can be imported that only extras of locant install.

Standard input is JSON: the names of these packages, and what is to be run, lines of the command line and of Python.
Standard output is JSON: what each gave, an exit code and the words on stderr.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
import traceback
from importlib.machinery import ModuleSpec, PathFinder

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}


def hide(packages: set[str]) -> None:
    """As if they were not installed, for `import` and for `importlib.util.find_spec`."""

    class Installed(PathFinder):
        @classmethod
        def find_spec(cls, name: str, *more: object) -> ModuleSpec | None:
            return None if name.partition(".")[0] in packages else super().find_spec(name, *more)

    assert not packages & {*sys.modules}
    sys.meta_path[:] = [Installed if finder is PathFinder else finder for finder in sys.meta_path]


def run_verb(line: str) -> int:
    from locant.cli import main

    try:
        main(shlex.split(line))
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("the command line always exits")


def run_code(code: str) -> int:
    """The code of a user, whose mistakes end as those of the command line do."""
    from locant import LocantError

    try:
        exec(code, {"CONFIG": CONFIG})  # noqa: S102  # lines of the test beside this file
    except LocantError as error:
        sys.stderr.write(str(error))
        return 2
    except Exception:  # noqa: BLE001  # whatever it is, the test shows it
        sys.stderr.write(traceback.format_exc())
        return 1
    return 0


def main() -> None:
    asked = json.load(sys.stdin)
    hide({*asked["hidden"]})
    answers = []
    for line in asked["lines"]:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            code = run_verb(line.removeprefix("locant ")) if line.startswith("locant ") else run_code(line)
        answers.append([code, said.getvalue()])
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
