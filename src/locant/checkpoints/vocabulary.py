"""The vocabulary of a checkpoint changed: tokens added, or all but some left out, in its weights and its tokenizer.

A folder is written anew; it appears under its name when all of it is on the disk. Rows that are kept are copied byte
for byte, and so is every other tensor: the logits of a token that is kept are what they were. Memory holds a block of
rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from locant.arguments import shown, whole
from locant.checkpoints.checkpoint_folder import (
    INDEX,
    LENGTH,
    Header,
    TensorEntry,
    TensorFolder,
    companions,
    headers_of,
    require_output,
    rewritten,
)
from locant.checkpoints.config_source import CONFIG, as_json, read_json
from locant.errors import InputError, Remedy
from locant.files import NewFile, require_apart, write_whole
from locant.models.config_values import required
from locant.models.registry import read_known
from locant.text import Tokenizer
from locant.text.tokenizer.editing import EditedTokenizer, keeping, with_tokens

HEADS = (
    "lm_head", "lm_head.decoder", "embed_out", "cls.predictions", "cls.predictions.decoder", "predictions",
    "predictions.decoder", "vocab_projector", "generator_lm_head", "decoder",
)  # fmt: skip
"""Modules that have a row of weights, or a bias, for every token that they give a score."""

GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
OTHER_TOKENIZERS = (
    "vocab.txt", "vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
"""The vocabulary in forms that are older than ``tokenizer.json``; they would tell of other ids."""

NAMES_IDS = ("_token_id", "_token_ids", "_token_index")
"""How keys end that hold an id, or several."""

BLOCK = 2**22
"""Bytes of rows that are copied at once."""

ROWS = 2**13
"""Rows that are added up at once."""

WEIGHTS = 2**24
"""Random numbers that are in memory at once: 128 MiB."""

SPREAD = 1e-9
"""The variance of new rows, in that of the old ones: that of `transformers`."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What was written."""

    output: str
    before: int
    rows: int
    tokens: int
    tensors: tuple[str, ...]
    left_out: tuple[str, ...]
    corpus_before: int | None = None
    corpus_after: int | None = None


def keep_tokens(
    folder: Path | str, output: Path | str, texts: Sequence[str], keep: int, *, force: bool = False
) -> Change:
    """Leave out all tokens but the `keep` that these texts use most; their order stays.

    Added tokens, those that a configuration names, single letters and bytes are always kept, and the pieces that a
    kept token is merged from: every text that had tokens has some. A text may take more of them.

    Raises:
        InputError: fewer tokens than have to be kept; a folder that cannot be read; `output` is there (without
            `force`); a tensor by tokens that is not known.
    """
    source = _Source(folder)
    edited = keeping(source.tokenizer(), texts, keep, named=source.named_ids())
    return source.write(output, torch.tensor(edited.kept), 0, edited, force=force)


