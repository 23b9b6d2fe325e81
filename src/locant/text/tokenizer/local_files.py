"""Find a tokenizer by path or by name, in files, in local caches, and on the network only if the caller allows it.

A name such as ``gpt2`` or ``someone/something`` is looked up in the cache of the Hugging Face libraries, then in the
cache of `tiktoken`, which keeps each of OpenAI's encodings under the SHA-1 of its address. This file holds ranks: the
bytes of every token, in the order of the merges. A `tokenizer.json` holds merges instead. So each token is replaced by
all pairs of tokens that form it, which gives the same ids. Reading a file of ranks takes one to a few
seconds. A folder may also hold GPT-2's two files as OpenAI published them, or a SentencePiece model, which
`transformers` converts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from locant.arguments import short_repr
from locant.errors import InputError, Remedy
from locant.extras import is_installed, require
from locant.files import FaultError, strict_json
from locant.gguf_file import find_gguf, open_gguf
from locant.text.reading import read_texts
from locant.text.tokenizer.definition import (
    BYTE_SPELLING,
    CONTRACTION,
    END_OF_TEXT,
    LOWER,
    UPPER,
    byte_level,
    library_errors,
)

HOST = "https://openaipublic.blob.core.windows.net/"  # part of the name of a cached file; nothing is fetched


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """One encoding of OpenAI: the files of ranks, the pattern that splits text into words, and the special tokens."""

    files: dict[str, str]
    """The address of each file, below `HOST`, and its SHA-256."""
    pattern: str | None = None
    """``None`` means the pattern of GPT-2, which is built into the library."""
    special_tokens: dict[str, int] = field(default_factory=dict)


_GPT2 = Encoding(
    files={
        "encodings/r50k_base.tiktoken": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
        "gpt-2/encodings/main/vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    },
    special_tokens={END_OF_TEXT: 50256},
)

# The patterns of cl100k_base and o200k_base that OpenAI published, adapted to the library's regular expressions
# (Oniguruma). In these, possessive quantifiers mean something else, and the end of the text is \z, not $.

ENCODINGS: dict[str, Encoding] = {
    "gpt2": _GPT2,
    "r50k_base": _GPT2,
    "cl100k_base": Encoding(
        files={"encodings/cl100k_base.tiktoken": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"},
        pattern=CONTRACTION
        + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        + r"|\s+\z|\s*[\r\n]|\s+(?!\S)|\s",
        special_tokens={
            END_OF_TEXT: 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k_base": Encoding(
        files={"encodings/o200k_base.tiktoken": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"},
        pattern=(
            rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}?"
            rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}?"
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        special_tokens={END_OF_TEXT: 199999, "<|endofprompt|>": 200018},
    ),
}


def tiktoken_cache() -> Path | None:
    """Return the cache folder of `tiktoken`, or ``None`` if its cache is turned off."""
    for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if name in os.environ:
            return Path(os.environ[name]) if os.environ[name] else None
    return Path(tempfile.gettempdir()) / "data-gym-cache"


def cached_encoding(name: str) -> dict[str, Any] | None:
    """Return the definition of an encoding, or ``None`` if it is unknown or the cache does not have its file."""
    folder = tiktoken_cache()
    if name not in ENCODINGS or folder is None:
        return None
    encoding = ENCODINGS[name]
    for published, sha256 in encoding.files.items():
        path = folder / cached_name(published)
        if path.is_file():
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != sha256:
                cause = f"{path} is not {published} as it was published"
                raise InputError(cause, "delete it, and call tiktoken.get_encoding to download it again")
            if published.endswith(".bpe"):  # GPT-2's merges: the bytes come first, printable ones before the others
                byte = {letter: bytes([number]) for number, letter in enumerate(BYTE_SPELLING)}
                merges = [line for line in data.decode().split("\n")[1:] if line]
                longer = [b"".join(byte[letter] for letter in line.replace(" ", "")) for line in merges]
                ranks = {
                    token: rank for rank, token in enumerate([*(byte[letter] for letter in sorted(byte)), *longer])
                }
            else:  # each line has a token in base 64 and its rank
                pairs = (line.split() for line in data.splitlines() if line)
                ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
            return _definition(ranks, encoding)
    return None


def cached_name(published: str) -> str:
    """Return the name under which `tiktoken` keeps a file."""
    return hashlib.sha1((HOST + published).encode(), usedforsecurity=False).hexdigest()


def _definition(ranks: dict[bytes, int], encoding: Encoding) -> dict[str, Any]:
    """Return a `tokenizer.json` with the tokens that merge, and the special tokens. All tokens keep their ids."""
    spelled = {token: "".join(BYTE_SPELLING[byte] for byte in token) for token in ranks}
    regex = encoding.pattern
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": regex is None}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    by_rank = sorted(ranks, key=ranks.__getitem__)
    splits = ((token[:cut], token[cut:]) for token in by_rank for cut in range(1, len(token)))
    model = {
        "type": "BPE",
        "ignore_merges": True,  # a word that is a token becomes this token, even if its merges would give others
        "vocab": {spelled[token]: rank for token, rank in ranks.items()} | encoding.special_tokens,
        "merges": [[spelled[left], spelled[right]] for left, right in splits if left in ranks and right in ranks],
    }
    return byte_level(level, encoding.special_tokens, model, None if regex is None else split)


FILE = "tokenizer.json"
GPT2_FILES = ("encoder.json", "vocab.bpe")
"""The file of spellings and ids, and the file of merges. A folder with these files is read if it has no `FILE`."""
SENTENCEPIECE_FILE = "tokenizer.model"
"""A folder with this file, or a file with this suffix, is read if `transformers` can convert it."""
CONVERSION_ERRORS = (
    "ValueError",
    "OSError",
    "RuntimeError",
    "DecodeError",
    "AttributeError",
    "TypeError",
    "ImportError",
)
GGUF_ERRORS = (*CONVERSION_ERRORS, "KeyError", "IndexError", "NotImplementedError", "Exception")
REMEDY = Remedy(f"pass the path of a {FILE}, {{}}, or a tokenizer trained on your own text", download=True)

TIMEOUT = 5.0
"""Seconds to wait for the hub."""

BOUNDLESS_BPE = (b"word v1", b"BoundlessBPE v2")
"""The first words of the files of the two implementations, boundlessbpe and fastboundlessbpe (kensho-technologies)."""

# The first models of the hub had a name without an owner. These accounts hold them now.
_FIRST_OWNERS = ("openai-community", "google-bert", "FacebookAI", "google-t5", "distilbert", "albert", "xlnet")


def find_tokenizer(path_or_name: str | Path, *, download: bool) -> tuple[str, str]:
    """Return the text of a `tokenizer.json`, and the place where it was found."""
    if not isinstance(path_or_name, (str, Path)):
        raise InputError(f"got {short_repr(path_or_name)} as a tokenizer, expected a path or a name", REMEDY)
    path = Path(path_or_name)
    if str(path_or_name) and os.path.exists(path):  # noqa: PTH110  # it accepts names that cannot be paths
        if path.is_dir() and not (path / FILE).is_file():
            if all((path / name).is_file() for name in GPT2_FILES):
                return _from_gpt2(path)
            if (path / SENTENCEPIECE_FILE).is_file():
                return _from_sentencepiece(path)
            if (gguf := find_gguf(path)) is not None:
                return _from_gguf(gguf)
            cause = f"got the folder {path}, which holds no {FILE}"
            remedy = f"pass the path of a {FILE}, or a folder with one, or with {' and '.join(GPT2_FILES)}"
            raise InputError(cause, remedy)
        if path.is_file() and (gguf := find_gguf(path)) is not None:
            return _from_gguf(gguf)
        if path.suffix == ".model" and path.is_file():
            with tempfile.TemporaryDirectory() as folder:
                shutil.copyfile(path, Path(folder) / SENTENCEPIECE_FILE)
                return _from_sentencepiece(Path(folder), path)
        return _read(path / FILE if path.is_dir() else path)
    name = str(path_or_name)
    if isinstance(path_or_name, str) and name:
        if (cached := _in_hub_cache(name)) is not None:
            return _read(cached)
        if (definition := cached_encoding(name)) is not None:
            return json.dumps(definition), f"{name} in tiktoken's cache"
        if download:
            return _read(_download(name))
    from huggingface_hub.constants import HF_HUB_CACHE

    places = f"{HF_HUB_CACHE} or {tiktoken_cache()}"
    raise InputError(f"found no tokenizer {name!r}: neither a file or folder of this name, nor in {places}", REMEDY)


def _read(path: Path) -> tuple[str, str]:
    return read_texts(path)[0], str(path)


def _from_gpt2(folder: Path) -> tuple[str, str]:
    """Convert the files of GPT-2 to a `tokenizer.json`."""
    encoder, merges = (read_texts(folder / name)[0] for name in GPT2_FILES)
    try:
        vocab = strict_json(encoder.encode(), str(folder / GPT2_FILES[0]))
    except FaultError as fault:
        raise InputError(str(fault), "use the file as OpenAI published it") from None
    pairs = [line.split() for line in merges.splitlines()[1:] if line]  # the first line is a version
    special = {END_OF_TEXT: vocab[END_OF_TEXT]} if END_OF_TEXT in vocab else {}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": pairs}
    return json.dumps(byte_level(level, special, model)), str(folder)


def _from_sentencepiece(folder: Path, path: Path | None = None) -> tuple[str, str]:
    """Convert the SentencePiece model in a folder to a `tokenizer.json`, with the converter of `transformers`."""
    path = path or folder / SENTENCEPIECE_FILE
    _refuse_boundless_bpe(path)
    if missing := [name for name in ("transformers", "sentencepiece") if not is_installed(name)]:
        cause = f"{path} is a SentencePiece model, which transformers converts, but {missing[0]} is not installed"
        convert = f"transformers.AutoTokenizer.from_pretrained({str(path.parent)!r}).save_pretrained('converted')"
        raise InputError(
            cause, f"pip install transformers sentencepiece protobuf, or, where they are installed, {convert}"
        )
    from transformers import AutoTokenizer

    remedy = "use the file as it was published, or a tokenizer.json of the same model"
    with library_errors(f"transformers cannot convert {path}", remedy, CONVERSION_ERRORS):
        converted = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return converted.backend_tokenizer.to_str(), str(path)


def _refuse_boundless_bpe(path: Path) -> None:
    """Raise `InputError` for a model of BoundlessBPE (https://arxiv.org/abs/2504.00178), which is text."""
    with path.open("rb") as file:
        if not file.readline(len(BOUNDLESS_BPE[-1]) + 1).startswith(BOUNDLESS_BPE):
            return
    cause = f"{path} is a model of BoundlessBPE, whose deletions and merges of whole words `tokenizers` cannot run"
    raise InputError(cause, "convert it to a tokenizer.json, with export_huggingface of fastboundlessbpe")


def gguf_tokenizer(path: Path) -> Any:
    """Return the tokenizer in a GGUF file, as `transformers` reads it."""
    file = open_gguf(path)
    if file.value("tokenizer.ggml.model") in (None, "none", "no_vocab") or not file.value("tokenizer.ggml.tokens"):
        raise InputError(f"got {path} without a tokenizer", "convert the model again, together with its tokenizer")
    transformers = require("transformers", "reading the tokenizer of a GGUF file")
    remedy = f"use the model in safetensors, with its {FILE}"
    cannot = f"transformers cannot read the tokenizer of {path}"
    with library_errors(cannot, remedy, GGUF_ERRORS), file.shared_with_transformers():
        return transformers.AutoTokenizer.from_pretrained(**file.pretrained_arguments, trust_remote_code=False)


def _from_gguf(path: Path) -> tuple[str, str]:
    return gguf_tokenizer(path).backend_tokenizer.to_str(), str(path)


def _in_hub_cache(name: str) -> Path | None:
    """Return the cached file of the revision `main`, or of the only revision if `main` was never downloaded."""
    from huggingface_hub import constants, try_to_load_from_cache  # it costs 0.25 s
    from huggingface_hub.file_download import repo_folder_name

    for each in [name] if "/" in name else [name, *(f"{owner}/{name}" for owner in _FIRST_OWNERS)]:
        try:
            cached = try_to_load_from_cache(each, FILE)
        except ValueError:  # not a possible name of a model
            return None
        if isinstance(cached, str):
            return Path(cached)
        folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=each, repo_type="model"))
        files = [] if (folder / "refs" / "main").exists() else sorted(folder.glob(f"snapshots/*/{FILE}"))
        if len(files) > 1:
            cause = f"got {len(files)} revisions in {folder}, none of which is main"
            raise InputError(cause, f"pass the path of one, such as {files[0]}")
        if files:
            return files[0]
    return None


def _download(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.utils import EntryNotFoundError

    try:
        if not getproxies():  # if no server answers, the library tries for half a minute
            place = urlsplit(ENDPOINT)
            port = place.port or (80 if place.scheme == "http" else 443)
            socket.create_connection((place.hostname, port), TIMEOUT).close()
        return Path(hf_hub_download(name, FILE))
    except (OSError, ValueError, EntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"cannot download {FILE} of {name!r}: {reason}",
            f"pass a name on the hub (owner/model), the path of a {FILE}, or a tokenizer trained on your own text",
        ) from None
