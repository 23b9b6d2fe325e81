"""Whatever goes wrong is one line and an exit code; one process of its own for the pipes and the exit codes."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from locant import registry
from locant.cli import errors, main
from locant.errors import LocantError, Remedy
from locant.positions.registry import ENCODINGS
from tests.cli.conftest import Complains, Run, listing, refused
from tests.registries import restore

test_a_slip_of_the_fingers_is_one_line = refused(
    "",
    ("embd", f"expected one of {', '.join(main.verbs)}; try: locant embed"),
    ("zzz", "try: locant --help"),
    ("vocabulary model", "no longer has; try: use mergekit"),
    ("--colour", "there is no option --colour; try: locant --help"),
    ("list alibi more", "got unexpected extra argument"),
    ("list --jsn", "try: --json"),
)


WRITERS = {
    "compare": "text.txt", "convert": "model --to half", "embed": "text.txt", "evaluate": "model",
    "explain": "llama-3.1-8b", "export": "store --to nanogpt", "extend": "llama-3.1-8b --to 262144",
    "golden": "", "plot": "sinusoidal", "prepare": "text.txt", "probe": "llama-3.1-8b", "train": "text.txt",
    "tune": "model --with own",
}  # fmt: skip
"""Every verb that takes ``-o``, with words that it would begin to work on."""


@pytest.mark.parametrize("verb", WRITERS)
def test_an_empty_path_is_not_the_current_folder(complains: Complains, verb: str) -> None:
    """It is what an unset variable of a shell leaves: ``-o "$OUT"``."""
    assert "'-o' / '--output': the path is empty" in complains(f"{verb} {WRITERS[verb]} -o ''")


@pytest.fixture
def _configured(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


test_nor_is_one_that_is_read = refused(
    "",
    ("export '' --to nanogpt -o out", "the path is empty"),
    ("convert '' --to half -o out", "the path is empty"),
    ("convert model --to half -o out --config ''", "the path is empty"),
    ("extend llama-3.1-8b --to 262144 --figure ''", "the path is empty"),
    ("explain ''", "got '', which is not a file, a folder"),
    ("prepare '' -o out", "got ''"),
    ("embed ''", "which is a folder"),
    fixtures=["_configured"],
)


def test_without_a_verb_the_help_is_shown(run: Run) -> None:
    result = run()
    assert result.exit_code == 0
    assert result.stdout == run("--help").stdout
    for name in main.verbs:
        verb = main.get_command(click.Context(main), name)
        assert f"  {name} " in result.stdout
        assert verb.help.splitlines()[0].split(",")[0] in result.stdout  # type: ignore[union-attr]


def test_every_verb_has_json_and_words_for_itself_and_for_each_option() -> None:
    writers = set()
    for name in main.verbs:
        verb = main.get_command(click.Context(main), name)
        assert verb.name == name
        assert len((verb.help or "x" * 100).splitlines()[0]) < 100
        options = {flag: option for option in verb.params for flag in option.opts if isinstance(option, click.Option)}
        assert "--json" in options
        assert all(option.help for option in options.values()), name
        writers |= {name} if "-o" in options else set()
    assert writers == {*WRITERS}, "for the test of empty paths"


def test_an_option_accepts_the_numbers_that_its_help_states() -> None:
    """The first check of `audit --windows` was 1 or more, and the model was loaded before the second one."""
    stated = {}
    for name in main.verbs:
        verb = main.get_command(click.Context(main), name)
        for option in (each for each in verb.params if isinstance(each.type, click.IntRange)):
            for low in re.findall(r"at least (\d+)|from (\d+) to", getattr(option, "help", None) or ""):
                stated[f"{name} {option.opts[-1]}"] = int("".join(low)), option.type.min
    assert stated.keys() >= {"audit --windows", "prepare --task"}
    assert all(low == checked for low, checked in stated.values()), stated


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "locant: interrupted"),
        (MemoryError(), 2, "locant: there is not enough memory; try: use smaller sizes"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 2, "there is not enough memory"),
        (OSError(28, "No space left on device"), 2, "locant: the system reports 'no space left on device'; try: "),
        (PermissionError(13, "Permission denied", "x"), 2, "the system reports 'permission denied': x; try: "),
        (KeyError("lost"), 1, "locant: this is a mistake in locant: KeyError: 'lost' at test_errors.py:"),
        (RuntimeError("a shape"), 1, "; try: LOCANT_TRACEBACK=1 locant ..., and report what it prints"),
    ],
)
def test_what_happens_to_the_machine_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def fail(facts: object) -> None:
        raise error

    monkeypatch.setattr("locant.report.listing.print_all", fail)
    result = run("list")
    assert (result.exit_code, result.stdout) == (code, "")
    assert said in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    monkeypatch.setenv("LOCANT_TRACEBACK", "1")
    raised = run("list").exception
    assert isinstance(raised, click.Abort if isinstance(error, KeyboardInterrupt) else type(error))


PLUG_IN = {
    "broken_plug_in/__init__.py": """
