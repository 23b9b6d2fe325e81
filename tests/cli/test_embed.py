"""`locant embed`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from tests.cli.conftest import Complains, Run, refused
from tests.minilm import MINILM
from tests.tolerances import assert_close


def test_without_anything_it_embeds_the_sample_text(run: Run) -> None:
    result = run("embed")
    assert result.exit_code == 0
    assert result.stderr == ""
    text = " ".join(result.stdout.split())
    assert "[8, 4] → [8, 4, 256] + [4, 256] → [8, 4, 256]" in text
    assert "token [4096, 256] 1,048,576 4.0 MiB 2.0 MiB" in text


def test_json_is_all_there_is_on_stdout(run: Run) -> None:
    result = run("embed text.txt --tokenizer bytes -o x.safetensors --json")
    facts = json.loads(result.stdout)
    assert (facts["vocab_size"], facts["embeddings"], facts["file"]) == (257, [8, 4, 256], "x.safetensors")
    assert [token["text"] for token in facts["first"]] == ["t", "h", "e", "␣", "c", "a", "t", "␣"]
    assert "wrote x.safetensors" in result.stderr


def test_the_file_holds_what_was_asked_for(run: Run, folder: Path) -> None:
    sizes = "--context 8 --batch 3 --d-model 12 --stride 2 --num-heads 2"
    run(f"embed text.txt --tokenizer bytes {sizes} --encoding rotary -o x.safetensors")
    tensors = load_file(folder / "x.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "ids": (3, 8), "targets": (3, 8), "positions": (3, 8), "embeddings": (3, 8, 12),
    }  # fmt: skip
    text = torch.tensor([*(folder / "text.txt").read_bytes()])
    assert torch.equal(tensors["ids"], text.unfold(0, 8, 2)[:3])
    with safe_open(folder / "x.safetensors", "pt") as file:
        assert json.loads(file.metadata()["cos_sin"]) == [8, 3]


def test_a_short_text_is_one_window_and_a_longer_one_is_cut(run: Run, folder: Path) -> None:
    def shape(*texts: str) -> list[int]:
        names = [f"{number}.txt" for number in range(len(texts))]
        for name, text in zip(names, texts, strict=True):
            (folder / name).write_text(text)
        return json.loads(run("embed --tokenizer bytes --json", *names).stdout)["embeddings"]

    assert shape("a") == [1, 1, 256]
    assert shape("a" * 63) == [1, 63, 256]
    assert shape("a" * 64) == [1, 64, 256]
    assert shape("a" * 65) == [8, 4, 256]
    assert shape("a" * 5, "b" * 9) == [2, 9, 256]
    assert shape("a" * 5, "b" * 65) == [8, 4, 256]


def test_one_window_is_one_window(run: Run) -> None:
    result = run("embed - --tokenizer bytes --context 12 --d-model 2 -o x.safetensors", input="hello there")
    assert result.stderr == "wrote x.safetensors: ids, targets, positions and embeddings of 1 window\n"
    assert "1 of 12 tokens, stride 12; embedded here: 1, with 1 place of padding" in " ".join(result.stdout.split())


def test_all_of_a_text_is_embedded_also_its_last_token(run: Run, folder: Path) -> None:
    words = "The cat sat on the mat"
    line = "embed - --tokenizer bytes --context 6 --all --d-model 4 -o x.safetensors --json"
    facts = json.loads(run(line, input=words).stdout)
    assert (facts["source"], facts["characters"], facts["windows"], facts["padding"]) == ("standard input", 22, 4, 2)
    tensors = load_file(folder / "x.safetensors")
    real = tensors["positions"] >= 0
    assert bytes(tensors["ids"][real].tolist()).decode() == words
    assert bytes(tensors["targets"][real].tolist()[:-1]).decode() == words[1:]
    assert tensors["targets"][real][-1] == -100
    assert tensors["targets"][~real].tolist() == [-100, -100]
    assert tensors["ids"][~real].tolist() == [0, 0]


def test_seed_and_scale_reach_the_tables(run: Run) -> None:
    def first(*options: object) -> list[float]:
        result = run("embed text.txt --tokenizer bytes --encoding nope --json", *options)
        return json.loads(result.stdout)["first"][0]["values"]

    assert first() == first("--seed", 0) != first("--seed", 1)
    assert first("--scale", "sqrt_d_model") == [16 * value for value in first()]
    assert first("--scale", "0.5") == [value / 2 for value in first()]


@pytest.mark.parametrize("name", ["the-verdict.txt", "shakespeare.txt"])
def test_the_corpora_run_through(succeeds: Run, corpora: Path, name: str) -> None:
    result = succeeds("embed", corpora / name, "--context", 16, "-o", "x.safetensors", "--json")
    assert json.loads(result.stdout)["embeddings"] == [8, 16, 256]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"", "empty.txt is empty"),
        ("binary.bin", b"\x7fELF\x00\x01", "binary.bin is binary"),
        ("latin.txt", "café".encode("latin-1"), "is not UTF-8: byte 3"),
        ("missing.txt", None, "there is no such file"),
    ],
)
def test_a_text_that_cannot_be_used_is_one_line(
    complains: Complains, folder: Path, name: str, content: bytes | None, words: str
) -> None:
    if content is not None:
        (folder / name).write_bytes(content)
    assert words in complains("embed", name, "-o", "x.safetensors", "--tokenizer", "bytes")


test_an_option_that_cannot_be_used_is_one_line = refused(
    "embed text.txt",
    ("--encoding rotery", "'rotary'"),
    ("--context 0", "0 is not in the range x>=1"),
    ("--batch many", "'many' is not a whole number such as 8192, 8,192 or 1e6"),
    ("--encoding rotary --d-model 10", "got d_model=10 for 4 heads, expected a multiple; try: use a d_model of 8"),
    ("--encoding rotary --d-model 12", "expected an even number"),
    ("--scale big", "got 'big' for scale, expected 'sqrt_d_model' or 'sqrt_d_model_rounded'; try: --scale"),
    ("--tokenizer bytes --vocab-size 300", "try: pass one of the two"),
    ("--vocab-size 100", "got 100 for vocab_size, expected an integer of 257"),
    ("--tokenizer no-such-tokenizer", "found no tokenizer 'no-such-tokenizer'"),
    ("-o x.pt", "name ending in .safetensors; try: use x.safetensors"),
    ("-o no/such/x.safetensors", "there is no folder no/such; try: mkdir -p no/such"),
    ("-o text.txt/x.safetensors", "there is no folder text.txt"),
    ("--contxt 4", "there is no option --contxt; try: --context"),
)


def test_a_folder_in_the_place_of_the_file_is_one_line(complains: Complains, folder: Path) -> None:
    (folder / "x.safetensors").mkdir()
    assert "which is a folder" in complains("embed text.txt -o x.safetensors")


# ---------------------------------------------------------------------- a published model


def test_a_model_embeds_with_its_own_tokenizer_and_tables(run: Run, folder: Path) -> None:
    facts = json.loads(run("embed text.txt --model", MINILM, "--context", 6, "-o", "x.safetensors", "--json").stdout)
    assert (facts["encoding"], facts["vocab_size"], facts["embeddings"]) == ("learned", 30_522, [8, 6, 384])
    assert [token["text"] for token in facts["first"][:4]] == ["the", "cat", "sat", "on"]
    vectors = load_file(folder / "x.safetensors")
    theirs = AutoModel.from_pretrained(MINILM).embeddings
    with torch.no_grad():
        assert_close(vectors["embeddings"], theirs(vectors["ids"]))
    assert "token [30522, 384]" in " ".join(run("embed text.txt --model", MINILM).stdout.split())


def test_a_table_that_holds_nan_is_still_json(run: Run, model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"].fill_(torch.nan)
    save_file(weights, model / "model.safetensors")
    done = run("embed text.txt --model model --json")
    assert json.loads(done.stdout)["first"][0]["values"] == [None] * 4


def test_what_a_model_decides_is_not_an_option_beside_it(complains: Complains) -> None:
    assert "--d-model, --scale" in complains("embed --model", MINILM, "--d-model", 4, "--scale", 2)
    assert "--tokenizer" in complains("embed text.txt --model", MINILM, "--tokenizer", "bytes")


def test_the_weights_of_a_model_are_not_written_over(complains: Complains, folder: Path) -> None:
    (folder / "m").mkdir()
    for file in MINILM.glob("*.*"):
        (folder / "m" / file.name).symlink_to(file)
    assert "pass another path as output" in complains("embed text.txt --model m -o m/model.safetensors")
