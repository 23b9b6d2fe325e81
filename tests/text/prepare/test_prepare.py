"""`prepare`: what is in a store, and the same store however it is made."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from locant import InputError, LocantError, RangeError, Tokenizer
from locant.text.prepare import estimate, finalize, parts, prepare
from locant.text.prepare import plan as plans
from locant.text.prepare.parts import make_part
from locant.text.prepare.plan import Plan, Request, discard_plan
from locant.text.tokenizer import engine as engines
from locant.text.tokenizer.engine import Engine
from tests.refusal import refuses
from tests.text.prepare.corpus import (
    END,
    SEPARATOR,
    TEXTS,
    contents,
    expected,
    options,
    planned,
    require_ids,
    small_blocks,
)
from tests.tolerances import ESTIMATED


def test_a_store_holds_the_documents_in_order_each_with_its_end(corpus: Path, tmp_path: Path) -> None:
    store = prepare(corpus, tmp_path / "store", **options())
    require_ids(store, TEXTS)
    assert (store.end_of_text, store.vocab_size, store.dtype) == (END, 257, np.dtype("<u2"))
    assert {*contents(tmp_path / "store")} == {
        *(f"shard-{i:05d}.{kind}" for i in range(len(store.shards)) for kind in ("bin", "idx")),
        "store.json",
        "tokenizer.json",
    }


def test_a_shard_is_closed_by_the_document_that_fills_it(corpus: Path, tmp_path: Path) -> None:
    store = prepare(corpus / "3.txt", tmp_path / "store", **options(shard_size=100))
    shards, tokens = [[]], 0
    for length in expected(TEXTS[3:])[1]:
        shards[-1].append(length)
        tokens += length
        if tokens >= 100:
            shards.append([])
            tokens = 0
    assert [len(shard) for shard in store.shards] == [sum(shard) for shard in shards if shard]


def test_a_document_that_is_read_in_parts_stays_one(tmp_path: Path) -> None:
    texts = ["short", "a long line of a document " * 400_000, "", "last"]  # ten megabytes: more than is read at once
    (tmp_path / "long.txt").write_text(SEPARATOR.join(texts))
    store = prepare(tmp_path / "long.txt", tmp_path / "store", **options(shard_size=10**6))
    lengths = [len(text) + 1 for text in texts if text]
    assert np.diff(store.documents).tolist() == lengths
    assert [len(shard) for shard in store.shards] == [lengths[0] + lengths[1], lengths[2]]
    assert bytes(store[lengths[0] : lengths[0] + lengths[1] - 1].astype(np.uint8)) == texts[1].encode()


documents = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\0\ufeff")), max_size=6)


@pytest.mark.filterwarnings("ignore:.* is likely not UTF-8")
@given(
    files=st.lists(documents, min_size=1, max_size=3),
    shard_size=st.integers(1, 60),
    smallest=st.integers(1, 40),
    ends=st.booleans(),
)
def test_any_documents_in_any_parts(
    files: list[list[str]], shard_size: int, smallest: int, ends: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    paths = [folder / f"{number}.txt" for number in range(len(files))]
    for path, texts in zip(paths, files, strict=True):
        path.write_bytes(SEPARATOR.join(texts).encode())
    wanted = [[text for text in texts if text] for texts in files]
    given = options(shard_size=shard_size, append_end_of_text=ends)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "SMALLEST_PART", smallest)
        if not any(wanted):
            with refuses(InputError, "no text"):
                prepare(paths, folder / "store", **given)
            return
        store = prepare(paths, folder / "store", **given)
    require_ids(store, wanted, END if ends else None)
    assert store.end_of_text == (END if ends else None)
    assert max(len(shard) for shard in store.shards) < shard_size + max(expected(wanted)[1])


def test_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(SEPARATOR * 3)
    with refuses(InputError, "no text"):  # to train on; where nothing is trained, see above
        prepare(tmp_path / "blank.txt", tmp_path / "other", separator=SEPARATOR)
    assert not (tmp_path / "other").exists()


def test_the_default_tokenizer_is_trained_on_all_of_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "TRAINING_BYTES", 2**18)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("north " * 100_000)  # more than the sample
    (corpus / "b.txt").write_text("south " * 20_000)
    store = prepare(corpus, tmp_path / "store", vocab_size=300, workers=1)
    assert [store.tokenizer.decode(store.tokenizer.encode(word)) for word in (" north", " south")] == [
        " north",
        " south",
    ]
    assert [len(store.tokenizer.encode(word)) for word in (" north", " south")] == [1, 1]
    again = prepare(corpus, tmp_path / "again", vocab_size=300, workers=1)
    assert contents(tmp_path / "again") == contents(tmp_path / "store")
    assert again == store


def test_an_end_of_text_needs_a_token(corpus: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.train("the cat sat on the mat " * 9, 270, special_tokens=())
    with refuses(RangeError, "without an end-of-text"):
        prepare(corpus, tmp_path / "store", tokenizer=tokenizer, append_end_of_text=True)
    assert prepare(corpus, tmp_path / "store", tokenizer=tokenizer, workers=1).end_of_text is None


def test_the_tokens_around_documents_can_be_named(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, 8)  # documents come in parts, and have one beginning
    tokenizer = Tokenizer.train("a text", 258, special_tokens=["<EOT>", "<s>"])
    assert tokenizer.end_of_text == 256
    store = prepare(
        corpus, tmp_path / "store", **options(tokenizer=tokenizer, end_of_text="<s>", begin_of_text="<EOT>")
    )
    texts = [text for texts in TEXTS for text in texts]
    expected = [number for text in texts for number in (256, *tokenizer.encode(text), 257)]
    assert store[:].tolist() == expected
    assert len(store.documents) - 1 == len(texts)
    assert store.end_of_text == 257
    with refuses(RangeError, "'<pad>' for begin_of_text", "'<EOT>', '<s>'"):
        prepare(corpus, tmp_path / "other", **options(tokenizer=tokenizer, begin_of_text="<pad>"))
    with refuses(RangeError, "no tokenizer that has this token"):
        prepare(corpus, tmp_path / "other", **options(tokenizer=None, end_of_text="<s>"))


def test_workers_tasks_and_order_do_not_matter(corpus: Path, tmp_path: Path) -> None:
    prepare(corpus, tmp_path / "one", **options())
    whole = contents(tmp_path / "one")
    prepare(corpus, tmp_path / "two", **options(workers=2))
    assert contents(tmp_path / "two") == whole
    for num_tasks in (1, 3, 40):  # more than there are parts
        out = tmp_path / f"tasks{num_tasks}"
        for task in reversed(range(num_tasks)):
            assert prepare(corpus, out, **options(task=task, num_tasks=num_tasks)) is None
        finalize(out)
        assert contents(out) == whole


def test_engines_do_not_matter(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("gigatoken")
    tokenizer = Tokenizer.train("document of some words and other words " * 9, 300)
    for engine in ("tokenizers", "gigatoken", "auto"):
        prepare(corpus, tmp_path / engine, **options(tokenizer=tokenizer, engine=engine))
    assert contents(tmp_path / "tokenizers") == contents(tmp_path / "gigatoken") == contents(tmp_path / "auto")


def test_two_that_make_the_same_parts_at_once_do_no_harm(corpus: Path, tmp_path: Path) -> None:
    prepare(corpus, tmp_path / "alone", **options())
    prepare(corpus, tmp_path / "both", **options(task=0, num_tasks=100))
    plan = planned(tmp_path / "both")
    start = threading.Barrier(3)
    errors: list[LocantError] = []

    def make() -> None:
        engine = Engine(Tokenizer.bytes())
        start.wait()
        try:
            for number in range(plan.num_parts):
                make_part(plan, number, engine, lambda _: None)
        except LocantError as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [path.name for path in plan.folder.glob("part-*.*")] == []
    finalize(tmp_path / "both")
    assert contents(tmp_path / "both") == contents(tmp_path / "alone")


def test_progress_ends_with_all_bytes(corpus: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    prepare(corpus, tmp_path / "store", **options(progress=lambda *both: seen.append(both)))
    total = sum(path.stat().st_size for path in corpus.iterdir())
    done = [now for now, _ in seen]
    assert (seen[0], seen[-1]) == ((0, total), (total, total))
    assert done == sorted(done)


def test_an_estimate_of_a_small_input_is_exact_and_writes_nothing(corpus: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    found = estimate(corpus, tokenizer="bytes", separator=SEPARATOR)
    ids, lengths = expected(TEXTS)
    assert (found.files, found.documents, found.tokens, found.exact) == (4, len(lengths), len(ids), True)
    assert (found.bytes, found.store_bytes) == (sum(path.stat().st_size for path in corpus.iterdir()), 2 * len(ids))
    assert contents(tmp_path) == before


def test_an_estimate_of_a_large_input_is_near(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(map(str, rng.integers(0, 10**9, 1 + i % 40))) for i in range(8_000)]
    (tmp_path / "large.txt").write_text(SEPARATOR.join(texts))
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "large.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    ids, lengths = expected([texts])
    for name in ("large.txt", "large.jsonl.gz"):
        found = estimate(tmp_path / name, tokenizer="bytes", separator=SEPARATOR)
        assert not found.exact
        assert found.tokens == pytest.approx(len(ids), rel=ESTIMATED, abs=0)
        assert found.documents == pytest.approx(len(lengths), rel=ESTIMATED, abs=0)


def test_an_estimate_of_a_large_document_is_near(tmp_path: Path) -> None:
    """Its reader is a block ahead of what it gives, which is not to be taken for bytes that hold no text."""
    (tmp_path / "one.txt").write_text("some words " * 400_000)
    found = estimate(tmp_path, tokenizer="bytes")
    assert (found.documents, found.exact) == (1, False)
    assert found.tokens == pytest.approx(found.bytes, rel=ESTIMATED, abs=0)


def test_an_estimate_refuses_what_can_be_read_once() -> None:
    with refuses(InputError, "standard input"):
        estimate("-")


def test_two_terabytes_are_planned_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse files: planning reads their beginnings and a sample, and would take hours if it read them whole."""
    for number in range(4):
        with (tmp_path / f"{number}.jsonl").open("wb") as file:
            file.write(b'{"text": "x"}\n' * 1000)
            file.truncate(2**39)
    plan, _ = plans.plan_for(tmp_path, Request.of(tmp_path, tokenizer="bytes", shard_size=2**24), resume=True)
    assert plan.num_parts == 2**41 // 2**26
    ranges = itertools.chain.from_iterable(plan.byte_ranges(number) for number in (0, 1, plan.num_parts - 1))
    assert [(start, stop) for _, start, stop in ranges] == [
        (0, 2**26), (2**26, 2**27), (2**39 - 2**26, 2**39)
    ]  # fmt: skip