from broken_parts.takes_less import TakesLess  # of the same distribution
from broken_parts.fails import Fails

class FailsLater(Fails):
    pass
""",
    "broken_plug_in/unimportable.py": "import no_such_package",
    "broken_parts/__init__.py": "",
    "broken_parts/fails.py": """
from locant import PositionEncoding

class Fails(PositionEncoding):
    def embed(self, x, positions):
        return x + "one"
""",
    "broken_parts/takes_less.py": """
from locant import PositionEncoding

class TakesLess(PositionEncoding):
    def bias(self, q):
        return q
""",
    "broken_plug_in-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: broken-plug-in\nVersion: 1.0\n",
    "broken_plug_in-1.0.dist-info/top_level.txt": "broken_plug_in\nbroken_parts\n",
    "broken_plug_in-1.0.dist-info/entry_points.txt": """
[locant.encodings]
fails = broken_plug_in:Fails
fails_later = broken_plug_in:FailsLater
takes_less = broken_plug_in:TakesLess
unimportable = broken_plug_in.unimportable:Lost
""",
}
"""The files of an installed distribution of two packages."""


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in PLUG_IN.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    restore(ENCODINGS, monkeypatch)
    monkeypatch.setattr(ENCODINGS, "_offers", None)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("broken_plug_in", "broken_parts")]:
        del sys.modules[name]


@pytest.mark.usefixtures("_installed")
def test_the_mistake_of_a_plug_in_is_told_by_its_name(complains: Complains, run: Run) -> None:
    """Its class may be of any package of its distribution, and fail in its code or where ours calls it."""
    for name, line, said in (
        ("fails", "plot fails", "fails: TypeError: "),
        ("fails", "embed text.txt --tokenizer bytes --encoding fails", "fails: TypeError: "),
        ("fails_later", "embed text.txt --tokenizer bytes --encoding fails_later", "fails: TypeError: "),
        ("takes_less", "plot takes_less", "fails: TypeError: TakesLess.bias() takes 2 positional arguments but"),
        (
            "unimportable",
            "plot unimportable",
            "cannot be loaded: ModuleNotFoundError: No module named 'no_such_package'",
        ),
    ):
        complaint = complains(line)
        assert f"encoding {name!r} of broken-plug-in {said}" in complaint
        assert "; try: pip install -U broken-plug-in" in complaint
    listed = run("list")
    assert listed.exit_code == 0, listed.output
    assert "encoding 'unimportable' of broken-plug-in cannot be loaded" in listed.stderr


@pytest.mark.usefixtures("_installed")
def test_our_mistake_is_not_told_by_a_plug_in_that_was_loaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(facts: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("locant.report.listing.print_all", fail)
    result = run("list")
    assert {each.entry.name for each in registry.LOADED} >= {"fails", "takes_less"}
    assert (result.exit_code, "this is a mistake in locant: KeyError" in result.stderr) == (1, True)


def test_a_remedy_is_written_in_the_words_of_who_reads_it() -> None:
    verb = click.Command("verb", params=[
        click.Option(["--num-tasks"]), click.Option(["-t", "--tasks"]), click.Option(["--minutes", "num_minutes"]),
        click.Option(["--end/--no-end"]), click.Option(["--far"], is_flag=True),
    ])  # fmt: skip
    for remedy, python, typed in (
        (Remedy(num_tasks=4), "num_tasks=4", "--num-tasks 4"),
        (Remedy(other="a b"), "other='a b'", "other='a b'"),
        (Remedy(tasks=("copy", "sort")), "tasks=('copy', 'sort')", "--tasks copy,sort"),
        (Remedy("{}, or a {}", num_minutes=0.5, far=...), "num_minutes=0.5, or a far=", "--minutes 0.5, or a --far"),
        (Remedy(far=True), "far=True", "--far"),
        (Remedy(text=True), "text=True", "text=True"),
        (Remedy(far=None), "far=None", "no --far"),
        (Remedy(end=True), "end=True", "--end"),
        (Remedy(end=False), "end=False", "--no-end"),
        (Remedy(far="{}"), "far='{}'", "--far '{}'"),
        ("num_tasks=4 in another's words", "num_tasks=4 in another's words", "num_tasks=4 in another's words"),
    ):
        for error in (LocantError("got 3", remedy), pickle.loads(pickle.dumps(LocantError("got 3", remedy)))):  # noqa: S301
            assert str(error) == f"got 3; try: {python}"
            assert errors.as_typed(error.remedy, verb) == typed


test_a_remedy_is_in_the_words_of_the_command_line = refused(
    "",
    ("plot rotary --base nan", "--base 10000.0, the usual one"),
    ("plot rotary --head-dim 7", "--head-dim 64, or"),
    ("plot xpos --head-dim 7", "--head-dim 64, an even width"),
    ("plot rotary --scaling yarn:0", "yarn:4"),
    ("embed text.txt --tokenizer gpt-of-nobody", "pass the path of a tokenizer.json, --download, or a tok"),
    ("embed text.txt --scale nan --tokenizer bytes", "no --scale, or 'sqrt_d_model'"),
    ("embed text.txt --encoding yarn", "--encoding rotary"),
    ("export nothing --to nanogpt -o out", "pass a folder that locant prepare made, or a --format"),
    ("compare text.txt --multiples 0,1", "--multiples 1,2,4,8"),
    ("prepare text.txt -o out --task 2", "pass --task 0, --num-tasks 1"),
    says="; try: ",
)


def test_other_libraries_write_nothing_into_the_terminal(folder: Path) -> None:
    """What `transformers` has to say of this configuration, it says where somebody asks for it."""
    config = {"model_type": "qwen3", "pad_token_id": 88_888, "vocab_size": 600, "head_dim": 16, "hidden_size": 32}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    (folder / "config.json").write_text(json.dumps(config))
    words = [sys.executable, "-m", "locant", "probe", "config.json"]
    for asked, said in (({}, False), ({"TRANSFORMERS_VERBOSITY": "warning"}, True)):
        plain = {name: value for name, value in os.environ.items() if name not in errors.QUIET}
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=plain | asked)
        assert done.stdout.startswith("Qwen3RotaryEmbedding")
        assert ("pad_token_id" in done.stderr) == said
        assert said or not done.stderr


def test_a_reader_that_goes_away_hears_no_complaint() -> None:
    writer = subprocess.Popen(
        [sys.executable, "-m", "locant", "bench", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    assert writer.stderr.read() == ""
    writer.stderr.close()
    assert writer.wait() == 141


def test_an_exit_code_is_that_of_the_process() -> None:
    done = subprocess.run([sys.executable, "-m", "locant", "bench", "x"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("locant: got 'x', expected one of ")


def test_text_that_stdout_cannot_write_is_escaped(folder: Path) -> None:
    (folder / "wide.txt").write_text("ñandú → 😀", encoding="utf-8")
    result = CliRunner(charset="ascii").invoke(main, ["embed", "wide.txt", "--tokenizer", "bytes"])
    assert result.exit_code == 0, result.stderr
    assert "\\u2192" in result.stdout


TINY = "text.txt --tokenizer bytes --encodings nope --seeds 0 --steps 1 --d-model 8 --num-heads 2 --train-length 40"


@pytest.fixture
def _little_room() -> Iterator[None]:
    """Files of at most 3000 bytes, as on a disk that is almost full."""
    resource = pytest.importorskip("resource", reason="limits of a process are set the POSIX way")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("_little_room")
@pytest.mark.parametrize(
    "line",
    [
        "embed text.txt --tokenizer bytes -o x.safetensors",
        "plot alibi -o x.png",
        f"compare {TINY} --multiples 1,4 -o deep/out",
    ],
)
def test_a_disk_without_room_leaves_nothing_half_written(run: Run, folder: Path, line: str) -> None:
    before = listing(folder)
    result = run(line)
    assert result.exit_code == 2, result.exception
    assert result.stderr.splitlines()[-1].startswith("locant: ")
    assert listing(folder) == before


def test_help_has_the_defaults_of_the_lab_and_loads_no_torch_and_no_pictures() -> None:
    code = (
        "import sys; from locant.cli import main\n"
        "for words in (['--help'], ['compare', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "names = {'torch', 'locant.lab.decoder', 'locant.report', 'matplotlib', 'rich'}\n"
        "print(sorted(names & set(sys.modules)) if 'click' in sys.modules else 'blind')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *shown, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    words = " ".join(" ".join(shown).split())
    for default in ("0.006", "1,2,4,8", "300, but at most 16 epochs"):
        assert f"Default: {default}." in words


def test_the_version_is_that_of_the_package(run: Run) -> None:
    from locant import __version__

    assert run("--version").stdout == f"locant {__version__}\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_stream_that_is_closed_from_the_start_is_no_fault(closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m locant bench --json {closed}', sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (done.stdout == "") == closed.startswith(">")


PYTHON = re.compile(r"\w\([^)]*[)=]|\blocant\.[a-zA-Z_]+|=\.\.\.|\b[a-z_]+=['\"\d]")
"""A call, a name of the package or an argument in Python."""
NOT_NAMES = {"bert-base-uncased": "learned", "llama": "rotary", "mrope": "rotary", "positional_encoding": "sinusoidal"}
"""Names in place of an encoding, and an encoding that the remedy names."""


@pytest.mark.parametrize(("typed", "meant"), NOT_NAMES.items())
@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("plot", "locant plot {}"), ("list", "locant list {}"), ("train --encoding", "--encoding {}"),
        ("embed --encoding", "--encoding {}"), ("compare --encodings", "--encodings {}"),
    ],
)  # fmt: skip
def test_a_remedy_about_a_name_is_in_words_of_the_command_line(
    complains: Complains, line: str, advice: str, typed: str, meant: str
) -> None:
    remedy = complains(f"{line} {typed}").partition("; try: ")[2]
    assert remedy.startswith(advice.format(meant))
    assert not PYTHON.search(remedy)


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("evaluate model --with alibix", "--with alibi"), ("tune model --with alibix", "--with alibi"),
        ("probe gpt2", "use locant explain"), ("embed text.txt --vocab-size 3", "--vocab-size 257"),
    ],
)  # fmt: skip
def test_so_are_others(complains: Complains, line: str, advice: str) -> None:
    remedy = complains(line).partition("; try: ")[2]
    assert remedy.startswith(advice)
    assert not PYTHON.search(remedy)
