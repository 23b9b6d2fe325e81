"""Entries about text on its way to token ids: special tokens spelled out, text that changes, and files that explode."""

from __future__ import annotations

import gzip
import io
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from locant.text import Tokenizer
from locant.text.prepare.byte_ranges import Tally, cut
from locant.text.prepare.readers import documents
from locant.text.prepare.sources import find_sources
from locant.text.tokenizer.engine import Engine, choose_engine
from tests.known_bugs.exhibit import exhibit
from tests.text.tokenizer.zoo import library

Encode = Callable[[bytes], list[int]]

MODEL = Tokenizer.from_json(library("byte level").to_str())
TEXT = " and ".join(MODEL.special_tokens).encode() + b" in a user's text: <|endoftext|><|endoftext|>"


def trusted(text: bytes) -> list[int]:
    return MODEL.encode(text).tolist()


def fast(text: bytes) -> list[int]:
    pytest.importorskip("gigatoken")
    return choose_engine("gigatoken", MODEL, [text]).encode([text])[0].tolist()


def in_parts(text: bytes) -> list[int]:
    """Read and encoded in parts, as a file that is larger than memory is."""
    batches = [([text[i : i + 3]], True) for i in range(0, len(text), 3)]
    return [number for encoded in Engine(MODEL).stream([*batches, ([b""], False)]) for number in encoded.ids.tolist()]


def test_84i_text_that_spells_a_special_token_is_text() -> None:
    """Text that spells a special token becomes that token.

    google-deepmind/gemma#770 (#768), vllm-project/vllm#11691, allenai/dolma#176: A user could end the text by typing
    the name of a special token. The `tokenizers` library looks for special tokens in every text, and tiktoken raises an
    error.

    Check: `tokenizer.encode("<|endoftext|>")` must have more than one id.

    Test: every spelling of every special token, on both engines.
    """

    def check(encode: Encode) -> None:
        found = {*MODEL.special_tokens.values()} & {*encode(TEXT)}
        assert not found, f"the text made the special ids {sorted(found)}"
        assert MODEL.decode_bytes(encode(TEXT)) == TEXT

    def twin(text: bytes) -> list[int]:
        return library("byte level").encode(text.decode()).ids

    exhibit(check, trusted, fast, in_parts, twin=twin, because="the text made the special ids")


STRINGS = [
    "\ud83d\ude42".encode(errors="surrogatepass"),  # a pair of surrogates, each by itself
    b"\xed\xa0\x80 lone",
    b"\x00\x00",
    b" a  b ",
    "e\u0301 ﬁ Ⅷ \u212b".encode(),  # letters that normalization would change
    "\u202eשלום\u202c \u200f".encode(),
    b"\xff\xfe\x80 caf\xe9",
    "日本🙂".encode()[:-1],
]


def test_84j_text_comes_back_byte_for_byte() -> None:
    """A tokenizer changes the text.

    google/sentencepiece#185, #908, huggingface/transformers#43459, #8886, abetlen/llama-cpp-python#1531: A space was
    put before the text, letters were normalized away, or half a surrogate crashed. Nothing stated that the tokenizer is
    not lossless.

    Check: `tokenizer.decode(tokenizer.encode(text)) == text`.

    Test: strings and bytes of every kind: exact round trip, or a tokenizer that says it is not lossless.
    """
    assert MODEL.lossless
    assert not Tokenizer.from_json(library("byte level, normalized").to_str()).lossless

    def check(encode: Encode) -> None:
        for text in STRINGS:
            found = MODEL.decode_bytes(encode(text))
            assert found == text, f"{text!r} came back as {found!r}"

    def twin(text: bytes) -> list[int]:
        return library("byte level").encode(text.decode(errors="replace")).ids

    exhibit(check, trusted, fast, in_parts, twin=twin, because="came back as")


# ------------------------------------------------------------------ files that explode

Read = Callable[[Path], Iterator[int]]

EXPLODES_TO = 16 * 2**20


def ours(path: Path) -> Iterator[int]:
    """The size of each batch."""
    for source in find_sources(path, separator="\n"):
        for byte_range in cut(source, 2**20):
            for batch in documents(byte_range, Tally()):
                yield sum(map(len, batch.texts))


def unzipped(path: Path) -> Iterator[int]:
    """The twin of each kind: the file as a whole, as the library's shortest call gives it."""
    if path.suffix == ".gz":
        yield len(zlib.decompress(path.read_bytes(), wbits=31))
    elif path.suffix == ".zst":
        yield len(pytest.importorskip("zstandard").decompress(path.read_bytes()))
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        yield sum(len(text) for text in parquet.read_table(path)["text"].to_pylist())


def bomb(folder: Path, kind: str) -> Path:
    """A file of some kilobytes that stands for 16 megabytes."""
    path = folder / f"bomb.{kind}"
    line = b"x" * 2**20
    if kind == "txt.gz":
        path.write_bytes(gzip.compress(line * 16, mtime=0))
    elif kind == "txt.zst":
        path.write_bytes(pytest.importorskip("zstandard").compress(line * 16))
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        once = arrow.DictionaryArray.from_arrays(
            arrow.array(np.zeros(16, dtype=np.int32)), arrow.array([line.decode()])
        )
        sink = io.BytesIO()
        parquet.write_table(arrow.table({"text": once}), sink, compression="zstd")
        path.write_bytes(sink.getvalue())
    assert path.stat().st_size < EXPLODES_TO / 500
    return path


@pytest.mark.parametrize("kind", ["txt.gz", "txt.zst", "parquet"])
def test_84m_a_small_file_takes_little_memory_whatever_it_stands_for(tmp_path: Path, kind: str) -> None:
    """A file of some kilobytes fills the memory.

    huggingface/safetensors `attacks/`: Compressed files of some kilobytes fill the memory of whoever opens them. The
    reader unpacked them as a whole.

    Check: Open such a file under `ulimit -v 2000000`.

    Test: bombs in gzip, zstd and Parquet, read in constant memory.
    """
    path = bomb(tmp_path, kind)

    def check(read: Read) -> None:
        tracemalloc.start()
        try:
            sizes = [*read(path)]
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert sum(sizes) == EXPLODES_TO
        assert peak < EXPLODES_TO / 2, f"{path.stat().st_size} bytes took {peak} of memory"

    exhibit(check, ours, twin=unzipped, because="bytes took")
