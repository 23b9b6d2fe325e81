"""RULER's rows against solvers that do not know how they were made, and models that answer, guess, or read a part."""

from __future__ import annotations

import re
from bisect import bisect
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import locant
from locant.errors import InputError, LocantError
from locant.lab.ruler import TASKS, ask, prompt, rows, score, write_answer
from locant.text.reading import sample_text
from tests.refusal import refuses
from tests.tolerances import FEW_ROUNDINGS


@pytest.fixture(scope="module")
def tokenizer() -> locant.Tokenizer:
    return locant.Tokenizer.train([sample_text()[:100_000]], 1000)


def needle(text: str) -> list[str]:
    key = re.findall(r"What is the secret \w+ of (\S+)\?", text)[-1]
    return re.findall(rf"The secret \w+ of {key} is (\S+)\.", text)


def variables(text: str) -> list[str]:
    text = text.split("\n\n", 4)[-1]
    value, known = re.findall(r"Which variables have the value (\d{5})\?", text)[-1], list[str]()
    for name, its in re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)\.", text):
        known += [name] if its == value or its in known else []
    return known


def most_common(count: int, pattern: str, text: str) -> list[str]:
    words, counts = zip(*Counter(re.findall(pattern, text)).most_common(count + 1), strict=True)
    assert counts[-2] > counts[-1], "which are asked for is not known"
    return [*words[:-1]]


SOLVERS = {
    "niah_single_1": needle, "niah_multikey_2": needle, "niah_multikey_3": needle, "vt": variables,
    "cwe": lambda text: most_common(10, r"\d+\. ([a-z-]+)", text.split("words are: ", 1)[1].split("\n\n", 1)[1]),
    "fwe": lambda text: most_common(3, r"\b[a-z]{6}\b", text.split("\n\n")[1]),
}  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [1_000, 4_500])
def test_answers_follow_from_complete_rows(name: str, length: int, tokenizer: locant.Tokenizer) -> None:
    for seed in range(3):
        row = prompt(name, tokenizer, length, seed)
        assert row is not None
        text = tokenizer.decode(row.ids)
        assert sorted(SOLVERS[name](text)) == sorted(row.answers)
        assert length * 0.85 < len(row.ids) + row.most <= length
        assert text.endswith((" is", " are:"))
    assert (
        prompt(name, tokenizer, length, 0) == prompt(name, tokenizer, length, 0) != prompt(name, tokenizer, length, 1)
    )


@pytest.mark.parametrize("name", TASKS)
def test_a_row_that_does_not_fit_is_not_asked(name: str, tokenizer: locant.Tokenizer) -> None:
    least = bisect(range(2_000), False, key=lambda length: prompt(name, tokenizer, length, 0) is not None)
    at = {length: rows(name, tokenizer, length, 1) for length in (least - 1, least, least + 1)}
    assert [len(each) for each in at.values()] == [0, 1, 1]
    [row] = at[least]
    assert len(row.ids) + row.most == least
    assert ask(None, tokenizer, []) == {"asked": 0, "score": None, "tokens": [], "first": None}


def test_needles_lie_everywhere_and_others_are_of_their_kind(tokenizer: locant.Tokenizer) -> None:
    places = list[float]()
    for seed in range(40):
        row = prompt("niah_multikey_2", tokenizer, 1_000, seed)
        assert row is not None
        lines = re.findall(r"The secret number of (\S+) is (\d{7})\.", tokenizer.decode(row.ids))
        values = [value for _, value in lines]
        assert len(lines) > 15
        assert values.count(row.answers[0]) == 1
        places.append(values.index(row.answers[0]) / (len(lines) - 1))
    assert min(places) < 0.1
    assert max(places) > 0.9
    assert 0.3 < sum(places) / len(places) < 0.7


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2", "niah_multikey_3"])
def test_a_needle_lies_where_it_was_asked_for(name: str, tokenizer: locant.Tokenizer) -> None:
    for depth in (0.0, 0.25, 0.5, 1.0):
        first, other = rows(name, tokenizer, 1_000, 2, depth)
        for row in (first, other):
            lines = re.findall(r"(?m)^The (?:secret|grass) .+", tokenizer.decode(row.ids))
            [place] = [at for at, line in enumerate(lines) if row.answers[0] in line]
            assert place == round(depth * (len(lines) - 1))
        assert first.answers != other.answers
        assert first.answers != rows(name, tokenizer, 1_000, 1)[0].answers, "of another depth"


def test_a_score_is_the_share_of_the_answers_in_the_text() -> None:
    assert [score(text, ["ab", "CD"]) for text in ("", "xaby", "cd AB", "a b")] == [0.0, 0.5, 1.0, 0.0]


