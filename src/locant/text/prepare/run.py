"""`prepare`: from files of text to a token store, with what is done kept whenever it stops.

What is asked for is planned, its missing parts are made (in this process, by workers, on a Ray cluster, or by tasks of
other machines that see the same folder), and the parts are joined. The store depends on the inputs and on the options
that say what it shall hold, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import overload

from locant.arguments import flag, shown, whole
from locant.errors import InputError
from locant.text.prepare.cluster import LOCAL, make_on_ray
from locant.text.prepare.crew import Crew, num_cores
from locant.text.prepare.differences import differences
from locant.text.prepare.finalize import join, missing_parts, note_tasks, recorded_request, store_folder, tidy
from locant.text.prepare.part import make_part, sweep
from locant.text.prepare.plan import (
    STDIN_FILE,
    Plan,
    discard_plan,
    holds_work,
    keep_plan,
    keep_stdin,
    new_plan,
    part_bytes,
    read_plan,
    write_plan,
)
from locant.text.prepare.request import Paths, Request, Stdin
from locant.text.prepare.sample import CHECKED_BYTES, TRAINING_BYTES, take_sample
from locant.text.store import MANIFEST, TokenStore
from locant.text.tokenizer import Tokenizer
from locant.text.tokenizer.engine import EngineChoice, choose_engine

__all__ = ["SHARD_SIZE", "prepare"]

SHARD_SIZE = 2**26

Progress = Callable[[int, int], None]
"""Is told how many bytes of the input are done, and how many there are."""


@overload
def prepare(
    paths: Paths,
    out: str | Path,
    *,
    tokenizer: Tokenizer | str | Path | None = ...,
    workers: int | None = ...,
    resume: bool = ...,
    shard_size: int = ...,
    vocab_size: int | None = ...,
    separator: str | None = ...,
    field: str | None = ...,
    append_end_of_text: bool | None = ...,
    engine: EngineChoice = ...,
    task: None = ...,
    num_tasks: None = ...,
    ray: str | None = ...,
    progress: Progress | None = ...,
) -> TokenStore: ...


@overload
def prepare(
    paths: Paths,
    out: str | Path,
    *,
    tokenizer: Tokenizer | str | Path | None = ...,
    resume: bool = ...,
    shard_size: int = ...,
    vocab_size: int | None = ...,
    separator: str | None = ...,
    field: str | None = ...,
    append_end_of_text: bool | None = ...,
    engine: EngineChoice = ...,
    task: int,
    num_tasks: int,
    progress: Progress | None = ...,
) -> None: ...


def prepare(
    paths: Paths,
    out: str | Path,
    *,
    tokenizer: Tokenizer | str | Path | None = None,
    workers: int | None = None,
    resume: bool = True,
    shard_size: int = SHARD_SIZE,
    vocab_size: int | None = None,
    separator: str | None = None,
    field: str | None = None,
    append_end_of_text: bool | None = None,
    engine: EngineChoice = "auto",
    task: int | None = None,
    num_tasks: int | None = None,
    ray: str | None = None,
    progress: Progress | None = None,
) -> TokenStore | None:
    """Encode texts into a token store; a call that was interrupted goes on when it is made again.

    A finished store is never touched: the same call returns it, any other is refused. So are unfinished work and a
    call with other options, another tokenizer or changed inputs; ``resume=False`` discards such work.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("a", "b"):
    ...     _ = (folder / f"{name}.txt").write_text(f"the text of {name}")
    >>> store = prepare(folder, folder / "store", tokenizer="bytes")
    >>> len(store), store.documents, store.tokenizer.decode(store[:14])
    (28, array([ 0, 14, 28]), 'the text of a<|endoftext|>')

    Args:
        paths: files (.txt, .md, .jsonl, .parquet, each also .gz or .zst), folders, globs, and ``-`` for standard input.
        out: the folder of the store.
        tokenizer: one, or what `Tokenizer.load` takes, or ``"bytes"``; default: a byte-level BPE trained on a sample
            of the input.
        workers: processes; default: one for each core. With one, this process does the work, as it does a task.
        resume: go on with unfinished work in `out`.
        shard_size: a shard is closed with the document that brings it to so many tokens, or earlier: a large input is
            cut into 64 parts at least, each of which has its own shards.
        vocab_size: of the tokenizer that is trained; default: 32 768.
        separator: what stands between the documents of a text file; default: a file is one document.
        field: the key (.jsonl) or column (.parquet) of the text; default: text. With one, standard input is JSON
            lines.
        append_end_of_text: put the tokenizer's end-of-text id after every document; default: if it has one.
        engine: what encodes, always to the same ids; ``"auto"`` takes the fast one if it is installed and its ids
            are found equal on a sample of the input.
        task, num_tasks: do only this share of the work, and return ``None``; tasks may run at the same time, on
            machines that see the same folder, and `finalize` joins what they made.
        ray: do the work on a Ray cluster: its address, or ``"local"`` for one on this machine.
        progress: is called with the bytes of the input that are done, and all of them.

    Raises:
        InputError: an input that cannot be read or changes meanwhile, a store or unfinished work of another request
            in `out`, no room on the disk, a worker that was killed.
        RangeError: a number of workers, tasks or tokens that makes no sense.
    """
    out = store_folder(out)
    if workers is not None:
        workers = whole("workers", workers, 1, 4096, remedy="workers=1")
    _require_sense(resume=resume, ray=ray, progress=progress)
    _require_share(task, num_tasks, ray, workers, resume=resume)
    request = Request.of(
        paths,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        separator=separator,
        field=field,
        shard_size=shard_size,
        append_end_of_text=append_end_of_text,
    )
    size = _crew_size(workers, request)
    with _place(out):
        if (out / MANIFEST).exists():
            store = _finished(out, request, resume=resume)
            return store if task is None else None
        with Crew(size) if size > 1 and ray is None and task is None else nullcontext() as crew:
            plan, chosen = _plan(out, request, resume=resume)
            if crew is not None:
                crew.prepare(plan.store)
            _make(plan, _share(plan, task, num_tasks), chosen, engine, progress, crew, ray, size)
        return join(plan, chosen) if task is None else None


def _require_sense(*, resume: object, ray: object, progress: object) -> None:
    flag("resume", resume)
    if ray is not None and not (isinstance(ray, str) and ray):
        raise InputError(f"got ray={shown(ray)}, expected the address of a cluster", f"ray={LOCAL!r}, or None")
    if progress is not None and not callable(progress):
        raise InputError(f"got progress={shown(progress)}, expected a function of two numbers", "progress=None")


def _require_share(
    task: int | None, num_tasks: int | None, ray: str | None, workers: int | None, *, resume: bool
) -> None:
    if (task is None) != (num_tasks is None):
        raise InputError("got one of task and num_tasks, expected both or none", "task=0, num_tasks=1")
    if num_tasks is not None:
        whole("num_tasks", num_tasks, 1, remedy="how many tasks divide the work")
        whole("task", task, 0, num_tasks - 1, remedy=f"0 to {num_tasks - 1}")
    if task is not None and ray is not None:
        raise InputError("got a task to do and a Ray cluster, which divides the work itself", "one of the two")
    if task is not None and workers not in (None, 1):
        raise InputError(f"got {workers} workers for a task, which one process does", "more and smaller tasks")
    if task is not None and not resume:
        raise InputError("got a task to do anew, which would discard what the others do", "rm -r on the store, first")


def _crew_size(workers: int | None, request: Request) -> int:
    """No more workers than there are parts."""
    size = num_cores() if workers is None else workers
    if any(source.size is None for source in request.sources):
        return size
    return min(size, -(-request.total // part_bytes(request.total, request.options["shard_size"])))


@contextmanager
def _place(out: Path) -> Generator[None]:
    """The folder of the store, made if it is not there, and removed again if nothing came to be in it."""
    if out.exists() and not out.is_dir():
        raise InputError(f"got {out}, which is a file, as the folder of a store", f"{out}-store")
    is_ours = (out / MANIFEST).exists() or holds_work(out)
    if out.is_dir() and not is_ours and any(out.iterdir()):
        raise InputError(f"{out} holds other things than a store", "a folder that is not there yet")
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise InputError(
            f"cannot write in {out}: {error.strerror or error}{where}",
            "making room or giving access, then the same again: what is done is kept",
        ) from error
    finally:
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def _finished(out: Path, request: Request, *, resume: bool) -> TokenStore:
    """The store that is there, if it is the one asked for."""
    store = TokenStore(out)
    request = request.with_stdin(Stdin.read(None)) if request.needs_stdin else request
    changes = differences(recorded_request(out), (request.options, request.sources))
    if changes or not resume:
        why = f"that was made otherwise: {'; '.join(changes)}" if changes else "already"
        raise InputError(f"{out} holds a finished store {why}", f"another folder, or rm -r {out} first")
    tidy(out)
    return store


def _plan(out: Path, request: Request, *, resume: bool) -> tuple[Plan, Tokenizer]:
    """The plan that is there, if it is of this request; else a new one; and its tokenizer."""
    plan, chosen = read_plan(out), request.tokenizer
    if plan is not None and not resume:
        discard_plan(out)
        plan = None
    with new_plan(out) as made:
        if request.needs_stdin:
            request = request.with_stdin(Stdin.read(made))
        if plan is None:
            chosen = request.chosen_tokenizer(lambda: take_sample(request.readable(made), TRAINING_BYTES))
            write_plan(made, request.sources, request.options, chosen, request.end_of_text(chosen))
            plan = keep_plan(made)
        _require_same(plan, request)
        if (made / STDIN_FILE).exists():  # it has not become the plan's itself
            keep_stdin(made, plan)
    return plan, chosen or plan.tokenizer()


def _require_same(plan: Plan, request: Request) -> None:
    changes = differences((plan.options, plan.sources()), (request.options, request.sources))
    if changes:
        raise InputError(
            f"{plan.store} holds unfinished work of another request: {'; '.join(changes)}",
            "the same options and inputs, another folder, or resume=False (--restart), which discards that work",
        )


def _share(plan: Plan, task: int | None, num_tasks: int | None) -> list[int]:
    """The numbers of the parts to make."""
    missing = missing_parts(plan)
    if task is None or num_tasks is None:
        return missing
    note_tasks(plan, num_tasks)
    return [number for number in missing if number % num_tasks == task]


def _make(
    plan: Plan,
    numbers: list[int],
    tokenizer: Tokenizer,
    engine: EngineChoice,
    progress: Progress | None,
    crew: Crew | None,
    ray: str | None,
    size: int,
) -> None:
    if not numbers:
        return
    sweep(plan)
    sample = take_sample(plan.readable_sources(), CHECKED_BYTES)
    chosen = choose_engine(engine, tokenizer, sample.texts)
    advance = _Meter(plan, numbers, progress).advance
    if ray is not None:
        make_on_ray(ray, plan, chosen.name, numbers, advance, size)
    elif crew is not None:
        crew.make(chosen.name, numbers, advance)
    else:
        for number in numbers:
            make_part(plan, number, chosen, advance)


class _Meter:
    """Adds up the bytes that are done, those of earlier runs too."""

    def __init__(self, plan: Plan, numbers: list[int], progress: Progress | None) -> None:
        self._progress = progress
        self._total = plan.total_bytes
        left = sum((one.piece.stop or 0) - one.piece.start for number in numbers for one in plan.pieces(number))
        self._done = self._total - left
        self.advance(0)

    def advance(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)
