"""`prepare`: encode files of text into a token store, in steps that can be resumed.

`prepare` plans the work, makes the missing parts, and joins all parts. Parts are made in this process, by workers, on a
Ray cluster, or by tasks on other machines. The store depends only on the inputs and on the options that decide its
content.

**Ctrl-C** (on the command line also SIGTERM and SIGHUP) raises `KeyboardInterrupt` only in the main thread of the
calling process. `prepare` cleans up and raises it again, with a note that says how to continue.

* During planning, nothing is left, not even the folder of the store if this call made it.
* While parts are made, finished parts are kept. In this process the error is raised after a block is encoded
  (`sources.BLOCK`). Workers, which do not receive the signal, are killed. A Ray cluster that this call started is
  stopped.
* While parts are joined, the next call joins the rest.

A second Ctrl-C, or a kill, leaves at most folders that the next call removes (`locant.text.prepare.plan`), and workers
that end by themselves when their input ends.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Unpack, get_args, overload

from locant.arguments import flag, one_of, short_repr, whole
from locant.errors import InputError, RangeError, Remedy
from locant.shell import shell_path
from locant.text.prepare.byte_ranges import Source
from locant.text.prepare.parts import RECORDED_COUNTS, Advance, join, make_part, missing_parts, sweep_parts, tidy
from locant.text.prepare.plan import (
    FOLDER,
    MAX_LISTED,
    SHARD_SIZE,
    ContentOptions,
    Plan,
    Request,
    cannot_write,
    part_bytes,
    plan_for,
    store_folder,
)
from locant.text.prepare.sample import CHECKED_BYTES, TRAINING_BYTES, take_sample
from locant.text.prepare.sources import ARCHIVES, SUFFIXES, Paths, spelled_counts
from locant.text.prepare.workers import LOCAL, Workers, make_on_ray, num_cores
from locant.text.store import MANIFEST, TokenStore, token_dtype
from locant.text.tokenizer import Tokenizer
from locant.text.tokenizer.engine import Engine, EngineChoice, EngineName, choose_engine

BYTES_PER_WORKER = 128 * 2**20
"""The bytes of input for each worker. In one process the engines use all cores already, and a worker takes seconds to
start and to load the tokenizer. On two cores, two workers took 1.4 to 1.5 times as long as one process for 90 MB.
By extrapolation from these times and times for less input, two workers are as fast as one process at about 300 MB."""

Progress = Callable[[int, int], None]
"""A function that is called with the number of finished bytes of the input, and their total number."""


class _Options(ContentOptions, total=False):
    """The options of `prepare` except `task` and `num_tasks`."""

    workers: int | None
    resume: bool
    engine: EngineChoice
    ray: str | None
    progress: Progress | None


@overload
def prepare(paths: Paths, out: str | Path, **options: Unpack[_Options]) -> TokenStore: ...


@overload
def prepare(paths: Paths, out: str | Path, *, task: int, num_tasks: int, **options: Unpack[_Options]) -> None: ...


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
    encoding: str | None = None,
    skip_bad: bool = False,
    end_of_text: str | None = None,
    begin_of_text: str | None = None,
) -> TokenStore | None:
    """Encode texts into a token store. Repeat an interrupted call to continue it.

    A finished store is never changed: the same call returns it, and any other call raises an error. If files have
    changed since an interrupted call, only the parts that read them are made again. If `out` has unfinished work of a
    call with other options, another tokenizer or other files, the call raises an error. ``resume=False`` discards such
    work.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("a", "b"):
    ...     _ = (folder / f"{name}.txt").write_text(f"the text of {name}")
    >>> store = prepare(folder, folder / "store", tokenizer="bytes")
    >>> len(store), store.documents, store.tokenizer.decode(store[:14])
    (28, array([ 0, 14, 28]), 'the text of a<|endoftext|>')

    Args:
        paths: files (.txt, .md, .jsonl, .jsonlines, .ndjson, .json with one record per line, .parquet, each also .gz,
            .zst, .bz2 or .xz), folders, globs, and ``-`` for standard input. A warning counts the files of folders and
            globs that are left out because of their endings.
        out: the folder of the store.
        tokenizer: a tokenizer, or an argument of `Tokenizer.load`, or ``"bytes"``. Default: a byte-level BPE trained
            on a sample of the input.
        workers: number of processes. Default: one for each 128 MiB of input, at most one for each core. With one
            worker, and for a task, this process does the work, with all cores.
        resume: continue unfinished work in `out`.
        shard_size: a shard is closed after the document that brings it to this number of tokens, or earlier, because
            a large input is cut into at least 64 parts with separate shards.
        vocab_size: size of the vocabulary of a trained tokenizer. Default: 32 768.
        separator: the text between the documents of a text file. Default: a file is one document.
        field: the key (.jsonl) or column (.parquet) of the text. Default: text. With a field, standard input is JSON
            lines.
        append_end_of_text: put the tokenizer's end-of-text id after every document. Default: True if it exists.
        engine: the library that encodes. All give the same ids. ``"auto"`` uses the fast one if it is installed and
            its ids are equal on a sample of the input.
        task, num_tasks: do only this share of the work, and return ``None``. Tasks may run at the same time, on
            machines that share the folder, and `finalize` joins their results.
        ray: do the work on a Ray cluster with this address, or ``"local"`` for one on this machine.
        progress: a function that is called with the number of finished bytes of the input, and their total number.
        encoding: the encoding of text and JSON lines, such as ``"cp1252"``. Default: UTF-8. A byte order mark decides
            the encoding of its file. A file that is likely in another encoding gives a warning.
        skip_bad: skip bad input, and warn with the number of skipped records (`problems`). Bad input means lines that
            are not JSON or have no text in the field, documents that are too long for the tokenizer, and broken files.
            All input is then read twice.
        end_of_text: the token to put after every document, such as ``"<|im_end|>"``. Default: found by its usual
            spellings.
        begin_of_text: the token to put before every document, such as ``"<s>"``. Default: none.

    Raises:
        InputError: an input cannot be read or changes during the call, `out` has a store or unfinished work of another
            request, the disk is full, or a worker was killed.
        RangeError: an argument is out of range, or contradicts another one.
    """
    out = store_folder(out)
    flag("resume", resume)
    one_of("engine", engine, ("auto", *get_args(EngineName)))
    _require_sense(workers, task, num_tasks, ray, progress, resume)
    request = Request.of(
        paths,
        tokenizer=tokenizer,
        shard_size=shard_size,
        vocab_size=vocab_size,
        separator=separator,
        field=field,
        append_end_of_text=append_end_of_text,
        encoding=encoding,
        skip_bad=skip_bad,
        end_of_text=end_of_text,
        begin_of_text=begin_of_text,
    )
    _warn_of_left_out(request)
    num_workers = 1
    if task is None:
        num_workers = workers or (default_workers(request) if ray is None else num_cores())
        if not request.needs_stdin:  # at most one worker for each part
            size = part_bytes(request.total_bytes, request.options["shard_size"])
            num_workers = min(num_workers, -(-request.total_bytes // size))
    with _folder(out):
        if (out / MANIFEST).exists():
            store = _finished_store(out, request, resume=resume)
            return store if task is None else None
        with closing(Workers(num_workers)) if num_workers > 1 and ray is None else nullcontext() as processes:
            plan, tokenizer = plan_for(out, request, resume=resume)
            parts = missing_parts(plan)
            if task is not None and num_tasks is not None:
                (plan.folder / f"tasks-{num_tasks}").touch()  # so that errors can name missing tasks
                parts = [number for number in parts if number % num_tasks == task]
            if parts:
                sweep_parts(plan)
                if processes is not None:
                    processes.load(out)
                sample = take_sample(plan.sources(), CHECKED_BYTES, skip_bad=skip_bad)
                encoder = choose_engine(engine, tokenizer, sample.texts)
                advance = _meter(plan, parts, progress)
                if ray is not None:
                    make_on_ray(ray, plan, encoder.name, parts, advance, num_workers)
                elif processes is not None:
                    processes.make(encoder.name, parts, advance)
                else:
                    for number in parts:
                        make_part(plan, number, encoder, advance)
        if task is not None:
            return None
        store = join(plan, tokenizer)
    for message in problems(store).messages():
        warnings.warn(message, stacklevel=2)
    return store


@dataclass(frozen=True, kw_only=True)
class Problems:
    """The numbers of problems in the inputs of a store, by the paths of the files."""

    skipped: dict[str, int]
    """Lines, documents and whole files that were skipped."""
    not_utf8: dict[str, int]
    """Documents with bytes that their encoding does not define."""

    def messages(self) -> list[str]:
        """Return a line for each kind of problem that occurred."""
        kinds = (
            (self.skipped, "bad record", "skipped"),
            (self.not_utf8, "document", "read with replacement characters for bytes that its encoding does not define"),
        )
        return [
            f"{total} {noun}{'s' * (total != 1)} {'were' if total != 1 else 'was'} {what}: {_by_file(counts)}"
            for counts, noun, what in kinds
            if (total := sum(counts.values()))
        ]


def _by_file(counts: dict[str, int]) -> str:
    worst = sorted(counts, key=lambda path: -counts[path])
    more = [f"{len(worst) - MAX_LISTED} more files"] if len(worst) > MAX_LISTED else []
    return ", ".join([*(f"{path} ({counts[path]})" for path in worst[:MAX_LISTED]), *more])


def problems(store: TokenStore) -> Problems:
    """Return the problems that `prepare` counted when it made a store."""
    problems_by_kind: dict[str, dict[str, int]] = {name: {} for name in RECORDED_COUNTS}
    for source in store.manifest.sources:
        for name, counts in problems_by_kind.items():
            if total := sum(piece.get(name, 0) for piece in source.get("pieces", [])):
                counts[source["path"]] = total
    return Problems(**problems_by_kind)


def _warn_of_left_out(request: Request) -> None:
    if request.left_out:
        total = sum(request.left_out.values())
        counts = spelled_counts(Counter(request.left_out))
        what = f"{total} file{'s' * (total != 1)} left out: {counts}"
        archives = ". Unpack archives first" if request.left_out.keys() & ARCHIVES.keys() else ""
        warnings.warn(f"{what}. The names of files that are read end in {SUFFIXES}{archives}", stacklevel=3)


def default_workers(request: Request) -> int:
    """Return the default number of processes: one for each `BYTES_PER_WORKER`, at most one for each core."""
    if request.needs_stdin:  # its size is not known yet
        return num_cores()
    return max(1, min(num_cores(), request.total_bytes // BYTES_PER_WORKER))


def _require_sense(
    workers: object, task: int | None, num_tasks: int | None, ray: object, progress: object, resume: bool
) -> None:
    if workers is not None:
        whole("workers", workers, 1, 4096, remedy=Remedy(workers=1))
    if ray is not None and not (isinstance(ray, str) and ray):
        raise RangeError(
            f"got {short_repr(ray)} for ray, expected the address of a cluster", Remedy("pass {}, or None", ray=LOCAL)
        )
    if progress is not None and not callable(progress):
        raise RangeError(
            f"got {short_repr(progress)} for progress, expected a function of two numbers", "progress=None"
        )
    if task is None and num_tasks is None:
        return
    if task is None or num_tasks is None:
        raise RangeError(
            "got one of task and num_tasks, expected both or none", Remedy("pass {}, {}", task=0, num_tasks=1)
        )
    whole("num_tasks", num_tasks, 1, remedy=Remedy(num_tasks=1))
    whole("task", task, 0, num_tasks - 1, remedy=Remedy(task=num_tasks - 1))
    if ray is not None:
        raise RangeError("got a task and ray, but a cluster divides the work itself", Remedy(ray=None))
    if workers not in (None, 1):
        raise RangeError(f"got {workers} workers for a task, which one process does", "use more and smaller tasks")
    if not resume:
        cause = "got resume=False for a task, which would discard the work of other tasks"
        raise RangeError(cause, "remove the store with rm -r first")


@contextmanager
def _folder(out: Path) -> Generator[None]:
    """Make the folder of the store if it does not exist, and remove a new folder if it stays empty.

    If it has content after Ctrl-C, a note says how to continue.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"got {out}, which is a file, as the folder of a store", f"use {out}-store")
    is_ours = (out / MANIFEST).exists() or (out / FOLDER).exists() or any(out.glob(f"{FOLDER}.*"))
    if out.is_dir() and not is_ours and any(out.iterdir()):
        raise InputError(f"{out} holds other things than a store", "use a folder that does not exist yet")
    new = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        try:
            out.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            raise cannot_write(f"write in {out}", error) from error
        finally:
            for folder in new:
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
    except KeyboardInterrupt as interrupt:
        if out.exists():
            interrupt.add_note(f"stopped: run the same command again to continue; finished work is kept in {out}")
        raise