class Reader(nn.Module):
    """Reads the row as text, solves it, and writes the answers; or what it is told to."""

    def __init__(self, tokenizer: locant.Tokenizer, solve: Any, reads: int | None = None) -> None:
        super().__init__()
        self.tokenizer, self.solve, self.reads = tokenizer, solve, reads
        self.head = nn.Linear(tokenizer.vocab_size, tokenizer.vocab_size, bias=False)
        nn.init.eye_(self.head.weight)
        self.device, self.generation_config = torch.device("cpu"), SimpleNamespace(eos_token_id=[0])

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: Tensor, past_key_values: Any, use_cache: bool) -> Any:
        before = [*(past_key_values or []), *ids[0].tolist()]
        text = self.tokenizer.decode(before)
        asked = max(text.rfind(end) + len(end) for end in (" is", " are:"))
        answers = self.tokenizer.encode(" " + " ".join(self.solve(text[:asked]))).tolist()
        given = len(self.tokenizer.encode(text[:asked]))
        token = [*answers, 0][min(len(before) - given, len(answers))]
        hidden = torch.nn.functional.one_hot(torch.tensor([[token] * ids.shape[1]]), self.tokenizer.vocab_size).float()
        return SimpleNamespace(
            logits=self.head(hidden[:, -self.reads :] if self.reads else hidden), past_key_values=before
        )


@pytest.mark.parametrize("name", TASKS)
def test_a_model_that_reads_the_answer_has_all_points_and_one_that_guesses_none(
    name: str, tokenizer: locant.Tokenizer
) -> None:
    asked = rows(name, tokenizer, 1_200, 3)
    found = ask(Reader(tokenizer, SOLVERS[name]), tokenizer, asked)
    assert (found["asked"], found["score"]) == (3, 1.0)
    assert found["tokens"] == [len(row.ids) for row in asked]
    first = ask(Reader(tokenizer, lambda text: SOLVERS[name](text)[:1]), tokenizer, asked)
    assert first["score"] == pytest.approx(1 / len(asked[0].answers), rel=FEW_ROUNDINGS, abs=0), "of several one"
    nothing = ask(Reader(tokenizer, lambda text: ["the", "grass"]), tokenizer, asked)
    assert nothing["score"] == 0
    assert nothing["first"] == {"wrote": " the grass", "expected": list(asked[0].answers)}
    with refuses(InputError, f"reads 64 of {len(asked[0].ids):,} tokens", "lengths=(64,)"):
        ask(Reader(tokenizer, SOLVERS[name], reads=64), tokenizer, asked)


@pytest.fixture(scope="module")
def llama(tokenizer: locant.Tokenizer) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(**sizes, vocab_size=tokenizer.vocab_size + 7, initializer_range=0.3, eos_token_id=5)
        return LlamaForCausalLM(config).eval()


def test_weights_that_were_never_trained_know_nothing(tokenizer: locant.Tokenizer, llama: Any) -> None:
    assert [ask(llama, tokenizer, rows(name, tokenizer, 1_000, 1))["score"] for name in TASKS] == [0.0] * 6


def test_what_is_written_is_what_transformers_generates(tokenizer: locant.Tokenizer, llama: Any) -> None:
    """With the cache; and without, for models that have none, or need whole texts."""
    row = prompt("niah_single_1", tokenizer, 300, 0)
    assert row is not None
    ids = torch.tensor([row.ids])
    rest = llama.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=row.most, do_sample=False, pad_token_id=0,
        suppress_tokens=[*range(tokenizer.vocab_size, tokenizer.vocab_size + 7)],
    )[0, len(row.ids) :]  # fmt: skip
    expected = tokenizer.decode([number for number in rest.tolist() if number != 5])
    assert write_answer(llama, tokenizer, row) == expected
    assert len(expected) > 20

    def of_whole_texts(given: Tensor, cache: object = None, use_cache: bool = False) -> Any:
        if cache is not None:
            raise LocantError("got a part of a text", "all of it")
        return SimpleNamespace(logits=llama(given, use_cache=False).logits, cache="some")

    def of_unknown_cache(given: Tensor, memory: object = None, use_cache: bool = False) -> Any:
        assert memory is None
        return SimpleNamespace(logits=llama(given, use_cache=False).logits, memory="some")

    def cacheless(given: Tensor, past_key_values: object, use_cache: bool) -> Any:
        assert past_key_values is None
        return SimpleNamespace(logits=llama(given, use_cache=False).logits, past_key_values=None)

    plain = SimpleNamespace(
        device=llama.device,
        generation_config=llama.generation_config,
        get_output_embeddings=llama.get_output_embeddings,
        forward=staticmethod(cacheless),
    )
    for forward in (of_whole_texts, of_unknown_cache, cacheless):
        call = {"__call__": staticmethod(forward), "forward": staticmethod(forward)}
        assert write_answer(type("Other", (), {**vars(plain), **call})(), tokenizer, row) == expected


def test_a_tokenizer_that_loses_a_part_of_a_question_is_refused() -> None:
    letters = {each: place for place, each in enumerate(" \n" + "".join(map(chr, range(33, 127))))}
    for lost in ("7", "g"):
        vocab = {each: place for place, each in enumerate(each for each in letters if each != lost)}
        some = locant.Tokenizer.from_json(tokenizers.Tokenizer(BPE(vocab, [])).to_str())
        with refuses(InputError, "do not spell the rows of niah_single_1", "keys=0"):
            rows("niah_single_1", some, 2_000, 8)


def test_a_row_begins_as_the_file_says_and_is_not_cut_as_it_says(tokenizer: locant.Tokenizer) -> None:
    library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    library.post_processor = TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 999)])
    library.enable_truncation(16)
    library.enable_padding(length=24)
    row, plain = (prompt("vt", each, 1_000, 0) for each in (locant.Tokenizer.from_json(library.to_str()), tokenizer))
    assert row is not None
    assert plain is not None
    assert row.ids == [999, *plain.ids]
