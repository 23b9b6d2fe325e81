"""Ask a language model the questions of six RULER tasks that need no corpus (Hsieh et al. 2024, arXiv 2404.06654).

The tasks, their sizes, the number of generated tokens and the score are the same as in RULER. The words and the wording
are different, so scores are similar to the published scores but not equal. The model writes the most probable token at
each step. The score of a row is the share of its answers that the generated text contains.

Rows are never truncated, because a truncated row cannot be answered, and a score of zero would not show the reason.
Each row is as long as possible, with room for the generated tokens. It is an error if the tokens do not spell the whole
row, or if the model reads fewer tokens than it is given. Chat templates are not used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import Any, NamedTuple
from uuid import UUID

import torch
from torch import Tensor, nn

from locant.errors import InputError, Remedy
from locant.gguf_file import find_gguf, open_gguf
from locant.lab.decoder import Decoder
from locant.lab.results import read_earlier
from locant.lab.sampling import call_with_cache_if_supported, generate
from locant.swapping.forward_arguments import cache_argument
from locant.text.reading import sample_text
from locant.text.tokenizer import Tokenizer

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
HOPS, COMMON = 4, 10


class Question(NamedTuple):
    """A text with its question, the opening of the answer, and the answers that must follow."""

    text: str
    opening: str
    answers: tuple[str, ...]


class Prompt(NamedTuple):
    """A question as tokens, its answers, and the largest number of tokens that the model may write."""

    ids: list[int]
    answers: tuple[str, ...]
    most: int


class RulerTask(NamedTuple):
    """A task of RULER.

    `make` returns a question from a random generator, a size in lines or words, a length in tokens and the depth of
    the needle. `least` is the smallest size. `writes` is RULER's limit for generated tokens. The limit is raised if the
    answers need more tokens.
    """

    make: Callable[[Random, int, int, float | None], Question]
    least: int
    writes: int


@cache
def words() -> list[str]:
    """Return about 2,300 words from Python's built-in documentation. They depend on the version of Python."""
    return sorted({*re.findall(r"\b[a-z]{4,10}\b", sample_text())})


def _key(draw: Random) -> str:
    return "-".join(draw.choices(words(), k=2))


def _number(draw: Random) -> str:
    return str(draw.randrange(10**6, 10**7))


def _code(draw: Random) -> str:
    return str(UUID(int=draw.getrandbits(128), version=4))


def _needle(
    what: str, key_of: Callable[[Random], str], value_of: Callable[[Random], str], filler: str,
    draw: Random, size: int, _: int, depth: float | None,
) -> Question:  # fmt: skip
    """Return a question about a line with a key and its value. The other lines are filler, or have other keys."""
    key, value = key_of(draw), value_of(draw)
    others = [other for _ in range(size) if (other := key_of(draw)) != key]
    lines = [filler or f"The secret {what} of {other} is {value_of(draw)}." for other in others]
    place = draw.randrange(len(lines) + 1) if depth is None else round(depth * len(lines))
    lines.insert(place, f"The secret {what} of {key} is {value}.")
    text = "\n".join([f"Keep the secret {what}s of this text in mind.", "", *lines, ""])
    return Question(f"{text}\nWhat is the secret {what} of {key}?", f" The secret {what} of {key} is", (value,))


def _chain(draw: Random, size: int, letters: int) -> Question:
    """Return a question about a chain of assignments that are scattered among lines of filler."""
    names = dict[str, None]()
    while len(names) <= HOPS:
        names["".join(draw.choices(ascii_uppercase, k=letters))] = None
    value = str(draw.randrange(10**4, 10**5))
    steps = zip(names, [value, *(f"VAR {name}" for name in names)], strict=False)
    places = sorted(draw.choices(range(size + 1), k=len(names)))
    lines = [FILLER] * size
    for place, (name, assigned) in reversed([*zip(places, steps, strict=True)]):
        lines.insert(place, f"VAR {name} = {assigned}.")
    text = "\n".join(["Lines of this text give variables a value, or that of another variable.", "", *lines, ""])
    opening = f" The {len(names)} variables with the value {value} are:"
    return Question(f"{text}\nWhich variables have the value {value}?", opening, tuple(names))