def _finished_store(out: Path, request: Request, *, resume: bool) -> TokenStore:
    """Return the finished store if it is the requested one, else raise `InputError`."""
    store = TokenStore(out)
    request = request.with_stdin(None) if request.needs_stdin else request
    sources = [{**source} for source in store.manifest.sources]
    recorded = {field.name for field in fields(Source)} - {"copy", "encoding"}
    if any(source.pop("pieces", None) is None or source.keys() - {"encoding"} != recorded for source in sources):
        raise InputError(f"{out} holds a finished store that prepare did not make", "use another folder")
    changes = request.changes_from(store.manifest.options, [Source(**source) for source in sources])
    if not request.skip_bad and (skipped := problems(store).skipped):
        changes.append(f"{sum(skipped.values())} bad records were skipped, which would now end the run")
    if changes or not resume:
        why = f"of another request: {'; '.join(changes)}" if changes else "already"
        raise InputError(f"{out} holds a finished store {why}", f"use another folder, or rm -r {shell_path(out)} first")
    tidy(out)
    return store


def _meter(plan: Plan, parts: Sequence[int], progress: Progress | None) -> Advance:
    """Return a function that adds up the finished bytes, including earlier runs, and reports them."""
    total = plan.total_bytes
    done = total - sum(stop - start for number in parts for _, start, stop in plan.byte_ranges(number))

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(min(done, total), total)

    advance(0)
    return advance


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The input that `prepare` would read (in bytes on disk) and its result (in tokens, with end-of-text ids).

    It is `exact` if the encoded sample was the whole input.
    """

    files: int
    bytes: int
    documents: int
    tokens: int
    store_bytes: int
    exact: bool
    left_out: Mapping[str, int]
    """The number of files of folders and globs that are not read, by the ends of their names."""
    workers: int
    """The number of processes that `prepare` would use by default."""

    def __str__(self) -> str:
        about = "" if self.exact else "about "
        content = {"document": self.documents, "token": self.tokens, "byte": self.store_bytes}
        counts = ", ".join(f"{about}{number:,} {noun}{'s' * (number != 1)}" for noun, number in content.items())
        files = f"{self.files:,} file{'s' * (self.files != 1)} of {self.bytes:,} byte{'s' * (self.bytes != 1)}"
        return f"{files}: {counts} in the store; {self.workers} worker{'s' * (self.workers != 1)} by default"


def estimate(paths: Paths, **options: Unpack[ContentOptions]) -> Estimate:
    """Estimate the result of `prepare` with the same `tokenizer`, `vocab_size`, `separator`, ... without writing it.

    Raises:
        InputError: as for `prepare`, and for standard input, which can be read only once.
    """
    request = Request.of(paths, **options)
    if request.needs_stdin:
        raise InputError("got standard input, which a dry run would use up", "use a file")
    _warn_of_left_out(request)
    size = CHECKED_BYTES if request.tokenizer else TRAINING_BYTES
    sample = take_sample(request.sources, size, skip_bad=request.skip_bad)
    tokenizer = request.chosen_tokenizer(sample)
    documents = sample.all_documents(request.sources)
    tokens = len(Engine(tokenizer).encode(sample.texts)[0])
    if not sample.is_all and sample.size:
        tokens = round(tokens / sample.size * sample.bytes_unpacked / sample.bytes_read * request.total_bytes)
    around = (request.end_of_text(tokenizer), request.options.get("begin_of_text"))
    tokens += documents * sum(number is not None for number in around)
    return Estimate(
        files=len(request.sources),
        bytes=request.total_bytes,
        documents=documents,
        tokens=tokens,
        store_bytes=tokens * token_dtype(tokenizer.vocab_size).itemsize,
        exact=sample.is_all,
        left_out=request.left_out,
        workers=default_workers(request),
    )