ODD: list[dict[str, Any]] = [
    *({"workers": workers} for workers in ("2", 1.5, True, 0)),
    *({"shard_size": size} for size in ("3", None, 1.5, True, 0, 2**63)),
    *({"vocab_size": size} for size in ("300", 1.5, 256, 10**9)),
    *({"separator": text} for text in (5, b"x", "", "\ud800")),
    *({"field": field} for field in (5, "")),
    *({"tokenizer": tokenizer} for tokenizer in (5, b"x", [])),
    *({"append_end_of_text": odd} for odd in ("yes", 1)),
    *({"resume": odd} for odd in ("no", None, 1, [])),
    *({"ray": address} for address in (5, b"local", "")),
    {"progress": 5},
    {"engine": "fast"},
    {"task": 1},
    {"num_tasks": 2},
    *({"task": task, "num_tasks": 2} for task in (2, -1, 0.5)),
]
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("num_tasks", {"task": 0, "num_tasks": 10**12}),
    ("ray", {"task": 0, "num_tasks": 2, "ray": "local"}),
    ("discard", {"task": 0, "num_tasks": 2, "resume": False}),
    ("2 workers", {"task": 0, "num_tasks": 2, "workers": 2}),
    ("vocabulary size", {"tokenizer": "bytes", "vocab_size": 300}),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("one text and another")
    return tmp_path / "a.txt"