def _word_list(draw: Random, size: int, often: int, seldom: int) -> Question:
    """Return a question about a list of `size` different words. Ten of them occur more often than the others."""
    chosen = draw.sample(words(), size) if size <= len(words()) else [*dict.fromkeys(_key(draw) for _ in range(size))]
    items = [*chosen[:COMMON] * often, *chosen[COMMON:] * seldom]
    draw.shuffle(items)
    text = f"Some words of this list stand there more often than the others.\n\n{_number_items(items)}"
    question = f"{text}\n\nWhich {COMMON} words stand there most often?"
    return Question(question, f" The {COMMON} words are:", tuple(chosen[:COMMON]))


def _number_items(items: Sequence[str]) -> str:
    return " ".join(f"{number}. {item}" for number, item in enumerate(items, 1))


def _common_words(draw: Random, size: int, length: int, *_: object) -> Question:
    example, often = ((20, 3, 1), (6, 1)) if length < 4096 else ((40, 10, 3), (30, 3))
    return _with_example(_word_list(draw, *example), _number_items, _word_list(draw, size, *often))


def _with_example(example: Question, shown: Callable[[Sequence[str]], str], question: Question) -> Question:
    """Put an example with its answer before a question."""
    return question._replace(text=f"{example.text}{example.opening} {shown(example.answers)}\n\n{question.text}")


def _frequent_words(draw: Random, size: int, *_: object) -> Question:
    """Return a question about words of random letters.

    The count of the k-th most frequent word is proportional to 1 / k². The most frequent "word" is three dots.
    """
    counts = [*takewhile(bool, (int(size * 6 / (math.pi * k) ** 2) for k in range(1, size)))]
    coded = ["...", *("".join(draw.choices(ascii_lowercase, k=6)) for _ in counts[1:])]
    items = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
    draw.shuffle(items)
    text = f"These are words of a secret language, and dots, which mean nothing.\n\n{' '.join(items)}"
    question = f"{text}\n\nWhich three words stand there most often?"
    return Question(question, " The three words that stand there most often are:", tuple(coded[1:4]))


TASKS: Mapping[str, RulerTask] = {
    "niah_single_1": RulerTask(partial(_needle, "number", _key, _number, FILLER), 1, 128),
    "niah_multikey_2": RulerTask(partial(_needle, "number", _key, _number, ""), 1, 128),
    "niah_multikey_3": RulerTask(partial(_needle, "code", _code, _code, ""), 1, 128),
    "vt": RulerTask(lambda draw, size, *_: _with_example(_chain(draw, 5, 3), " ".join, _chain(draw, size, 5)), 5, 30),
    "cwe": RulerTask(_common_words, COMMON + 1, 120),
    "fwe": RulerTask(_frequent_words, 80, 50),  # so that the fourth word is less frequent than the third
}
"""The tasks by their names in RULER."""


