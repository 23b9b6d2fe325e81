"""Pairs of texts with segment ids: what transformers makes of the same file, and no special token out of a text."""

from __future__ import annotations

import json

import pytest
import tokenizers

from locant import InputEmbedding, InputError, RangeError, Tokenizer
from tests.refusal import refuses

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "mat", "##s", "?", "<s>", "</s>", "<pad>"]
PAIRS = [("the cat sat", "on the mat?"), ("cats", "the"), ("", "mats on cats"), ("the", "")]
SPECIAL = ["[PAD]", "[CLS]", "[SEP]"]


def bert(processor: object = None) -> tokenizers.Tokenizer:
    """A WordPiece tokenizer of a few words, without or with a post-processor."""
    vocab = {word: number for number, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))  # noqa: S106
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens([word for word in WORDS if word[0] in "[<"])
    if processor is not None:
        made.post_processor = processor
    return made


PROCESSORS = {
    "template": tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    ),
    "bert": tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "roberta": tokenizers.processors.RobertaProcessing(("</s>", 12), ("<s>", 11), add_prefix_space=False),
    "sequence": tokenizers.processors.Sequence(
        [tokenizers.processors.ByteLevel(), tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))]
    ),
    "xlnet": tokenizers.processors.TemplateProcessing(
        single="$A:0 </s>:0 <s>:2",
        pair="$A:0 </s>:0 $B:1 </s>:1 <s>:2",
        special_tokens=[("<s>", 11), ("</s>", 12)],
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_they_are_those_of_the_library(name: str) -> None:
    library = bert(PROCESSORS[name])
    library.enable_padding(pad_id=13, pad_token="<pad>")  # noqa: S106
    batch = Tokenizer.from_json(library.to_str()).encode_pairs(PAIRS)
    expected = library.encode_batch(PAIRS)
    assert batch["ids"].tolist() == [row.ids for row in expected]
    assert batch["segments"].tolist() == [row.type_ids for row in expected]
    assert (batch["positions"].document >= 0).int().tolist() == [row.attention_mask for row in expected]
    for text in ("the cat", ""):
        alone = Tokenizer.from_json(library.to_str()).encode_pair(text)
        assert alone["ids"].tolist() == [library.encode(text).ids]
        assert alone["segments"].tolist() == [library.encode(text).type_ids]


@pytest.mark.parametrize("name", [None, *PROCESSORS])
def test_what_stands_before_a_text_is_that_of_the_library(name: str | None) -> None:
    """A file that puts nothing there has special tokens all the same."""
    library = bert(PROCESSORS[name] if name else None)
    text, its = library.encode("the", add_special_tokens=False).ids, library.encode("the").ids
    assert [*Tokenizer.from_json(library.to_str()).beginning] == its[: its.index(text[0])]


def test_an_embedding_takes_a_batch_as_it_is() -> None:
    tokenizer = Tokenizer.from_json(bert(PROCESSORS["bert"]).to_str())
    batch = tokenizer.encode_pairs(PAIRS)
    x = InputEmbedding(tokenizer.vocab_size, 8, num_segments=2)(**batch)
    assert x.shape == (*batch["ids"].shape, 8)


def test_a_text_never_becomes_a_special_token() -> None:
    trained = Tokenizer.train("the cat sat on the mat", 300, special_tokens=SPECIAL)
    for tokenizer in (trained, Tokenizer.from_json(bert(PROCESSORS["template"]).to_str())):
        ids = tokenizer.encode_pair("a [SEP] b", "[CLS][PAD]")["ids"][0].tolist()
        special = tokenizer.special_tokens
        assert [ids.count(special[name]) for name in ("[CLS]", "[SEP]", "[PAD]")] == [1, 2, 0]


def test_a_trained_tokenizer_has_them_by_bert_s_names_or_by_its_own() -> None:
    tokenizer = Tokenizer.train("the cat sat on the mat", 300, special_tokens=[*SPECIAL, "<a>", "<b>"])
    special = tokenizer.special_tokens
    a, b = tokenizer.encode(b"the \xff").tolist(), tokenizer.encode("cat").tolist()
    pair = tokenizer.encode_pair(b"the \xff", "cat")
    assert pair["ids"].tolist() == [[special["[CLS]"], *a, special["[SEP]"], *b, special["[SEP]"]]]
    assert pair["segments"].tolist() == [[0] * (len(a) + 2) + [1] * (len(b) + 1)]
    own = tokenizer.encode_pair("cat", "cat", start="<a>", separator="<b>")["ids"].tolist()
    assert own == [[special["<a>"], *b, special["<b>"], *b, special["<b>"]]]


def test_what_cannot_be_a_pair_is_refused() -> None:
    with refuses(InputError, "'<|endoftext|>'", "special_tokens=", "start="):
        Tokenizer.bytes().encode_pair("a", "b")
    tokenizer = Tokenizer.train("the cat", 300, special_tokens=SPECIAL)
    with refuses(RangeError, "separator", "'[SEP]'"):
        tokenizer.encode_pair("a", "b", separator="[END]")
    for wrong in ([], ["ab"], [("a",)], [("a", "b", "c")], [(None, "b")]):
        with refuses(RangeError, "pair"):
            tokenizer.encode_pairs(wrong)
    assert json.loads(tokenizer.to_json())["post_processor"] is None
