"""A checkpoint with fewer tokens, or more: `transformers` loads it, and what is kept is what it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers, processors, trainers

from locant import InputError, RangeError, Tokenizer
from locant.checkpoints import vocabulary as checkpoint_vocabulary
from locant.checkpoints.vocabulary import add_tokens, keep_tokens
from locant.files import NewFile
from tests.largest import Largest
from tests.refusal import refuses
from tests.tolerances import ESTIMATED, assert_close

TEXT = "the hat on the cat on the hat on the mat, and a dog that sat on a rug by the door. " * 4
RARE = "zebras quarrel with xylophones; jays vex quick foxes. " * 4
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}


def byte_level() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(Tokenizer.train([TEXT, RARE], vocab_size=320).to_json())


def word_piece() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106  # no password
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    library.train_from_iterator([TEXT, RARE], trainers.WordPieceTrainer(vocab_size=120, special_tokens=special))
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return library


def unigram() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=["<unk>", "</s>"], unk_token="<unk>")  # noqa: S106
    library.train_from_iterator([TEXT, RARE], trainer)
    return library


KINDS: dict[str, Any] = {
    "gpt2": (byte_level, transformers.GPT2LMHeadModel, {"n_embd": 8, "n_layer": 1, "n_head": 2}),
    "bert": (word_piece, transformers.BertForMaskedLM, {**SIZES, "pad_token_id": 3}),
    "llama": (unigram, transformers.LlamaForCausalLM,
              {**SIZES, "num_key_value_heads": 1, "tie_word_embeddings": False}),
}  # fmt: skip


def saved(kind: str, folder: Path, *, spare: int = 0, **how: Any) -> Any:
    make, cls, sizes = KINDS[kind]
    library = make()
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=library.get_vocab_size() + spare, eos_token_id=2, bos_token_id=1, **sizes
    )
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder, **how)
    transformers.PreTrainedTokenizerFast(tokenizer_object=library).save_pretrained(folder)
    return model


def vocabulary(folder: Path) -> dict[str, int]:
    return transformers.AutoTokenizer.from_pretrained(folder).get_vocab()


@pytest.mark.parametrize(("kind", "keep"), [("gpt2", 295), ("bert", 90), ("llama", 38)])
def test_kept_tokens_have_the_logits_they_had(kind: str, keep: int, tmp_path: Path) -> None:
    old_folder, new_folder = tmp_path / "old", tmp_path / "new"
    old = saved(kind, old_folder, max_shard_size="3KB")
    change = keep_tokens(old_folder, new_folder, [TEXT], keep)
    new = type(old).from_pretrained(new_folder).eval()
    before, after = vocabulary(old_folder), vocabulary(new_folder)
    assert (change.rows, len(after), new.get_input_embeddings().weight.shape[0]) == (keep, keep, keep)
    assert after.items() <= {spelling: after.get(spelling) for spelling in before}.items(), "no new spellings"
    kept = torch.tensor([before[spelling] for spelling in sorted(after, key=after.__getitem__)])
    assert (kept.diff() > 0).all(), "in the order in which they were"
    old_ids = transformers.AutoTokenizer.from_pretrained(old_folder)(TEXT)["input_ids"]
    new_ids = transformers.AutoTokenizer.from_pretrained(new_folder)(TEXT)["input_ids"]
    assert kept[new_ids].tolist() == old_ids, "the corpus has the tokens it had"
    with torch.no_grad():
        expected = old(torch.tensor([old_ids[:40]])).logits[..., kept]
        assert_close(new(torch.tensor([new_ids[:40]])).logits, expected)
    assert kept[new.config.eos_token_id] == 2
    assert (new.get_output_embeddings().weight is new.get_input_embeddings().weight) == (kind != "llama")


def test_a_text_of_other_words_still_has_tokens(tmp_path: Path) -> None:
    saved("gpt2", tmp_path / "old")
    change = keep_tokens(tmp_path / "old", tmp_path / "new", [TEXT], 295)
    tokenizer = Tokenizer.load(tmp_path / "new")
    assert tokenizer.decode(tokenizer.encode(RARE)) == RARE
    assert change.corpus_before == change.corpus_after


@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens_have_rows_like_the_mean(kind: str, tmp_path: Path) -> None:
    old = saved(kind, tmp_path / "old", spare=3)
    rows, entries = old.config.vocab_size, old.config.vocab_size - 3
    change = add_tokens(tmp_path / "old", tmp_path / "new", ["<tool>", "<end>"], multiple_of=64)
    new = type(old).from_pretrained(tmp_path / "new").eval()
    assert change.rows == -(-rows // 64) * 64
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")("the<tool>cat<end>")["input_ids"]
    assert {entries, entries + 1} <= {*ids}
    for name, table in (("input", old.get_input_embeddings()), ("output", old.get_output_embeddings())):
        now = getattr(new, f"get_{name}_embeddings")().weight
        assert torch.equal(now[:entries], table.weight[:entries])
        assert_close(now[entries:], table.weight[:entries].mean(0).expand(change.rows - entries, -1), torch.bfloat16)
    with torch.no_grad():
        few = torch.arange(5)[None]
        assert_close(new(few).logits[..., :entries], old(few).logits[..., :entries])


def test_added_rows_have_a_billionth_of_the_covariance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = saved("gpt2", tmp_path / "old").transformer.wte.weight.detach().double()
    add_tokens(tmp_path / "old", tmp_path / "new", ["<tool>"], multiple_of=20_000)
    new = load_file(tmp_path / "new" / "model.safetensors")["transformer.wte.weight"][len(old) :].double()
    expected, found = 1e-9 * old.T.cov(correction=0), (new - old.mean(0)).T.cov()
    assert (found - expected).norm() < ESTIMATED * expected.norm()
    assert_close(new.mean(0), old.mean(0), torch.float32)
    with Largest() as largest:
        monkeypatch.setattr(checkpoint_vocabulary, "WEIGHTS", 2**15)
        add_tokens(tmp_path / "old", tmp_path / "blocks", ["<tool>"], multiple_of=20_000)
    assert largest.numbers <= 2**15, "not 320 weights for each of 20,000 rows"
    again = load_file(tmp_path / "blocks" / "model.safetensors")["transformer.wte.weight"][len(old) :]
    assert_close(again, new.float())


def test_the_old_ids_of_other_files_are_moved_or_left_out(tmp_path: Path) -> None:
    saved("bert", tmp_path / "old")
    (tmp_path / "old" / "vocab.txt").write_text("[UNK]\n")
    last = max(vocabulary(tmp_path / "old").values())
    (tmp_path / "old" / "generation_config.json").write_text(json.dumps({"inner": {"image_token_index": last}}))
    change = keep_tokens(tmp_path / "old", tmp_path / "new", [TEXT], 90)
    assert change.left_out == ("vocab.txt",)
    assert not (tmp_path / "new" / "vocab.txt").exists()
    spelled = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert spelled.convert_ids_to_tokens(spelled("the cat")["input_ids"]) == ["[CLS]", "the", "cat", "[SEP]"]
    assert json.loads((tmp_path / "new" / "config.json").read_text())["vocab_size"] == 90
    assert json.loads((tmp_path / "new" / "generation_config.json").read_text())["inner"]["image_token_index"] == 89


# ---------------------------------------------------------------------- what is refused, and what stays


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def killed(self: NewFile) -> None:
    raise KeyboardInterrupt


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("gpt2", tmp_path / "old")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine.txt").write_text("mine")
    with refuses(InputError, "no folder of a model"):
        keep_tokens(tmp_path / "old", tmp_path / "new", [TEXT], 295, force=True)
    (tmp_path / "new" / "config.json").write_text("{}")
    before = listing(tmp_path)
    with refuses(InputError, "not empty"):
        keep_tokens(tmp_path / "old", tmp_path / "new", [TEXT], 295)
    with monkeypatch.context() as patch:
        patch.setattr(NewFile, "settle", killed)
        with pytest.raises(KeyboardInterrupt):
            keep_tokens(tmp_path / "old", tmp_path / "new", [TEXT], 295, force=True)
    assert listing(tmp_path) == before
    keep_tokens(tmp_path / "old", tmp_path / "new", [TEXT], 295, force=True)
    assert not (tmp_path / "new" / "mine.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"], "nothing else is left"


def test_no_output_takes_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, blobs = tmp_path / "above" / "old", tmp_path / "blobs"
    old.mkdir(parents=True)
    saved("gpt2", old)
    for path in (old, tmp_path, tmp_path / "above"):
        (path / "config.json").touch()  # all of them might be replaced
    blobs.mkdir()
    (old / "model.safetensors").rename(blobs / "weights")
    (old / "model.safetensors").symlink_to(blobs / "weights")
    (blobs / "config.json").touch()
    (tmp_path / "link").symlink_to(old)
    before = listing(tmp_path)
    monkeypatch.chdir(old)
    for place in (".", "..", "sub", old, old / "sub", tmp_path, blobs, tmp_path / "link", tmp_path / "link" / "sub"):
        with refuses(InputError, "what is read stays"):
            add_tokens(tmp_path / "link", place, ["<a>"], force=True)
    assert listing(tmp_path) == before


def test_what_cannot_be_changed_is_refused(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    saved("gpt2", old)
    with refuses(InputError, "entries have to be kept", "keep=257"):
        keep_tokens(old, new, [TEXT], 100)
    with refuses(RangeError, "keep", "at most 319"):
        keep_tokens(old, new, [TEXT], 320)
    with refuses(InputError, "'<|endoftext|>'", "already"):
        add_tokens(old, new, ["<|endoftext|>"])
    for wrong in (["<a>", "<a>"], [" "], ["<a\nb>"], ["<a>\u2028"]):
        with refuses(InputError, "of one line, each once"):
            add_tokens(old, new, wrong)
    weights = load_file(old / "model.safetensors")
    save_file({**weights, "bias_of_tokens": torch.zeros(320)}, old / "model.safetensors")
    with refuses(InputError, "bias_of_tokens"):
        add_tokens(old, new, ["<a>"])
    save_file({**weights, "transformer.wte.weight": torch.zeros(321, 8)}, old / "model.safetensors")
    with refuses(InputError, "(321, 8)", "(320, 8)"):
        add_tokens(old, new, ["<a>"])
    save_file({**weights, "transformer.wte.weight": torch.zeros(320, 7)}, old / "model.safetensors")
    with refuses(InputError, "(320, 7)", "(320, 8)"):
        add_tokens(old, new, ["<a>"])
    (old / "tokenizer.json").unlink()
    save_file(weights, old / "model.safetensors")
    with refuses(InputError, "tokenizer.json"):
        add_tokens(old, new, ["<a>"])
    assert not new.exists()