@pytest.mark.parametrize(("named", "options"), [*((next(iter(odd)), odd) for odd in ODD), *TOGETHER], ids=str)
def test_odd_options_are_refused(source: Path, tmp_path: Path, named: str, options: dict[str, Any]) -> None:
    tokenizer = {} if {"tokenizer", "vocab_size"} & options.keys() else {"tokenizer": "bytes"}
    with refuses(RangeError, named):
        prepare(source, tmp_path / "store", **tokenizer, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("paths", [None, 5, b"a.txt", [5]])
def test_odd_paths_are_refused(tmp_path: Path, paths: Any) -> None:
    with refuses(InputError, "as a path, expected str or Path"):
        prepare(paths, tmp_path / "store", tokenizer="bytes")


@pytest.mark.parametrize("out", [None, 7, "", "a\0b"])
def test_odd_folders_are_refused(source: Path, out: Any) -> None:
    with refuses(InputError, "as the folder of a store"):
        prepare(source, out, tokenizer="bytes")
    with refuses(InputError, "as the folder of a store"):
        finalize(out)


def test_standard_input_that_is_closed_is_refused(tmp_path: Path) -> None:
    command = f'"$0" -m locant prepare - -o {tmp_path / "store"} --tokenizer bytes <&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("locant: got - for standard input, which is closed")


def test_a_text_that_cannot_be_encoded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "MAX_UNCUT_BYTES", 2**20)
    (tmp_path / "long.txt").write_text("x" * 2**21)
    tokenizer = Tokenizer.train("some words", 260)
    with pytest.raises(LocantError, match=r"long\.txt, after byte 0: a document has \d+ bytes"):
        prepare(tmp_path / "long.txt", tmp_path / "store", tokenizer=tokenizer, engine="tokenizers", workers=1)


