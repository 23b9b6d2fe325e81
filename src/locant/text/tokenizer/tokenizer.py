"""`Tokenizer`: text to token ids and back.

The `tokenizers` library does the work. This module adds four guarantees:

* Text is only text. Text never yields the id of a special token, whatever it spells, unless the token is named in
  `allowed_special`. A token is special if its file marks it as special, see `Tokenizer.special_tokens`. (If a
  tokenizer has an id for unknown words, it returns this id only for words that it does not know.)
* The ids represent the text and nothing else: no [CLS], no beginning-of-text, no truncation, no padding, no dropout.
  `encode_pairs` adds special tokens on request.
* Every input is defined. In a `str`, pairs of surrogates are joined, and a lone surrogate is read as U+FFFD. In
  `bytes`, a `lossless` tokenizer keeps bytes that are not UTF-8, and other tokenizers read them as U+FFFD.
* Nothing is unpickled, and nothing is fetched from the network unless `download=True`.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, runtime_checkable

import numpy as np
import tokenizers
from jaxtyping import Int, Integer

from locant.arguments import entries, short_repr, whole
from locant.errors import InputError, RangeError, Remedy, ShapeError
from locant.files import write_whole
from locant.text.reading import read_texts, well_formed
from locant.text.tokenizer import definition as definitions
from locant.text.tokenizer.definition import BYTE_SPELLING, END_OF_TEXT, library_errors
from locant.text.tokenizer.local_files import find_tokenizer

if TYPE_CHECKING:
    from locant.text.tokenizer.engine import EngineOnDemand

TEXT_FILE_NAME = r"[\w./\\~-]+\.(txt|md|csv|tsv|jsonl?|parquet)(\.gz|\.zst)?"
"""A pattern for texts that look like the name of a text file.

Such a text is most likely meant as a file name, even if the file does not exist.
"""

LARGE = 4096
"""A call with at least this many characters or bytes of text may use the fast engine."""

LARGEST_VOCABULARY = 10_000_000
"""With larger vocabularies the trainer may run out of memory, which ends the process."""

# Spellings of the end of a text in the most popular models.
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "<EOT>")

_PADS = ("[PAD]", "<pad>", "<|pad|>")

UNKNOWN = "<unk>"

# `_WORD` matches words with their apostrophes and hyphens, numbers, and runs of one mark. None of these can spell
# `UNKNOWN`. `_NO_SPACE` matches the spaces next to marks, which `decode` leaves out.
_WORD = r"\w+(?:['’-]\w+)*|([^\w\s])\1*"
_NO_SPACE = (r" (?=[,.;:?!)\]}%…’”])", r"(?<=[(\[{“‘]) ")

# The error handler "surrogateescape" decodes bytes that are not UTF-8 as these characters.
_ESCAPED = re.compile("([\udc80-\udcff]+)")


@runtime_checkable
class TensorLike(Protocol):
    """A tensor of torch. The type does not import torch, because workers that only encode do not need it."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...
    def detach(self) -> Any: ...


Text = str | bytes
Ids = Sequence[int] | Integer[np.ndarray, " tokens"] | Integer[TensorLike, " tokens"]