def score(written: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that a text contains. Case is ignored.

    >>> score("The words are: Tower, lake", ["tower", "lake", "hat", "coin"])
    0.5
    """
    return sum(answer.lower() in written.lower() for answer in answers) / len(answers)


def rows(task: str, tokenizer: Tokenizer, length: int, count: int, depth: float | None = None) -> list[Prompt]:
    """Return the first `count` rows of a task, without rows that do not fit even at the smallest size."""
    prompts = (prompt(task, tokenizer, length, seed, depth) for seed in range(count))
    return [row for row in prompts if row is not None]


def prompt(name: str, tokenizer: Tokenizer, length: int, seed: int, depth: float | None = None) -> Prompt | None:
    """Return the largest row that fits into `length` tokens with its answer, or ``None`` if the smallest is too long.

    Args:
        depth: the place of the needle, from 0 at the beginning to 1 at the end. Default: a random place, as in RULER.

    Raises:
        InputError: the tokens do not spell the row.
    """
    task, begin, row = TASKS[name], tokenizer.beginning, f"{name} {seed}" + f" {depth}" * (depth is not None)

    def question_of(size: int) -> tuple[list[int], Question]:
        question = task.make(Random(row), size, length, depth)
        return [*begin, *tokenizer.encode(question.text + question.opening).tolist()], question

    most = max(task.writes, len(tokenizer.encode(f" {', '.join(question_of(task.least)[1].answers)}")))

    def fits(size: int) -> bool:
        return len(question_of(size)[0]) + most <= length

    size = step = task.least
    if not fits(size):
        return None
    while fits(size + step):
        size, step = size + step, 2 * step
    while step := step // 2:
        size += step * fits(size + step)
    ids, question = question_of(size)
    spelled, text = ("".join(each.split()).lower() for each in (tokenizer.decode(ids[len(begin) :]), question.text))
    if not spelled.startswith(text):
        got = f"got a tokenizer whose tokens do not spell the rows of {name}: a part of each would be lost"
        raise InputError(got, Remedy("use the tokenizer of the model, other {}, or {}", tasks=..., keys=0))
    return Prompt(ids, question.answers, most)


def has_chat_template(folder: str | Path) -> bool:
    """Return whether the files of a model, or its GGUF file, contain a chat template."""
    if (gguf := find_gguf(folder)) is not None:
        return open_gguf(gguf).value("tokenizer.chat_template") is not None
    path = Path(folder)
    return (path / "chat_template.jinja").is_file() or "chat_template" in read_earlier(path / "tokenizer_config.json")


@torch.no_grad()
def write_answer(model: Any, tokenizer: Tokenizer, prompt: Prompt) -> str:
    """Return the text that a model writes after a prompt. At each step, the model takes the most probable token.

    A model of `transformers` stops at an end-of-text token, when the text contains all answers, or after `Prompt.most`
    tokens. A `Decoder` always writes `Prompt.most` tokens.

    If the name of the model's cache is unknown, or if the encoding needs whole texts, no cache is used. Then the model
    reads the whole text again for each token.

    Args:
        model: a model of `transformers`, or a decoder of the lab.

    Raises:
        InputError: the model reads fewer tokens than it is given.
    """
    if isinstance(model, Decoder):
        ids = torch.tensor(prompt.ids, device=model.norm.weight.device)
        return tokenizer.decode(generate(model, ids, prompt.most, temperature=0)[len(ids) :].tolist())
    return call_with_cache_if_supported(partial(_write_answer, model, tokenizer, prompt))


def _write_answer(model: Any, tokenizer: Tokenizer, prompt: Prompt, with_cache: bool) -> str:
    ends = getattr(model.generation_config, "eos_token_id", None)
    name, cache = cache_argument(model), None
    whole = unread = torch.tensor([prompt.ids], device=model.device)
    ids, text = list[int](), ""

    def last(head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keep only the hidden state of the last token, because no other logits are needed."""
        if (read := args[0].shape[1]) != unread.shape[1]:
            got = f"got a model that reads {read:,} of {unread.shape[1]:,} tokens"
            raise InputError(got, Remedy(lengths=(read,)))
        return (args[0][:, -1:],)

    with model.get_output_embeddings().register_forward_pre_hook(last):
        while len(ids) < prompt.most and score(text, prompt.answers) < 1:
            cache_arguments = {} if name is None else {name: cache}
            output = model(unread, use_cache=with_cache and name is not None, **cache_arguments)
            cache = None if name is None or not with_cache else getattr(output, name, None)
            token = output.logits[:, -1, : tokenizer.vocab_size].argmax(-1, keepdim=True)
            if token.item() in (ends if isinstance(ends, list) else [ends]):
                break
            ids.append(int(token))
            text = tokenizer.decode(ids)
            whole = torch.cat([whole, token], 1)
            unread = whole if cache is None else token
    return text


def ask(model: Any, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return the score of a model's answers. The result includes its first text, which can explain a low score."""
    texts = [write_answer(model, tokenizer, prompt) for prompt in prompts]
    scores = [score(text, prompt.answers) for text, prompt in zip(texts, prompts, strict=True)]
    return {
        "asked": len(prompts),
        "score": sum(scores) / len(scores) if scores else None,
        "tokens": [len(prompt.ids) for prompt in prompts],
        "first": {"wrote": texts[0], "expected": list(prompts[0].answers)} if prompts else None,
    }