def test_the_loser_of_a_race_is_told_so(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = parts._write_range

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(parts, "_write_range", write)
        prepare(source, tmp_path / "store", tokenizer="bytes", workers=1)
        return write(*arguments)

    monkeypatch.setattr(parts, "_write_range", meanwhile)
    with pytest.raises(LocantError, match="another run has finished"):
        prepare(source, tmp_path / "store", tokenizer="bytes", workers=1)
    prepare(source, tmp_path / "store", tokenizer="bytes").verify()


def joining(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """Join a task, with something else happening when the first shard is about to move."""
    prepare(source, out, tokenizer="bytes", task=0, num_tasks=1)
    number = parts._numbering

    def numbered(plan: Plan) -> Any:
        monkeypatch.setattr(parts, "_numbering", number)
        numbers = number(plan)
        meanwhile()
        return numbers

    monkeypatch.setattr(parts, "_numbering", numbered)
    finalize(out).verify()


def test_two_that_join_the_same_parts_get_the_same_store(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining(source, tmp_path / "store", monkeypatch, lambda: finalize(tmp_path / "store"))


def test_work_that_is_discarded_while_it_is_joined_is_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refuses(InputError, "has vanished while", "--restart"):
        joining(source, tmp_path / "store", monkeypatch, lambda: discard_plan(tmp_path / "store"))


def test_a_shard_of_another_size_is_not_joined(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "store"
    with refuses(InputError, "shard-00000.bin has 3 bytes, expected 42", "--restart"):
        joining(source, out, monkeypatch, lambda: os.truncate(next(out.glob(".prepare/part-*/shard-00000.bin")), 3))
    prepare(source, out, tokenizer="bytes", workers=1, resume=False).verify()


def test_every_folder_is_flushed_before_what_relies_on_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename lasts once its folder was flushed: that of a part before it counts as done, the store's at the end."""
    flushed: list[str] = []
    monkeypatch.setattr(parts, "flush", lambda path: flushed.append(path.name))
    prepare(source, tmp_path / "store", tokenizer="bytes", workers=1, task=0, num_tasks=1)
    assert flushed == [".prepare"]
    finalize(tmp_path / "store")
    assert "store" in flushed[1:]
