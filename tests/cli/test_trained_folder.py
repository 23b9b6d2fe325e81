"""Every verb that takes the folder of a model takes one of `locant train`; numbers are those of NumPy and torch."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file
from torch.nn import functional as F

import locant
from locant.cli import main
from locant.lab import Decoder, load, save
from locant.lab.audit_subject import SLOPE_CHANGES
from locant.lab.evaluation import evaluate_model, usual_settings
from locant.positions.registry import encodings
from tests.cli.conftest import Complains, Run
from tests.cli.test_generate import UNTOLD
from tests.refusal import refuses
from tests.tolerances import LOGITS, SIX_DIGITS

WORDS = ("cat", "rat", "dog", "owl"), ("mat", "hat")
TEXT = "".join(f"the {animal} sat on the {place}; " for animal in WORDS[0] for place in WORDS[1])
TRAIN = "train text.txt --vocab-size 280 --train-length 32 --steps"
KINDS = {"rotary": "Rotary", "learned": "Learned", "alibi": "ALiBi", "nope": "none"}
STEPS = {"rotary": 20, "learned": 2, "alibi": 2, "nope": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of folders that `locant train` wrote, one for each of these encodings."""
    place, before = tmp_path_factory.mktemp("trained"), Path.cwd()
    (place / "text.txt").write_text(TEXT * 40)
    os.chdir(place)
    try:
        for name, steps in STEPS.items():
            done = CliRunner().invoke(main, [*f"{TRAIN} {steps} --encoding {name} -o {name}".split()])
            assert done.exit_code == 0, done.output
    finally:
        os.chdir(before)
    return place


@pytest.fixture
def models(trained: Path, folder: Path) -> Path:
    """Copies of them in the current folder."""
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    return folder


def weights(model: Path, end: str) -> np.ndarray:
    """The one tensor in the file whose name ends so."""
    [found] = [each for name, each in load_file(model / "model.safetensors").items() if name.endswith(end)]
    return found