def add_tokens(
    folder: Path | str,
    output: Path | str,
    tokens: Sequence[str],
    *,
    multiple_of: int = 1,
    seed: int = 0,
    force: bool = False,
) -> Change:
    """Add tokens to the tokenizer, each with a row in the tables.

    New rows are drawn around the mean of the old ones with a billionth of their covariance, as `transformers` does
    (Hewitt 2021, https://nlp.stanford.edu/~johnhew/vocab-expansion.html).

    Args:
        tokens: their spellings; special tokens, which are found in a text before it is split.
        multiple_of: the tables get a multiple of so many rows, such as 64.
    """
    source = _Source(folder)
    multiple_of = whole("multiple_of", multiple_of, 1, remedy=Remedy(multiple_of=64))
    tokenizer = source.tokenizer()
    edited = with_tokens(tokenizer, tokens)
    most = max(source.rows, edited.tokenizer.vocab_size)
    total = -(-most // multiple_of) * multiple_of
    kept = torch.tensor(edited.kept)  # spare rows of a padded table belong to no token yet
    return source.write(output, kept, total - len(kept), edited, seed=seed, force=force)


class _Source:
    """A checkpoint, and which of its tensors go by tokens."""

    def __init__(self, folder: Path | str) -> None:
        self.tensors = TensorFolder(folder)
        self.folder = self.tensors.folder
        self.facts = read_json(self.folder / CONFIG)
        self.config, row = read_known(self.facts)
        self.rows = required(self.config, "vocab_size")
        self.headers = headers_of(self.folder)
        table = self.tensors.find(row.inputs.tokens)
        if table is None:
            got = f"got {self.folder} without a tensor {row.inputs.tokens}.weight"
            raise InputError(got, "the folder of the whole model")
        entries = [entry for header in self.headers.values() for entry in header.tensors]
        shared = {f"{head}.{part}" for head in HEADS for part in ("weight", "bias")}
        shared |= {f"encoder.{row.inputs.tokens}.weight", f"decoder.{row.inputs.tokens}.weight"}
        self.by_token = {
            entry.name
            for entry in entries
            if self.rows in entry.shape[:1]
            and (entry.name == table or any(f".{entry.name}".endswith(f".{end}") for end in shared))
        }
        self._require_known(entries, table, required(self.config, row.inputs.width_key(self.config)))

    def _require_known(self, entries: Sequence[TensorEntry], table: str, width: int) -> None:
        shape = next(entry.shape for entry in entries if entry.name == table)
        if shape != (self.rows, width):
            got = f"got {table} of shape {shape} in {self.folder}, where its {CONFIG} says {(self.rows, width)}"
            raise InputError(got, "the configuration and the weights of one model")
        unknown = [entry.name for entry in entries if self.rows in entry.shape and entry.name not in self.by_token]
        if unknown or "vocab_size_per_layer_input" in self.config:
            what = unknown[0] if unknown else "a table of tokens for each layer"
            got = f"got {self.folder} with {what}, which may go by tokens in a way that is not known here"
            raise InputError(got, "a model whose tables are its embedding and its head")

    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.load(self.folder)
        if tokenizer.vocab_size > self.rows:
            got = f"got a tokenizer of {tokenizer.vocab_size} entries for the {self.rows} rows of {self.folder}"
            raise InputError(got, "the tokenizer of this model")
        return tokenizer

    def named_ids(self) -> set[int]:
        """Ids that the configurations name, such as the one at the end of a text."""
        generation = self.folder / GENERATION
        facts = [self.facts, read_json(generation)] if generation.exists() else [self.facts]
        return {number for one in facts for number in _named(one) if 0 <= number < self.rows}

    def write(
        self,
        output: Path | str,
        kept: Tensor,
        fresh: int,
        edited: EditedTokenizer,
        *,
        seed: int = 0,
        force: bool = False,
    ) -> Change:
        output = Path(output)
        require_apart(output, self.folder)
        require_output(output, force=force)
        rows = len(kept) + fresh
        moved = {old: new for new, old in enumerate(kept.tolist())}
        copied, left_out = companions(self.folder, self.headers)
        stale = {name for name in copied if name in OTHER_TOKENIZERS}
        generator, sizes = torch.Generator().manual_seed(seed), list[int]()

        def write(name: str, header: Header, target: NewFile) -> None:
            sizes.append(self._write_file(target, name, header, kept, fresh, generator))

        same = [name for name in copied if name not in {*stale, TOKENIZER, TOKENIZER_CONFIG, GENERATION, INDEX}]
        with rewritten(self.folder, output, self.headers, write, same, force=force) as made:
            edited.tokenizer.save(made / TOKENIZER)
            written = {CONFIG: _with_rows(self.facts, rows, self.rows)}
            for name in (GENERATION, TOKENIZER_CONFIG):
                if (self.folder / name).exists():
                    written[name] = read_json(self.folder / name)
            for name, facts in written.items():
                write_whole(made / name, as_json(_moved(facts, moved, edited.added)))
            if (self.folder / INDEX).exists():
                index = read_json(self.folder / INDEX)
                index["metadata"] = {**index.get("metadata", {}), "total_size": sum(sizes)}
                write_whole(made / INDEX, as_json(index))
        return Change(
            output=str(output), before=self.rows, rows=rows, tokens=edited.tokenizer.vocab_size,
            tensors=tuple(sorted(self.by_token)), left_out=(*sorted(stale), *left_out),
            corpus_before=edited.corpus_before, corpus_after=edited.corpus_after,
        )  # fmt: skip

    def _write_file(
        self, target: NewFile, name: str, header: Header, kept: Tensor, fresh: int, generator: torch.Generator
    ) -> int:
        """A file of the same tensors, some with other rows; gives back their bytes."""
        fields: dict[str, Any] = {}
        old = json.loads(header.raw[LENGTH.size :])
        if "__metadata__" in old:
            fields["__metadata__"] = old["__metadata__"]
        place = 0
        for entry in header.tensors:
            by_token = entry.name in self.by_token
            shape = (len(kept) + fresh, *entry.shape[1:]) if by_token else entry.shape
            size = entry.num_bytes // self.rows * shape[0] if by_token else entry.num_bytes
            fields[entry.name] = {"dtype": entry.dtype, "shape": list(shape), "data_offsets": [place, place + size]}
            place += size
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        target.write(LENGTH.pack(len(text)) + text)
        for entry in header.tensors:
            content = np.empty(0, np.uint8)
            if entry.num_bytes:
                where, size = self.folder / name, (entry.num_bytes,)
                content = np.memmap(where, np.uint8, mode="r", offset=entry.begin, shape=size)
            if entry.name not in self.by_token:
                for start in range(0, len(content), BLOCK):
                    target.write(np.ascontiguousarray(content[start : start + BLOCK]).data)
                continue
            each = entry.num_bytes // self.rows
            table, step = content.reshape(self.rows, each), max(1, BLOCK // each)
            for some in kept.split(step):
                target.write(np.ascontiguousarray(table[some.numpy()]).data)
            if fresh:
                for drawn in _fresh_rows(self.tensors.tensor(entry.name)[: len(kept)], fresh, generator):
                    target.write(drawn.contiguous().view(torch.uint8).numpy().reshape(-1).data)
        return place


def _named(facts: Mapping[str, Any]) -> Iterator[int]:
    """Every id under a key that names one, however deep."""
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _named(value)
        elif key.endswith(NAMES_IDS):
            yield from (one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int))


def _fresh_rows(old: Tensor, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows around the mean of the old ones, with `SPREAD` of their covariance, which is never formed; a block each.

    A sum of the centred rows with independent weights of variance ``SPREAD / rows`` has that covariance.
    """
    rows = old.reshape(len(old), -1)
    block = max(1, WEIGHTS // (16 * len(old))) * 16  # torch draws 16 numbers at a time: blocks draw what the whole does
    for start in range(0, count, block):
        shape = (min(block, count - start), len(old))
        weights = torch.randn(shape, dtype=torch.float64, generator=generator) * (SPREAD / len(old)) ** 0.5
        weights += (1 - weights.sum(1, keepdim=True)) / len(old)  # the mean, less that of what is added to it
        parts = zip(weights.split(ROWS, 1), rows.split(ROWS), strict=True)
        total = sum((some @ part.double() for some, part in parts), torch.zeros(()))
        yield total.to(old.dtype).reshape(-1, *old.shape[1:])


def _with_rows(facts: Mapping[str, Any], rows: int, before: int) -> dict[str, Any]:
    """The configuration with another ``vocab_size``, also in its text part."""
    changed = {**facts, "vocab_size": rows} if facts.get("vocab_size") == before else {**facts}
    if isinstance(facts.get("text_config"), Mapping):
        changed["text_config"] = _with_rows(facts["text_config"], rows, before)
    return changed


def _moved(
    facts: Mapping[str, Any], moved: Mapping[int, int], added: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """Every id that is named, where it is now; tokens that are gone are named no more."""

    def of(value: Any) -> Any:
        if isinstance(value, list):
            return [moved[number] for number in value if number in moved]
        return moved.get(value, value) if isinstance(value, int) else value

    changed = {}
    for key, value in facts.items():
        if key.endswith(NAMES_IDS) or key in ("suppress_tokens", "begin_suppress_tokens"):
            changed[key] = of(value)
        elif key == "added_tokens_decoder":
            changed[key] = {str(number): token for number, token in added.items()}
        elif key in ("forced_decoder_ids", "bad_words_ids", "sequence_bias") and value:
            raise InputError(f"got {key}={shown(value)}, whose ids are not moved", f"{key!r}: null in {GENERATION}")
        elif isinstance(value, Mapping):
            changed[key] = _moved(value, moved, added)
        else:
            changed[key] = value
    return changed
