"""A worker process: it makes the parts that it is told to, one after the other, with an engine of its own.

Orders come in and reports go out as lines of JSON. A worker whose orders end, because the process that gave them is
done or dead, ends too; whatever it was at is then no part, and is made again by the next run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO

from locant.errors import InputError, LocantError
from locant.text.prepare.part import make_part
from locant.text.prepare.plan import read_plan
from locant.text.tokenizer.engine import Engine

__all__ = ["ONE_THREAD", "main", "serve"]

ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""There is a worker for every core already."""


def main() -> None:
    """Serve standard input and output, in a fresh interpreter; what else is printed goes to standard error."""
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, reports)


def serve(orders: BinaryIO, reports: BinaryIO) -> None:
    """Follow orders until there are none; errors that the user can change are reported in their words."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; ours decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _work(orders, reports)
    except LocantError as error:
        _tell(reports, error=error.cause, remedy=error.remedy)
    except MemoryError:
        _tell(reports, error="a worker has no memory left", remedy="fewer workers; what is done is kept")
    except BrokenPipeError:
        return
    except BaseException:
        _tell(reports, crash=traceback.format_exc())
        raise


def _work(orders: BinaryIO, reports: BinaryIO) -> None:
    """The first order says where the plan is, the second which engine to use; the others are numbers of parts."""
    lines = map(json.loads, orders)
    for store in lines:
        plan = read_plan(Path(store))
        if plan is None:
            raise InputError(f"{store} has lost its plan while it was made", "the same command again")
        tokenizer = plan.tokenizer()
        for name in lines:
            engine = Engine(tokenizer, name, parallel=False)
            for number in lines:
                make_part(plan, number, engine, lambda count: _tell(reports, read=count))
                _tell(reports, done=number)


def _tell(reports: BinaryIO, **facts: Any) -> None:
    reports.write(json.dumps(facts).encode() + b"\n")
    reports.flush()