def test_explain_prints_the_sizes_that_are_in_the_file(succeeds: Run, models: Path) -> None:
    for name in STEPS:
        facts = json.loads(succeeds(f"explain {name} --json").stdout)
        table = weights(models / name, "token.weight")
        tokens = facts["tables"][0]
        assert (tokens["shape"], tokens["parameters"]) == ([*table.shape], table.size)
        assert tokens["bytes"] == {"float32": table.nbytes, "bfloat16": table.nbytes // 2}
        assert facts["longest"] == facts["trained"] == 32
        assert facts["tied"]
        assert facts["layers"][0]["kind"] == KINDS[name]
        assert facts["vllm"]["answer"] == "no"
        assert json.loads(succeeds(f"explain {name}/config.json --json").stdout)["tables"] == facts["tables"]
    rotary = json.loads(succeeds("explain rotary --json").stdout)["layers"][0]["rotary"]
    wavelengths = [2 * math.pi * 10_000 ** (2 * pair / 16) for pair in range(8)]
    assert [pair["wavelength"] for pair in rotary["pairs"]] == pytest.approx(wavelengths, rel=SIX_DIGITS, abs=0)
    [_, positions] = json.loads(succeeds("explain learned --json").stdout)["tables"]
    assert positions["shape"] == [32, 64]
    shown = succeeds("explain learned").stdout
    assert "in windows of 32 tokens" in shown
    assert "Learned(max_seq_len=32, d_model=64)" in shown


def test_neighbours_are_the_nearest_rows_of_the_table(succeeds: Run, models: Path) -> None:
    table = weights(models / "rotary", "token.weight").astype(np.float64)
    tokenizer = locant.Tokenizer.load(models / "rotary")
    [word] = tokenizer.encode(" cat").tolist()
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    cosines = unit @ unit[word]
    expected = [one for one in np.argsort(-cosines).tolist() if one != word][:5]
    found = json.loads(succeeds("neighbours rotary cat -k 5 --json").stdout)
    assert [each["id"] for each in found["nearest"]] == expected
    assert [each["cosine"] for each in found["nearest"]] == pytest.approx(cosines[expected].tolist(), abs=LOGITS)


def test_the_input_of_a_trained_model_is_its_tables_added_and_normed(models: Path) -> None:
    ids = torch.tensor([[5, 200, 7]])
    rows = (
        torch.from_numpy(weights(models / "learned", "token.weight"))[ids] * 8
        + torch.from_numpy(weights(models / "learned", "encoding.weight"))[:3]
    )
    norm = (torch.from_numpy(weights(models / "learned", f"embedding.norm.{part}")) for part in ("weight", "bias"))
    embedding = locant.InputEmbedding.from_pretrained(models / "learned")
    assert torch.allclose(embedding(ids), F.layer_norm(rows, (64,), *norm), atol=LOGITS, rtol=0)


@pytest.mark.parametrize("name", [name for name in encodings() if name not in UNTOLD])
def test_the_input_with_any_encoding_is_that_of_the_decoder(name: str, tmp_path: Path) -> None:
    from tests.lab.test_decoder import decoder

    model = decoder(name)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    save(model, locant.Tokenizer.bytes(), tmp_path / "saved")
    ids = torch.arange(5)[None]
    assert torch.equal(locant.InputEmbedding.from_pretrained(tmp_path / "saved")(ids), model.embedding(ids))


@pytest.mark.slow
def test_probe_measures_what_the_model_learned(succeeds: Run, complains: Complains, models: Path) -> None:
    found = locant.probe(models / "rotary")
    assert isinstance(found.encoding, locant.Rotary)
    frequencies = found.encoding.inv_freq.double().numpy()
    np.testing.assert_allclose(frequencies, 10_000.0 ** (-np.arange(8) / 8), rtol=SIX_DIGITS)
    assert "slopes 0.25, 0.0625, 0.01562, 0.003906" in str(locant.probe(load(models / "alibi")[0]))
    assert "slopes 0.25, 0.0625, 0.01562, 0.003906" in succeeds("probe alibi").stdout
    assert "Learned, called as encoding.embed" in succeeds("probe learned").stdout
    assert "no positions (NoPE); try: train one with locant train" in complains("probe nope")
    with refuses(locant.InputError, "whose Learned has weights", "pass the path of its folder"):
        locant.probe(json.loads((models / "learned" / "config.json").read_text()))


def test_probe_measures_slopes_that_were_learned(succeeds: Run, models: Path) -> None:
    bias = locant.ALiBi(4, learned=True)
    with torch.no_grad():
        bias.slopes.copy_(torch.tensor([0.5, 0.75, 0.125, -0.25]))
    model = Decoder(257, bias, d_model=64, num_layers=1, num_heads=4)
    save(model, locant.Tokenizer.bytes(), "slopes")
    assert "slopes 0.5, 0.75, 0.125, -0.25" in succeeds("probe slopes").stdout


def of_windows(model: Decoder, ids: np.ndarray, length: int, windows: int) -> float:
    """Nats per token by torch's own cross-entropy, window by window."""
    rows = torch.from_numpy(ids[: windows * length + 1].astype(np.int64))
    with torch.no_grad():
        logits = model(rows[:-1].view(windows, length))
    return float(F.cross_entropy(logits.flatten(0, 1), rows[1:]))


def with_encoding(model: Path, encoding: locant.PositionEncoding) -> Decoder:
    """The weights of a folder in a decoder that is built with another encoding."""
    config = json.loads((model / "config.json").read_text())
    sizes = {name: config[name] for name in ("d_model", "num_layers", "num_heads")}
    decoder = Decoder(config["vocab_size"], encoding, **sizes)
    tensors = load_file(model / "model.safetensors")
    decoder.load_state_dict({name: torch.from_numpy(each) for name, each in tensors.items()})
    return decoder.eval()


def test_evaluate_measures_the_loss_with_its_own_and_with_other_encodings(models: Path) -> None:
    stretched = locant.Rotary(16, scaling=locant.scaling.YaRN(factor=4.0, original_max_seq_len=32))
    built: dict[str, locant.PositionEncoding] = {
        "own": locant.Rotary(16), "nope": locant.PositionEncoding(), "yarn:4": stretched, "alibi": locant.ALiBi(4),
    }  # fmt: skip
    settings = usual_settings("rotary", lengths=(16, 64), ways=(*built,), windows=4)
    found = evaluate_model("rotary", ["text.txt"], settings, output=Path("out"))
    ids = locant.Tokenizer.load(models / "rotary").encode((models / "text.txt").read_text())
    for record in found["records"]:
        decoder = with_encoding(models / "rotary", built[record["encoding"]])
        for length, windows in ((16, 16), (64, 4)):
            loss = of_windows(decoder, ids, length, windows)
            assert record["loss_by_length"][str(length)] == pytest.approx(loss, abs=LOGITS)
        assert record["num_parameters"] == sum(each.numel() for each in decoder.parameters())
    assert found["settings"]["text"]["trained_length"] == 32


@pytest.mark.slow
def test_the_verb_evaluate_writes_its_report(succeeds: Run, models: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `lab`")
    printed = succeeds("evaluate rotary text.txt --windows 2").stdout
    assert "pass keys" not in printed
    assert (models / "report" / "report.html").is_file()


@pytest.mark.usefixtures("models")
def test_evaluate_chooses_lengths_that_suit_a_small_model(complains: Complains) -> None:
    for name, lengths, ways in (
        ("rotary", (16, 32, 64, 128), ("own", "yarn:4")), ("learned", (16, 32), ("own", "nope")),
    ):  # fmt: skip
        settings = usual_settings(name, windows=2)
        assert (settings.lengths, settings.ways, settings.keys, settings.windows) == (lengths, ways, 0, 2)
    assert "whose table has 32 positions; try: use --lengths 32" in complains("evaluate learned text.txt --lengths 64")
    assert "which is not rotary" in complains("evaluate alibi text.txt --with yarn:2")
    assert "which is not rotary" in complains("generate alibi the --with exact")


def test_generate_writes_with_other_positions(succeeds: Run, models: Path) -> None:
    written = json.loads(succeeds("generate rotary 'the cat' --tokens 6 --temperature 0 --with nope --json").stdout)
    decoder, ids = with_encoding(models / "rotary", locant.PositionEncoding()), [*written["prompt_ids"]]
    for _ in range(6):
        ids.append(int(decoder(torch.tensor([ids]))[0, -1].argmax()))
    assert written["ids"] == ids[-6:]


@pytest.mark.slow
def test_audit_finds_the_positions_of_the_training(succeeds: Run, run: Run, models: Path) -> None:
    succeeds(f"{TRAIN} 120 -o rotary --force")
    asked = "audit rotary --text text.txt --length 32 --json"
    found = json.loads(succeeds(asked).stdout)
    assert found["best"] == "the configuration"
    assert "interleaved layout" in found["dropped"]
    ids = locant.Tokenizer.load(models / "rotary").encode((models / "text.txt").read_text())
    loss = of_windows(load(models / "rotary")[0], ids, 32, found["windows"])
    assert found["losses"]["the configuration"] == pytest.approx(loss, abs=LOGITS)
    config = json.loads((models / "rotary" / "config.json").read_text())
    config["encoding"]["options"]["layout"] = "interleaved"
    (models / "rotary" / "config.json").write_text(json.dumps(config))
    damaged = run(asked)
    assert damaged.exit_code == 1
    found = json.loads(damaged.stdout)
    assert (found["verdict"], found["best"]) == ("another fits", "half layout")
    assert found["losses"]["half layout"] == pytest.approx(loss, abs=LOGITS)


@pytest.mark.usefixtures("models")
def test_audit_says_what_it_does_not_read_otherwise(succeeds: Run, run: Run) -> None:
    assert "a table of learned positions" in succeeds("audit learned").stdout.replace("\n         ", " ")
    assert "nope has no positions" in succeeds("audit nope").stdout
    read = json.loads(run("audit alibi --text text.txt --length 32 --json").stdout)
    assert {*read["losses"]} == {"the configuration", *(f"ALiBi: {one}" for one in SLOPE_CHANGES)}


def test_verbs_for_other_programs_say_what_to_do(complains: Complains, models: Path) -> None:
    for line, what in (
        ("extend rotary --to 64", "measure a scaling with locant evaluate"),
        ("serve-args rotary --to 64 --for vllm", "measure a scaling with locant evaluate"),
        ("convert rotary --to interleaved -o other", "keep its weights as they are"),
        ("tune rotary text.txt --with yarn:2", "train it again with locant train"),
    ):
        assert what in complains(line)


def change(**values: Any) -> Callable[[Path], object]:
    """A change of entries of `config.json`; ``None`` takes one out."""

    def damage(model: Path) -> None:
        config = {**json.loads((model / "config.json").read_text()), **values}
        kept = {name: each for name, each in config.items() if each is not None}
        (model / "config.json").write_text(json.dumps(kept))

    return damage


def cut(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


WHOLE = ("explain learned", "probe learned")
ROWS = ("neighbours learned cat", "embed --model learned text.txt")
READ = (
    "audit learned --text text.txt", "evaluate learned text.txt --lengths 16 -o out", "generate learned the --tokens 5",
)  # fmt: skip
OPTIONS = {"max_seq_len": 32, "d_model": 64}
DAMAGES: dict[str, tuple[Callable[[Path], object], tuple[str, ...], str]] = {
    "no weights": (
        lambda model: (model / "model.safetensors").unlink(), (*ROWS, *READ, WHOLE[1]), "without model.safetensors",
    ),
    "cut weights": (cut, (*ROWS, *READ, WHOLE[1]), "is not an intact safetensors file"),
    "a pickle": (
        lambda model: (model / "model.safetensors").rename(model / "model.pt"), (*ROWS, *READ, WHOLE[1]),
        "model.pt, a pickle, which can run any code when it is opened; try: write the same weights as safetensors",
    ),
    "no tokenizer": (lambda model: (model / "tokenizer.json").unlink(), (*ROWS, *READ[1:]), "holds no tokenizer.json"),
    "no encoding": (change(encoding=None), (*WHOLE, ROWS[1], *READ), "without encoding; try: copy the folder again"),
    "an extension's encoding": (
        change(encoding={"name": "of_yours", "options": {}}), (*WHOLE, ROWS[1], *READ),
        "'of_yours', which no installed package registers; try: install the package",
    ),
    "an unknown option": (
        change(encoding={"name": "learned", "options": {**OPTIONS, "colour": 1}}), (*WHOLE, ROWS[1], *READ),
        "got colour=1",
    ),
    "an encoding that is a word": (change(encoding="learned"), (*WHOLE, ROWS[1], *READ), "expected a name and options"),
    "another width": (change(d_model=32), (*ROWS, *READ), "config.json"),
    "another length": (
        change(encoding={"name": "learned", "options": {**OPTIONS, "max_seq_len": 8}}), (WHOLE[1], ROWS[1], READ[2]),
        "(32, 64)",
    ),
    "no sizes": (change(vocab_size=None), READ, "without vocab_size"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_line_for_every_verb(name: str, complains: Complains, models: Path) -> None:
    damage, lines, says = DAMAGES[name]
    damage(models / "learned")
    for line in lines:
        assert says in complains(line), line


def test_a_key_that_nobody_reads_is_no_damage(succeeds: Run, models: Path) -> None:
    change(colour="blue")(models / "learned")
    for line in (*WHOLE, *ROWS, READ[2]):
        succeeds(line)


def test_a_folder_of_an_earlier_release_is_loaded_and_saved_anew(succeeds: Run, models: Path) -> None:
    """Its sizes stood in an object of their own."""
    path = models / "learned" / "config.json"
    config = json.loads(path.read_text())
    names = ("vocab_size", "d_model", "num_layers", "num_heads", "keys_are_values")
    old = {key: config[key] for key in ("model_type", "encoding")} | {"sizes": {name: config[name] for name in names}}
    expected = weights(models / "learned", "token.weight")
    path.write_text(json.dumps(old))
    save(*load(models / "learned"), models / "again")
    assert np.array_equal(weights(models / "again", "token.weight"), expected)
    succeeds("explain again")
