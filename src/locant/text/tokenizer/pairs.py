"""Pairs of texts as one sequence with segment ids: ``[CLS] A [SEP] B [SEP]``, as BERT (arXiv:1810.04805) reads them.

Which special tokens go where is taken from the tokenizer's own file (its post-processor), so that a loaded tokenizer
gives the sequences that its model was trained on. A file without one gets BERT's order, with its own names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from locant.arguments import entries, shown
from locant.errors import InputError, RangeError
from locant.positions import Positions

__all__ = ["encode_pairs"]

STARTS = ("[CLS]", "<s>", "<cls>")
SEPARATORS = ("[SEP]", "</s>", "<sep>")
PADS = ("[PAD]", "<pad>", "<|pad|>")

Template = list[tuple[str | list[int], int]]
"""The parts of a sequence, each with its segment: ``"A"`` and ``"B"`` stand for the texts, lists for special tokens."""


def encode_pairs(
    pairs: Sequence[tuple[Any, Any]],
    encode_batch: Callable[[list[Any]], list[np.ndarray]],
    definition: Mapping[str, Any],
    special_tokens: Mapping[str, int],
    start: str | None,
    separator: str | None,
) -> dict[str, Any]:
    """What `Tokenizer.encode_pairs` gives, which describes the arguments and errors."""
    pairs = entries("pairs", pairs, "[(question, answer)]")
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise RangeError(f"got {shown(pair)} among the pairs, expected two texts", "[(question, answer)]")
    if not pairs:
        raise RangeError("got no pairs", "[(question, answer)]")
    encoded = iter(encode_batch([text for pair in pairs for text in pair if text is not None]))
    rows: list[tuple[list[int], list[int]]] = []
    for first, second in pairs:
        if first is None:
            raise RangeError("got a pair whose first text is None", "(text, None) for a text alone")
        texts = {"A": next(encoded).tolist(), "B": [] if second is None else next(encoded).tolist()}
        template = _template(definition, special_tokens, second is not None, start, separator)
        parts = [(texts[part] if isinstance(part, str) else part, segment) for part, segment in template]
        rows.append(([number for ids, _ in parts for number in ids], [segment for ids, segment in parts for _ in ids]))
    usual = next((special_tokens[name] for name in PADS if name in special_tokens), 0)
    pad_id = (definition["padding"] or {"pad_id": usual})["pad_id"]
    ids = pad_sequence([torch.tensor(ids, dtype=torch.long) for ids, _ in rows], True, pad_id)
    segments = pad_sequence([torch.tensor(segments, dtype=torch.long) for _, segments in rows], True)
    mask = pad_sequence([torch.ones(len(ids)) for ids, _ in rows], True)
    return {"ids": ids, "positions": Positions.from_mask(mask), "segments": segments}


def _template(
    definition: Mapping[str, Any],
    special_tokens: Mapping[str, int],
    is_pair: bool,
    start: str | None,
    separator: str | None,
) -> Template:
    """The order of texts and special tokens, for one text or two."""
    if start is None and separator is None:
        processor: dict[str, Any] = definition["post_processor"] or {"type": ""}
        steps: list[dict[str, Any]] = processor["processors"] if processor["type"] == "Sequence" else [processor]
        for step in steps:
            if step["type"] == "TemplateProcessing":
                template: Template = []
                for part in step["pair" if is_pair else "single"]:
                    if "Sequence" in part:
                        template.append((part["Sequence"]["id"], part["Sequence"]["type_id"]))
                    else:
                        token = part["SpecialToken"]
                        template.append((step["special_tokens"][token["id"]]["ids"], token["type_id"]))
                return template
            if step["type"] in ("BertProcessing", "RobertaProcessing"):
                return _bert(step["cls"][1], step["sep"][1], is_pair, roberta=step["type"] == "RobertaProcessing")
    begin = _special("start", start, STARTS, special_tokens)
    return _bert(begin, _special("separator", separator, SEPARATORS, special_tokens), is_pair, roberta=False)


def _bert(start: int, end: int, is_pair: bool, *, roberta: bool) -> Template:
    """``start A end B end``; RoBERTa has two tokens in the middle, and one segment."""
    first: Template = [([start], 0), ("A", 0), ([end], 0)]
    if not is_pair:
        return first
    return [*first, ([end], 0), ("B", 0), ([end], 0)] if roberta else [*first, ("B", 1), ([end], 1)]


def _special(option: str, name: str | None, usual: Sequence[str], special_tokens: Mapping[str, int]) -> int:
    known = ", ".join(map(repr, special_tokens)) or "none"
    if name is None:
        name = next((each for each in usual if each in special_tokens), None)
        if name is None:
            raise InputError(
                f"got a tokenizer whose special tokens are {known}, and none of them is {' or '.join(usual)}",
                f"{option}= with one of its names, or Tokenizer.train(..., special_tokens=['[PAD]', '[CLS]', '[SEP]'])",
            )
    if name not in special_tokens:
        raise RangeError(f"got {name!r} for {option}, expected a special token: {known}", f"{option}={usual[0]!r}")
    return special_tokens[name]