class Tokenizer:
    """Encode text as token ids, and decode ids as text.

    >>> tokenizer = Tokenizer.bytes()
    >>> tokenizer.encode("né"), tokenizer.decode([110, 195, 169])
    (array([110, 195, 169], dtype=int32), 'né')
    >>> trained = Tokenizer.train("the hat on the cat on the hat on the mat", vocab_size=270)
    >>> ids = trained.encode("the hat")
    >>> [trained.token(id) for id in ids], trained.decode(ids)
    (['the', '␣hat'], 'the hat')
    >>> trained.encode("<|endoftext|>").size, trained.encode("<|endoftext|>", allowed_special=["<|endoftext|>"]).size
    (13, 1)

    Build one with `bytes`, `train`, `words`, `load` or `from_json`.
    """

    def __init__(self, definition: dict[str, Any], library: tokenizers.Tokenizer) -> None:
        self._definition = definition
        self._library = library
        self._canonical: dict[str, Any] = json.loads(library.to_str())
        self._bytes_of = definitions.byte_table(self._canonical)
        self._encoders: dict[frozenset[str], tokenizers.Tokenizer] = {}
        self.special_tokens: dict[str, int] = {
            token.content: number for number, token in library.get_added_tokens_decoder().items() if token.special
        }
        """Spelling and id of every special token."""
        self.vocab_size: int = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        """One more than the largest id. An embedding table needs one row for each id, even if the id is not used."""
        self.lossless: bool = self._bytes_of is not None and definitions.is_lossless(self._canonical)
        """True if `decode_bytes` restores every text and every sequence of bytes from the ids that `encode` returns."""
        self.byte_level: bool = self._bytes_of is not None
        """True if the tokenizer is a BPE over bytes, so that the bytes of every id are known."""
        self.only_bytes: bool = self.lossless and definitions.is_bytes(self._canonical)
        """True if the id of every byte of a text is the byte itself."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """A SHA-256 of everything that decides the ids. It differs if ids can differ. Saving does not change it."""
        return definitions.fingerprint(self._definition)

    @functools.cached_property
    def beginning(self) -> tuple[int, ...]:
        """The special tokens that the tokenizer's file puts before a text, such as ``<s>``. `encode` omits them."""
        template = definitions.own_template(self._canonical, is_pair=False) or []
        before = itertools.takewhile(lambda part: part[0] != "A", template)
        return tuple(number for ids, _ in before for number in ids if isinstance(number, int))

    @classmethod
    def bytes(cls) -> Tokenizer:
        """Return a tokenizer in which every byte of UTF-8 is a token (ids 0 to 255). Id 256 is the end of a text."""
        return cls.from_json(json.dumps(definitions.byte_definition()), "the byte tokenizer")

    @classmethod
    def train(
        cls,
        texts_or_paths: str | Path | Iterable[str | Path],
        vocab_size: int = 4096,
        special_tokens: Sequence[str] = (END_OF_TEXT,),
    ) -> Tokenizer:
        """Train a byte-level BPE. It has all 256 bytes, so it can encode every text.

        The same texts give the same tokenizer. Half a million characters take a third of a second.

        Args:
            texts_or_paths: one text or several. A `pathlib.Path` means the text in its file.
            vocab_size: number of tokens, including the special ones. The vocabulary is smaller if no more
                pairs in the texts occur twice.
            special_tokens: spellings, such as ``["[PAD]", "[CLS]", "[SEP]"]``. They have the last ids.

        Raises:
            InputError: there is no text, a file is not text, or a special token is spelled like a learned one.
            RangeError: the vocabulary is too small for 256 bytes and the special tokens.
        """
        names = _special_names(special_tokens)
        least = 256 + len(names)
        remedy = Remedy("{}: the 256 bytes and the special tokens", vocab_size=least)
        size = whole("vocab_size", vocab_size, least, LARGEST_VOCABULARY, remedy=remedy)
        texts = _texts_to_learn(texts_or_paths)
        library = tokenizers.Tokenizer(tokenizers.models.BPE())
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size - len(names),
            min_frequency=2,  # a pair that occurs only once saves no token anywhere else
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        library.train_from_iterator(texts, trainer=trainer, length=len(texts))
        # Special tokens are added after training. Otherwise the learned merges could make them out of ordinary words.
        return cls._with_special(library, names)

    @classmethod
    def words(
        cls,
        texts_or_paths: str | Path | Iterable[str | Path],
        vocab_size: int | None = None,
        special_tokens: Sequence[str] = (END_OF_TEXT,),
    ) -> Tokenizer:
        """Return a tokenizer whose tokens are the words and punctuation marks of some texts, for teaching.

        Ids are in alphabetical order. A word that is not in the vocabulary becomes ``<unk>``. White space is not kept.
        `decode` writes one space between words, and no space before a mark.

        Args:
            texts_or_paths, special_tokens: as for `train`.
            vocab_size: number of tokens, including the special ones and ``<unk>``. The most frequent words are kept.
                Default: all words.

        >>> tokenizer = Tokenizer.words("The cat sat. The dog ran!")
        >>> [tokenizer.token(id) for id in range(tokenizer.vocab_size)]
        ['!', '.', 'The', 'cat', 'dog', 'ran', 'sat', '<unk>', '<|endoftext|>']
        >>> tokenizer.encode("The cat purred."), tokenizer.decode(tokenizer.encode("The cat purred."))
        (array([2, 3, 7, 1], dtype=int32), 'The cat <unk>.')
        """
        names = _special_names(special_tokens)
        counts: Counter[str] = Counter()
        splits = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WORD), "removed", invert=True)
        for text in _texts_to_learn(texts_or_paths):
            counts.update(word for word, _ in splits.pre_tokenize_str(text))
        least = 2 + len(names)
        remedy = f"vocab_size={least} or more, or None for all words"
        size = len(counts) + least if vocab_size is None else whole("vocab_size", vocab_size, least, remedy=remedy)
        frequent = sorted(counts, key=lambda word: (-counts[word], word))[: size - least + 1]
        vocab = {word: number for number, word in enumerate([*sorted(frequent), UNKNOWN])}
        library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, UNKNOWN))
        library.pre_tokenizer = splits
        spaced = tokenizers.decoders.WordPiece(prefix="\n", cleanup=False)  # a space before each word but the first
        joined = [tokenizers.decoders.Replace(tokenizers.Regex(pattern), "") for pattern in _NO_SPACE]
        library.decoder = tokenizers.decoders.Sequence([spaced, tokenizers.decoders.Fuse(), *joined])
        return cls._with_special(library, names)

    @classmethod
    def _with_special(cls, library: tokenizers.Tokenizer, names: Sequence[str]) -> Tokenizer:
        for name in names:
            if library.token_to_id(name) is not None:
                cause = f"got the special token {name!r}, which is also a token of the texts"
                raise InputError(cause, f"use {f'<|{name}|>'!r}")
        library.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in names])
        return cls(json.loads(library.to_str()), library)

    @classmethod
    def load(cls, path_or_name: str | Path, *, download: bool = False) -> Tokenizer:
        """Load a tokenizer from a file or a local cache.

        Args:
            path_or_name: a `tokenizer.json`, a folder that holds one, or a name such as ``gpt2``, ``owner/model`` or
                ``cl100k_base``. A name is looked up in the cache of the Hugging Face libraries, then in the cache of
                `tiktoken`.
            download: if no cache has the name, download the tokenizer from the Hugging Face hub.

        Raises:
            InputError: there is no such tokenizer (the error lists ways to get one), or the file is not a tokenizer.
        """
        return cls.from_json(*find_tokenizer(path_or_name, download=download))

    @classmethod
    def from_json(cls, text: str, source: str = "the given text") -> Tokenizer:
        """Build a tokenizer from the text of a `tokenizer.json`. Errors call it `source`."""
        return cls(*definitions.parse(text, source))

    def to_json(self) -> str:
        """Return the text of a `tokenizer.json`, as `save` writes it."""
        return json.dumps(self._definition, ensure_ascii=False)

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json` at `path`, or in `path` if it is a folder. If writing fails, an older file is kept.

        Raises:
            InputError: the path is empty, or the system refuses to write there.
        """
        if not str(path):
            raise InputError("got an empty path for a tokenizer, expected a file or folder", "pass 'tokenizer.json'")
        path = Path(path)
        write_whole(path / "tokenizer.json" if path.is_dir() else path, self.to_json())

    def encode(self, text: str | bytes, *, allowed_special: Collection[str] = ()) -> Int[np.ndarray, " tokens"]:
        """Return the ids of a text as int32, which is wide enough for every vocabulary.

        Args:
            text: a `str`, or `bytes` in UTF-8.
            allowed_special: the special tokens that are recognised in the text, or ``"all"``. All other text is plain.

        Raises:
            InputError: a name in `allowed_special` is not a special token, or the tokenizer cannot encode the text.
        """
        return self.encode_batch([text], allowed_special=allowed_special)[0]

    def encode_batch(
        self, texts: Sequence[Text], *, allowed_special: Collection[str] = ()
    ) -> list[Int[np.ndarray, " tokens"]]:
        """Return the ids of each text, as `encode` does. The library distributes the texts over the cores.

        Large inputs use the fast engine if it is installed and gives the same ids, see `choose_engine`.
        """
        if isinstance(texts, (str, bytes)):
            raise InputError("got one text, expected a list of texts", "encode(text), or encode_batch([text])")
        if not allowed_special and not self.only_bytes and all(isinstance(text, (str, bytes)) for text in texts):
            size = sum(map(len, texts))
            if size >= LARGE and (rows := self._fast.encode(texts, size)) is not None:
                return rows
        return self.encode_by_reference(texts, allowed_special)

    @functools.cached_property
    def _fast(self) -> EngineOnDemand:
        from locant.text.tokenizer.engine import EngineOnDemand  # it imports this module

        return EngineOnDemand(self)

    def encode_by_reference(
        self, texts: Sequence[Text], allowed_special: Collection[str] = ()
    ) -> list[Int[np.ndarray, " tokens"]]:
        """Return the ids of each text from the `tokenizers` library, even if a faster engine is available."""
        return self.assemble(texts, lambda parts: self._run(parts, allowed_special))

    def assemble(
        self, texts: Sequence[str | bytes], run: Callable[[list[str]], Sequence[Int[np.ndarray, " _"]]]
    ) -> list[Int[np.ndarray, " _"]]:
        """Return the ids of each text. `run` encodes text, and each byte that is not UTF-8 becomes a token."""
        split = [self._split(text) for text in texts]
        encoded = iter(run([part for row in split for part in row if isinstance(part, str)]))
        rows = [[next(encoded) if isinstance(part, str) else self._spell(part) for part in row] for row in split]
        return [row[0] if len(row) == 1 else np.concatenate(row) for row in rows]

    def _split(self, text: str | bytes) -> list[str | bytes]:
        """Split a text into parts of text (`str`) and parts that are not UTF-8 (`bytes`)."""
        if isinstance(text, str):
            return [well_formed(text)]
        if not isinstance(text, bytes):
            raise InputError(f"got a {type(text).__name__} to encode, expected str or bytes", "pass one text")
        try:
            return [text.decode()]
        except UnicodeDecodeError:
            if not self.lossless:
                return [text.decode(errors="replace")]
        parts = _ESCAPED.split(text.decode(errors="surrogateescape"))  # even parts are text, odd parts are not
        return [part.encode(errors="surrogateescape") if i % 2 else part for i, part in enumerate(parts)]

    def _run(self, texts: list[str], allowed_special: Collection[str]) -> list[Int[np.ndarray, " tokens"]]:
        if self.only_bytes and not allowed_special:
            return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]
        remedy = "use a tokenizer that knows its characters, such as Tokenizer.bytes()"
        with library_errors("cannot encode the text", remedy, ("Exception", "PanicException")):
            encodings = self._encoder(allowed_special).encode_batch_fast(texts)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encode_pair(
        self, first: Text, second: Text | None = None, *, start: str | None = None, separator: str | None = None
    ) -> dict[str, Any]:
        """Encode one pair of texts, or one text, as `encode_pairs` does. Return a batch of one row."""
        return self.encode_pairs([(first, second)], start=start, separator=separator)

    def encode_pairs(
        self, pairs: Sequence[tuple[Text, Text | None]], *, start: str | None = None, separator: str | None = None
    ) -> dict[str, Any]:
        """Return ids, positions and segments of text pairs as ``[CLS] A [SEP] B [SEP]``, for `InputEmbedding`.

        The order of the texts and the special tokens comes from the tokenizer's file, so it is the order that the model
        was trained with. If the file does not define an order, the order of BERT is used, with ``[CLS]`` or ``<s>`` and
        ``[SEP]`` or ``</s>`` from the file. The texts are plain text, even if they contain the name of a special token.
        Shorter rows are padded on the right.

        Args:
            pairs: two texts each. With ``None`` as the second text, the row is ``[CLS] A [SEP]``.
            start, separator: the special tokens to use instead. With one of them, the order of BERT is used.

        Raises:
            RangeError: a name is not a special token, or there are no pairs.
            InputError: the tokenizer has no special tokens for pairs, or cannot encode a text.

        >>> tokenizer = Tokenizer.train("the cat sat on the mat", 300, special_tokens=["[PAD]", "[CLS]", "[SEP]"])
        >>> batch = tokenizer.encode_pairs([("the cat", "sat"), ("the", "mat")])
        >>> [tokenizer.token(id) for id in batch["ids"][1]]
        ['[CLS]', 'the', '[SEP]', 'm', 'at', '[SEP]', '[PAD]', '[PAD]', '[PAD]']
        >>> batch["segments"].tolist()[1], batch["positions"].document.tolist()[1]
        ([0, 0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, -1, -1, -1])
        """
        import torch
        from torch.nn.utils.rnn import pad_sequence

        from locant.positions import Positions

        pairs = entries("pairs", pairs, "[(question, answer)]")
        for pair in pairs:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise RangeError(f"got {short_repr(pair)} among the pairs, expected two texts", "[(question, answer)]")
            if pair[0] is None:
                raise RangeError("got a pair whose first text is None", "(text, None) for a text alone")
        if not pairs:
            raise RangeError("got no pairs", "[(question, answer)]")
        encoded = iter(self.encode_batch([text for pair in pairs for text in pair if text is not None]))
        ids: list[torch.Tensor] = []
        segments: list[torch.Tensor] = []
        for _, second in pairs:
            texts = {"A": next(encoded).tolist(), "B": [] if second is None else next(encoded).tolist()}
            template = definitions.pair_template(
                self._canonical, self.special_tokens, second is not None, start, separator
            )
            parts = [(texts[part] if isinstance(part, str) else part, segment) for part, segment in template]
            ids.append(torch.tensor([number for part, _ in parts for number in part], dtype=torch.long))
            segments.append(torch.tensor([segment for part, segment in parts for _ in part], dtype=torch.long))
        usual = next((self.special_tokens[name] for name in _PADS if name in self.special_tokens), 0)
        pad_id = (self._canonical["padding"] or {"pad_id": usual})["pad_id"]
        mask = pad_sequence([torch.ones(len(row)) for row in ids], True)
        return {
            "ids": pad_sequence(ids, True, pad_id),
            "positions": Positions.from_mask(mask),
            "segments": pad_sequence(segments, True),
        }

    @property
    def added_tokens(self) -> list[dict[str, Any]]:
        """The added tokens, including the special ones, with their ids and flags as the library writes them."""
        return self._canonical["added_tokens"]

    @functools.cached_property
    def plain_definition(self) -> dict[str, Any]:
        """The definition of this tokenizer with hidden special tokens. It gives every text the same ids as `encode`."""
        return definitions.hide_tokens(self._canonical, self.special_tokens.keys())

    def _encoder(self, allowed_special: Collection[str]) -> tokenizers.Tokenizer:
        """Return the library's tokenizer without the special tokens that are not allowed."""
        names = self.special_tokens if allowed_special == "all" else allowed_special
        allowed = frozenset([names] if isinstance(names, str) else names)
        if unknown := sorted(allowed - self.special_tokens.keys()):
            names = ", ".join(map(repr, self.special_tokens)) or "none"
            cause = f"got {unknown[0]!r} in allowed_special, which is not a special token"
            raise InputError(cause, f"use some of: {names}")
        if allowed not in self._encoders:
            hidden = self.special_tokens.keys() - allowed
            plain = definitions.hide_tokens(self._canonical, hidden) if allowed else self.plain_definition
            self._encoders[allowed] = tokenizers.Tokenizer.from_str(json.dumps(plain))
        return self._encoders[allowed]

    def _spell(self, data: bytes) -> Int[np.ndarray, " tokens"]:
        """Return one token for each byte. Every byte-level vocabulary has these byte tokens."""
        vocab = self._canonical["model"]["vocab"]
        return np.array([vocab[BYTE_SPELLING[byte]] for byte in data], dtype=np.int32)

    def decode(self, ids: Ids | SupportsIndex) -> str:
        """Return the text of these ids, or of one id, including special tokens. Bytes that are not UTF-8 become U+FFFD.

        Raises:
            RangeError: no token has this id.
        """
        if self._bytes_of is not None:
            return self.decode_bytes(ids).decode(errors="replace")
        return self._library.decode(self._numbers(ids), skip_special_tokens=False)

    def decode_bytes(self, ids: Ids | SupportsIndex) -> bytes:
        """Return the bytes of these ids. If the tokenizer is `lossless`, they are exactly the encoded bytes."""
        if self._bytes_of is None:
            return self.decode(ids).encode()
        return b"".join(self._bytes_of[number] or b"" for number in self._numbers(ids))

    def token(self, id: SupportsIndex) -> str:  # noqa: A002  # the field says "token id"
        r"""Return a token as text for a table, with ␣ for a space and escapes for unprintable characters.

        >>> [Tokenizer.bytes().token(id) for id in (65, 32, 10, 195, 256)]
        ['A', '␣', '\\n', '\\xc3', '<|endoftext|>']
        """
        number = operator.index(id)
        text = self._require(number)
        if self._bytes_of is not None:
            text = (self._bytes_of[number] or b"").decode(errors="backslashreplace")
        return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text).replace(" ", "␣")

    def id_of(self, spelling: str) -> int | None:
        """Return the id of an entry of the vocabulary, such as ``##ing`` or ``Ġthe``, or ``None`` if it does not exist.

        >>> Tokenizer.bytes().id_of("A"), Tokenizer.bytes().id_of("the")
        (65, None)
        """
        return self._library.token_to_id(spelling)

    @property
    def end_of_text(self) -> int | None:
        """The id of the special token that ends a text, found by its usual spellings, or ``None``."""
        return next((self.special_tokens[name] for name in _ENDS if name in self.special_tokens), None)

    def __repr__(self) -> str:
        kind = self._canonical["model"]["type"]
        return f"Tokenizer({kind}, vocab_size={self.vocab_size}, fingerprint={self.fingerprint[:12]})"

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        # For worker processes. Pickling the library's own object would lose the fields that it does not know.
        return type(self).from_json, (self.to_json(),)

    def _numbers(self, ids: Ids | SupportsIndex) -> list[int]:
        array = np.asarray(ids.detach().cpu() if isinstance(ids, TensorLike) else ids)
        array = array[None] if array.ndim == 0 else array
        if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            got = f"got ids of shape {array.shape} and dtype {array.dtype}"
            raise ShapeError(f"{got}, expected one axis of integers", "decode one row at a time, such as ids[0]")
        for number in {*array.tolist()}:
            self._require(number)
        return array.tolist()

    def _require(self, number: int) -> str:
        spelling = self._library.id_to_token(number) if 0 <= number < self.vocab_size else None
        if spelling is None:
            raise RangeError(f"got token id {number}, which no token has", f"use ids within 0..{self.vocab_size - 1}")
        return spelling


def _special_names(names: str | Sequence[str]) -> list[str]:
    names = [names] if isinstance(names, str) else [*names]
    for name in names:
        if not isinstance(name, str) or not name or name != well_formed(name) or names.count(name) > 1:
            raise InputError(f"got the special token {name!r}, expected different spellings", f"use {END_OF_TEXT!r}")
    return names


def _texts_to_learn(texts_or_paths: str | Path | Iterable[str | Path]) -> list[str]:
    if isinstance(texts_or_paths, (str, Path, bytes)) or not isinstance(texts_or_paths, Iterable):
        texts_or_paths = [texts_or_paths]
    texts = [_text_to_learn(one) for one in texts_or_paths]
    if not any(texts):
        raise InputError("got no text to train on", "pass a text, or the pathlib.Path of a text file")
    return texts


def _text_to_learn(text_or_path: str | Path) -> str:
    if isinstance(text_or_path, Path):
        return read_texts(text_or_path)[0]
    if not isinstance(text_or_path, str):
        kind = type(text_or_path).__name__
        raise InputError(f"got a {kind} to train on, expected a text or a pathlib.Path", "data.decode(), for bytes")
    text = well_formed(text_or_path)
    # A short text that is also the name of a file most likely means the file. Longer texts cannot be names.
    if 0 < len(text.encode()) < 256 and Path(text).is_file():
        raise InputError(f"got the text {text!r}, which is the name of a file", f"pathlib.Path({text!r})")
    if re.fullmatch(TEXT_FILE_NAME, text):
        raise InputError(f"got the text {text!r}, which looks like the name of a file", f"pathlib.Path({text!r})")
    return text
