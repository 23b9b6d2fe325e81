"""A forger repairs the hashes: what he writes is refused, or contradicts nothing.

No manifest names a file, so none can lead out of its folder.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from locant import InputError
from locant.text.store import TokenStore
from locant.text.store.formats.shards import read_index
from tests.refusal import refuses
from tests.text.store.made import TOKENS, holding, index_of, is_found, mutated, overwrite

INDEX = "shard-00000.idx"


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_forged_index_is_refused_or_consistent(folder: Path, tmp_path: Path, count: int) -> None:
    """`read_index` knows no hash, so this is its own suspicion; it never takes twice the memory of the file."""
    path, rng = tmp_path / "forged.idx", random.Random(0)
    path.touch()
    content = (folder / INDEX).read_bytes()
    sound = read_index(folder / INDEX)
    accepted = 0
    tracemalloc.start()
    for _ in range(count):
        forged = mutated(content, rng)
        overwrite(path, forged)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            index = read_index(path)
        except InputError:
            continue
        finally:
            assert tracemalloc.get_traced_memory()[1] - before < 2 * len(forged) + 20_000
        accepted += 1
        # It describes some other shard, and does not contradict itself.
        assert index.offsets[0] == 0
        assert index.offsets[-1] == index.sequences.sum(dtype=np.int64)
        assert (np.diff(index.offsets) >= 0).all()
        if len(forged) == len(content) and forged[18:] == content[18:]:
            assert index.sequences.tolist() == sound.sequences.tolist()
    tracemalloc.stop()
    assert accepted < count / 10


def test_a_large_index_takes_less_than_twice_its_size(tmp_path: Path) -> None:
    n = 200_000
    lengths = np.arange(n, dtype="<i4") % 50
    pointers = np.concatenate([[0], np.cumsum(2 * lengths[:-1].astype("<i8"))])
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, n, n + 1)
    (tmp_path / "a.idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + np.arange(n + 1).tobytes())
    size = (tmp_path / "a.idx").stat().st_size
    tracemalloc.start()
    offsets = read_index(tmp_path / "a.idx").offsets
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert offsets[-1] == lengths.sum()
    assert peak < 2 * size


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (0, b"X", "begins with"), (9, b"\x02", "version 2"), (17, b"\x06", "code 6"), (17, b"\x09", "code 9"),
        (18, struct.pack("<Q", 2**61), "sequences and"), (18, struct.pack("<Q", 2**64 - 1), "sequences and"),
        (26, struct.pack("<Q", 2**61 + 4), "sequences and"), (26, struct.pack("<Q", 0), "sequences and"),
        (34, struct.pack("<i", -1), "negative"), (34, struct.pack("<i", 4), "overlap"),
        (46, struct.pack("<q", 2), "overlap"), (54, struct.pack("<q", 2**62), "overlap"),
        (70, struct.pack("<q", 1), "do not cover"), (78, struct.pack("<q", 3), "not in order"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_in_an_index(
    folder: Path, tmp_path: Path, place: int, value: bytes, words: str
) -> None:
    content = bytearray((folder / INDEX).read_bytes())
    assert len(content) == 34 + 4 * 3 + 8 * 3 + 8 * 4
    content[place : place + len(value)] = value
    path = tmp_path / "a.idx"
    path.write_bytes(content)
    with refuses(InputError, "not an intact index", words):
        read_index(path)


@pytest.mark.parametrize(
    ("content", "repaired", "words"),
    [
        (index_of([3, 0, 1]), False, None),
        (index_of([3, 1, 0]), False, "was changed"),  # as many documents and tokens, and other boundaries
        (index_of([3, 0, 2]), True, "not the index of its shard"),
        (index_of([3, 0, 1], code=3), True, "not the index of its shard"),
        (index_of([3, 0, 1], documents=[0, 0, 2, 3]), True, "not the index of its shard"),
    ],
)
def test_a_sound_index_of_another_shard(folder: Path, content: bytes, repaired: bool, words: str | None) -> None:
    manifest = (folder / "store.json").read_bytes()
    if repaired:
        old, new = (hashlib.sha256(part).hexdigest() for part in ((folder / INDEX).read_bytes(), content))
        manifest = forged(body_of(folder).replace(old, new))
    with holding(folder / INDEX, content), holding(folder / "store.json", manifest):
        store = TokenStore(folder)
        if words is None:
            store.verify()
        else:
            with refuses(InputError, INDEX, words):
                store.verify()
            if repaired:
                with refuses(InputError, INDEX, words):
                    _ = store.documents


def forged(text: str) -> bytes:
    """A manifest with this body and the right hash."""
    body = text.encode()
    return body + f',\n "sha256": "{hashlib.sha256(body).hexdigest()}",\n "complete": true\n}}\n'.encode()


def body_of(folder: Path) -> str:
    return (folder / "store.json").read_text().partition(',\n "sha256"')[0]


def rendered(fields: dict[str, Any]) -> bytes:
    rest = {name: value for name, value in fields.items() if name not in ("sha256", "complete")}
    return forged("{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in rest.items()))


LEAVES: list[Any] = [
    None, True, False, -1, 0, 1, 2.0, 1e999, 2**31, 2**63 - 1, 2**63, 10**30, "", "1", "../../etc/passwd",
    [], [[]], {}, {"size": 1}, [1], ["0" * 64] * 5, [2**62] * 5, [-1] * 5, [True] * 5, [1.0] * 5, ["../x" + "0" * 60],
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []:
        yield from places(value[key], (*path, key))


def test_no_field_of_a_forged_manifest_crashes(folder: Path) -> None:
    """Every field in turn removed, and replaced by everything else: refused, or the store reads the same."""
    sound = (folder / "store.json").read_text()
    free = ("package", "options", "sources", "end_of_text", "end_of_text_appended")
    for path in places(json.loads(sound)):
        for leaf in [KeyError, *LEAVES]:
            fields = json.loads(sound)
            holder = fields
            for key in path[:-1]:
                holder = holder[key]
            if leaf is KeyError:
                del holder[path[-1]]
            elif holder[path[-1]] == leaf and type(holder[path[-1]]) is type(leaf):
                continue
            else:
                holder[path[-1]] = leaf
            with holding(folder / "store.json", rendered(fields)):
                found = is_found(folder)
                assert found or path[0] in (*free, "sha256", "complete"), (path, leaf)
                if not found:
                    assert TokenStore(folder)[:].tolist() == TOKENS.tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body + ',\n "vocab_size": 257', "occurs twice"),
        (lambda body: body.replace('"options": {', '"options": {"a": 1, "a": 2, "b": '), "not JSON"),
        (lambda body: body.replace('"a": [1]', '"a": 1, "a": 2'), "occurs twice"),
        (lambda body: body.replace('"a": [1]', '"a": NaN'), "NaN"),
        (lambda body: body.replace('"a": [1]', '"a": -Infinity'), "Infinity"),
        (lambda body: body.replace('"a": [1]', '"a": ' + "[" * 100_000 + "]" * 100_000), "not JSON"),
        (lambda body: body.replace('"a": [1]', '"a": ' + "9" * 10_000), "not JSON"),
        (lambda body: body.replace('"a": [1]', '"a": [1'), "not JSON"),
        (lambda body: body.replace("uint16", "int32"), "need uint16"),
        (lambda body: body.replace("uint16", "float64"), "need uint16"),
        (lambda body: body.replace('"vocab_size": 257', '"vocab_size": 0'), "vocabulary of 0"),
        (lambda body: body.replace('"vocab_size": 257', '"vocab_size": 4294967296'), "vocabulary of 4294967296"),
        (lambda body: body.replace('"end_of_text": 256', '"end_of_text": 257'), "end_of_text is 257"),
        (lambda body: body.replace('"tokens": 13', '"tokens": 14'), "its shards have 13"),
        (lambda body: body.replace('"documents": 8', '"documents": 7'), "its shards have 8"),
        (lambda body: body.replace('"tokens": [4, 0', '"tokens": [0, 4'), "do not fit"),
    ],
)  # fmt: skip
def test_what_a_forged_manifest_may_not_say(folder: Path, change: Callable[[str], str], words: str) -> None:
    body = body_of(folder)
    assert change(body) != body
    with holding(folder / "store.json", forged(change(body))), refuses(InputError, "not an intact manifest", words):
        TokenStore(folder)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ('[{"path": "a.txt", "path": "b.txt"}]', "occurs twice"), ('[{"size": NaN}]', "NaN"),
        ('[{"size": 9}', "not JSON"), ("[5]", "not a list of objects"), ('{"path": "a.txt"}', "not a list of objects"),
        ('[],\n "shards": {},\n "sources": []', "occurs twice"),
    ],
)  # fmt: skip
def test_what_forged_sources_say_is_refused_by_whoever_asks_for_them(folder: Path, value: str, words: str) -> None:
    body = body_of(folder)
    begin, end = body.index('\n "sources": ') + len('\n "sources": '), body.index(',\n "shards": ')
    with holding(folder / "store.json", forged(body[:begin] + value + body[end:])):
        assert is_found(folder)
        with refuses(InputError, "not an intact manifest", words):
            _ = TokenStore(folder).manifest.sources


def test_sources_of_a_manifest_in_another_spelling_are_read(folder: Path) -> None:
    """JSON is the same however it is laid out, so a store whose manifest is on few lines opens too."""
    fields = json.loads(body_of(folder) + "}")
    for separators in ((",", ":"), (", ", ": ")):
        rest = {name: value for name, value in fields.items() if name not in ("schema", "version")}
        text = json.dumps(rest, separators=separators)[1:-1]
        body = '{\n "schema": "locant token store",\n "version": 1,\n' + text
        with holding(folder / "store.json", forged(body)):
            store = TokenStore(folder)
            store.verify()
            assert store.manifest.sources == [{"path": "a.txt", "size": 9}]


def test_sources_of_a_store_that_was_written_anew_are_refused(folder: Path) -> None:
    store, again = TokenStore(folder), TokenStore(folder)
    assert again.manifest.sources == [{"path": "a.txt", "size": 9}]
    with holding(folder / "store.json", forged(body_of(folder).replace("a.txt", "b.txt"))):
        with refuses(InputError, "was rewritten", "open it again"):
            _ = store.manifest.sources
        assert again.manifest.sources == [{"path": "a.txt", "size": 9}], "what was read is kept"
    assert store.manifest.sources == again.manifest.sources


def test_a_vocabulary_that_the_ids_exceed_is_found(folder: Path) -> None:
    """Hashes only show that nothing changed; ids are read as well."""
    bin_path = folder / "shard-00004.bin"
    data = np.array([9, 300, 255], dtype="<u2").tobytes()
    old, new = (hashlib.sha256(part).hexdigest() for part in (bin_path.read_bytes(), data))
    manifest = forged(body_of(folder).replace(old, new))
    with holding(bin_path, data), holding(folder / "store.json", manifest):
        store = TokenStore(folder)
        with refuses(InputError, "id 300 at place 1", "shard-00004.bin"):
            store.verify()


def test_a_tokenizer_that_is_no_utf_8_is_found(folder: Path) -> None:
    path = folder / "tokenizer.json"
    old, new = path.read_bytes(), path.read_bytes().replace(b"ByteLevel", b"Byte\xffevel", 1)
    manifest = forged(body_of(folder).replace(*(hashlib.sha256(content).hexdigest() for content in (old, new))))
    with holding(path, new), holding(folder / "store.json", manifest):
        store = TokenStore(folder)
        for read in (store.verify, lambda: store.tokenizer):
            with refuses(InputError, "tokenizer.json"):
                read()


def test_a_later_version_is_refused_with_the_remedy(folder: Path) -> None:
    for version in (2, 10, 999_999_999):
        text = (folder / "store.json").read_text().replace('"version": 1', f'"version": {version}')
        with holding(folder / "store.json", text.encode()), refuses(InputError, f"version {version}", "pip install"):
            TokenStore(folder)
