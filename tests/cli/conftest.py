"""Running the command line in the test's own process, in an empty folder."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import locant
from locant.cli import main
from locant.cli.errors import QUIET
from tests.refusal import shapes_unchecked

Run = Callable[..., Result]
Complains = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with one text in it."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "text.txt").write_text("the cat sat on the mat; the rat sat on the cat. " * 40)
    monkeypatch.chdir(here)
    monkeypatch.delenv("LOCANT_TRACEBACK", raising=False)
    for name, value in QUIET.items():  # which a run sets where nobody has
        monkeypatch.setenv(name, value)
    return here


@pytest.fixture
def run(folder: Path) -> Run:
    """Run a line as it is typed, and more words after it; stdout and stderr are kept apart."""
    return lambda line="", *words, **options: CliRunner().invoke(
        main, [*shlex.split(str(line)), *map(str, words)], **options
    )


@pytest.fixture
def succeeds(run: Run) -> Run:
    """Run a verb that must do what it is asked for."""

    def success(*words: object, **options: object) -> Result:
        result = run(*words, **options)
        assert result.exit_code == 0, (result.output, result.exception)
        return result

    return success


@pytest.fixture
def complains(folder: Path, run: Run) -> Complains:
    """Run a verb that must fail with one line, exit code 2, nothing on stdout, and no trace in the folder."""

    def complaint(*words: object, **options: object) -> str:
        before = listing(folder)
        with shapes_unchecked():  # as for a user: what a verb does not check itself, the library refuses
            result = run(*words, **options)
        assert result.exit_code == 2, (result.output, result.exception)
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert line.startswith("locant: ")
        assert "; try: " in line
        assert listing(folder) == before
        return line

    return complaint


def refused(line: str, *cases: tuple[str, str], says: str = "", fixtures: Sequence[str] = ()) -> Callable[..., None]:
    """A test that each of these words, typed after the line, are refused in one line that says this."""

    @pytest.mark.usefixtures("folder", *fixtures)
    @pytest.mark.parametrize(("words", "said"), cases)
    def test(complains: Complains, words: str, said: str) -> None:
        assert says + said in complains(f"{line} {words}")

    return test


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    saved = tmp_path_factory.mktemp("saved") / "model"
    tokenizer = locant.Tokenizer.train(["The pass key is 0123456789; the cat sat on the mat. " * 20], 300)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=tokenizer.vocab_size, max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng():  # the first test that asks has the random numbers of the others
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(saved)
    tokenizer.save(saved / "tokenizer.json")
    return saved


@pytest.fixture
def model(folder: Path, saved_model: Path) -> Path:
    """The folder of a model of some thousand weights, with configuration and tokenizer, in the current one."""
    return Path(shutil.copytree(saved_model, folder / "model"))


def listing(folder: Path) -> dict[str, bytes | None]:
    """Everything under a folder, hidden files included."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}
