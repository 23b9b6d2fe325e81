"""A `tokenizer.json` with more entries, or with fewer: the same file with other ids, and which entries were kept.

Nothing else of the file changes: how a text is normalised, split, merged and put together. A text of which all tokens
are kept gets the same tokens where its merges are kept, as they are for every kept token.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from locant.arguments import shown, whole
from locant.errors import InputError, Remedy
from locant.text.tokenizer.definition import parse
from locant.text.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class EditedTokenizer:
    """The edited tokenizer, the old ids that are kept in their order, and how many tokens the texts took and take."""

    tokenizer: Tokenizer
    kept: tuple[int, ...]
    corpus_before: int | None = None
    corpus_after: int | None = None

    @property
    def added(self) -> dict[int, dict[str, Any]]:
        """Its added tokens by id, as a ``tokenizer_config.json`` has them."""
        tokens = json.loads(self.tokenizer.to_json()).get("added_tokens", [])
        return {token["id"]: {key: value for key, value in token.items() if key != "id"} for token in tokens}


def with_tokens(tokenizer: Tokenizer, tokens: Sequence[str]) -> EditedTokenizer:
    """The tokenizer with these special tokens, which get the ids after all others."""
    wrong = [
        token
        for number, token in enumerate(tokens)
        if not token.strip() or token.splitlines() != [token] or token in tokens[:number]
    ]
    if wrong or not tokens:
        got = f"got {shown(wrong[0] if wrong else tokens)} to add, expected spellings of one line, each once"
        raise InputError(got, "'<tool>'")
    known = next((token for token in tokens if tokenizer.id_of(token) is not None), None)
    if known is not None:
        raise InputError(f"got {known!r} to add, which has the id {tokenizer.id_of(known)} already", "another spelling")
    definition = json.loads(tokenizer.to_json())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    fresh = [{"id": tokenizer.vocab_size + place, "content": token, **flags} for place, token in enumerate(tokens)]
    definition["added_tokens"] = [*(definition.get("added_tokens") or []), *fresh]
    made = Tokenizer.from_json(json.dumps(definition, ensure_ascii=False), "the tokenizer with added tokens")
    return EditedTokenizer(tokenizer=made, kept=tuple(range(tokenizer.vocab_size)))


def keeping(tokenizer: Tokenizer, texts: Sequence[str], keep: int, *, named: Collection[int] = ()) -> EditedTokenizer:
    """The tokenizer with the `keep` entries that these texts use most, in the order in which they were.

    Added tokens, `named` ids, single letters and bytes are kept whatever the texts hold, and with an entry those that
    it is merged from.
    """
    _, library = parse(tokenizer.to_json(), "the tokenizer")
    definition = json.loads(library.to_str())  # every field in one form
    vocabulary = _Vocabulary(definition)
    keep = whole("keep", keep, 1, len(vocabulary.ids) - 1, remedy=Remedy(keep=len(vocabulary.ids) // 2))
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(tokenizer.encode(text).tolist())
    kept = vocabulary.closed(vocabulary.always() | {*named})
    if len(kept) > keep:
        got = f"got keep={keep}, but {len(kept)} entries have to be kept: added tokens, single letters, bytes"
        raise InputError(got, Remedy(keep=len(kept)))
    rarest_last = sorted(vocabulary.ids, key=lambda number: (-counts[number], number))
    for number in rarest_last:
        if len(kept) == keep:
            break
        wanted = vocabulary.closed({number}) - kept
        if len(kept) + len(wanted) <= keep:
            kept |= wanted
    order = tuple(sorted(kept))
    made = Tokenizer.from_json(json.dumps(vocabulary.only(order), ensure_ascii=False), "the smaller tokenizer")
    after = sum(len(made.encode(text)) for text in texts)
    return EditedTokenizer(tokenizer=made, kept=order, corpus_before=sum(counts.values()), corpus_after=after)


class _Vocabulary:
    """The entries of a definition and what they are merged from."""

    def __init__(self, definition: dict[str, Any]) -> None:
        self.definition = definition
        self.model = definition["model"]
        entries = self.model["vocab"]
        spelled = {entry[0]: place for place, entry in enumerate(entries)} if isinstance(entries, list) else {**entries}
        self.added = {token["content"]: token["id"] for token in definition["added_tokens"]}
        self.ids = {number: spelling for spelling, number in {**spelled, **self.added}.items()}
        self.spelled = {**spelled, **self.added}
        self.merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in self.model.get("merges", [])]
        self.prefix = self.model.get("continuing_subword_prefix") or ""
        self.parts: dict[str, tuple[str, str]] = {}
        for left, right in self.merges:
            self.parts.setdefault(self._merged(left, right), (left, right))

    def _merged(self, left: str, right: str) -> str:
        return left + right.removeprefix(self.prefix)

    def always(self) -> set[int]:
        """Added tokens, the one for what is unknown, single letters, and bytes."""
        unknown = self.model.get("unk_token")
        unknown_id = self.model.get("unk_id")
        kept = {*self.added.values()} | ({self.spelled[unknown]} if unknown in self.spelled else set())
        kept |= {unknown_id} if isinstance(unknown_id, int) else set()
        for number, spelling in self.ids.items():
            is_byte = len(spelling) == 6 and spelling.startswith("<0x")
            if is_byte or len(spelling.removeprefix(self.prefix)) <= 1:
                kept.add(number)
        return kept

    def closed(self, ids: Iterable[int]) -> set[int]:
        """These entries, and all that they are merged from."""
        closed: set[int] = set()
        waiting = [number for number in ids if number in self.ids]
        while waiting:
            number = waiting.pop()
            if number not in closed:
                closed.add(number)
                waiting += [self.spelled[part] for part in self.parts.get(self.ids[number], ()) if part in self.spelled]
        return closed

    def only(self, kept: Sequence[int]) -> dict[str, Any]:
        """The definition with these entries, numbered in this order."""
        moved = {old: new for new, old in enumerate(kept)}
        model = {**self.model}
        if isinstance(model["vocab"], list):
            # Added tokens may have ids behind the scored ones.
            model["vocab"] = [entry for place, entry in enumerate(model["vocab"]) if place in moved]
        else:
            model["vocab"] = {spelling: moved[number] for spelling, number in model["vocab"].items() if number in moved}
        if isinstance(model.get("unk_id"), int):
            model["unk_id"] = moved[model["unk_id"]]
        if "merges" in model:
            there = model["vocab"]
            model["merges"] = [
                [left, right]
                for left, right in self.merges
                if left in there and right in there and self._merged(left, right) in there
            ]
        tokens = [{**token, "id": moved[token["id"]]} for token in self.definition["added_tokens"]]
        padding = self.definition.get("padding")
        if isinstance(padding, Mapping):
            padding = {**padding, "pad_id": self._now(padding.get("pad_token"), padding.get("pad_id"), moved)}
        processor = self._processor(self.definition.get("post_processor"), moved)
        return {
            **self.definition, "model": model, "added_tokens": tokens, "padding": padding, "post_processor": processor
        }  # fmt: skip

    def _now(self, spelling: Any, number: Any, moved: Mapping[int, int]) -> Any:
        return moved.get(self.spelled.get(spelling, number), number)

    def _processor(self, processor: Any, moved: Mapping[int, int]) -> Any:
        """The step that puts special tokens around a text, with their new ids."""
        if not isinstance(processor, Mapping):
            return processor
        changed = {**processor}
        if "processors" in changed:
            changed["processors"] = [self._processor(one, moved) for one in changed["processors"]]
        for key in ("sep", "cls"):  # of BERT and RoBERTa: a spelling and its id
            if isinstance(changed.get(key), list):
                spelling, number = changed[key]
                changed[key] = [spelling, self._now(spelling, number, moved)]
        if isinstance(changed.get("special_tokens"), Mapping):
            changed["special_tokens"] = {
                name: {**token, "ids": [moved[number] for number in token["ids"]]}
                for name, token in changed["special_tokens"].items()
            }
        return changed
