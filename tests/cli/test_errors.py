"""Whatever goes wrong is one line and an exit code; in a real process, through real pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from locant.cli import main
from tests.cli.conftest import Complains, Run, listing

PROGRAM = "from locant.cli import main; main()"


def process(*words: object, before: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, after some other code."""
    code = f"{before}\n{PROGRAM}"
    quiet = {name: value for name, value in os.environ.items() if name != "LOCANT_TRACEBACK"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        **{"env": quiet, **options},
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("embd",), f"expected one of {', '.join(main.verbs)}; try: locant embed"),
        (("zzz",), "try: locant --help"),
        (("--colour",), "there is no option --colour; try: locant --help"),
        (("list", "alibi", "more"), "got unexpected extra argument"),
        (("list", "--jsn"), "try: --json"),
    ],
)
def test_a_slip_of_the_fingers_is_one_line(complains: Complains, words: tuple[object, ...], said: str) -> None:
    assert said in complains(*words)


WRITERS = {
    "compare": ("text.txt",),
    "convert": ("model", "--to", "half"),
    "embed": ("text.txt",),
    "explain": ("llama-3.1-8b",),
    "export": ("store", "--to", "nanogpt"),
    "extend": ("llama-3.1-8b", "--to", "262144"),
    "plot": ("sinusoidal",),
    "prepare": ("text.txt",),
}
"""Every verb that takes ``-o``, with words that it would begin to work on."""


def test_every_verb_that_writes_is_known_here() -> None:
    context = click.Context(main)
    verbs = {name: main.get_command(context, name) for name in main.list_commands(context)}
    assert {name for name, verb in verbs.items() if any("-o" in one.opts for one in verb.params)} == {*WRITERS}


@pytest.mark.parametrize("verb", WRITERS)
def test_an_empty_path_is_not_the_current_folder(complains: Complains, verb: str) -> None:
    """It is what an unset variable of a shell leaves: ``-o "$OUT"``."""
    assert "'-o' / '--output': the path is empty" in complains(verb, *WRITERS[verb], "-o", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("export", "", "--to", "nanogpt", "-o", "out"), "the path is empty"),
        (("convert", "", "--to", "half", "-o", "out"), "the path is empty"),
        (("convert", "model", "--to", "half", "-o", "out", "--config", ""), "the path is empty"),
        (("extend", "llama-3.1-8b", "--to", "262144", "--figure", ""), "the path is empty"),
        (("explain", ""), "got '', which is no file, no folder"),
        (("prepare", "", "-o", "out"), "got ''"),
        (("embed", ""), "which is a folder"),
    ],
)
def test_nor_is_one_that_is_read(complains: Complains, folder: Path, words: tuple[str, ...], said: str) -> None:
    (folder / "config.json").write_text("{}")
    assert said in complains(*words)


def test_without_a_verb_the_help_is_shown(run: Run) -> None:
    result = run()
    assert result.exit_code == 0
    assert result.stdout == run("--help").stdout
    for name in main.verbs:
        verb = main.get_command(click.Context(main), name)
        assert f"  {name} " in result.stdout
        assert verb.help.splitlines()[0].split(",")[0] in result.stdout  # type: ignore[union-attr]


def test_every_verb_has_json_and_a_line_for_the_help() -> None:
    context = click.Context(main)
    for name in main.list_commands(context):
        verb = main.get_command(context, name)
        assert verb is not None
        assert verb.name == name
        assert "--json" in {flag for option in verb.params for flag in option.opts}
        assert verb.help
        assert len(verb.help.splitlines()[0]) < 100


def test_no_option_of_a_verb_is_left_without_words() -> None:
    context = click.Context(main)
    for name in main.list_commands(context):
        for option in main.get_command(context, name).params:  # type: ignore[union-attr]
            assert not isinstance(option, click.Option) or option.help, f"{name} {option.name}"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "locant: interrupted"),
        (MemoryError(), 2, "locant: there is not enough memory; try: smaller sizes"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 2, "not enough memory for tensors"),
        (OSError(28, "No space left on device"), 2, "locant: the system says 'no space left on device'; try: "),
        (PermissionError(13, "Permission denied", "x"), 2, "the system says 'permission denied': x; try: "),
        (ValueError, 1, ""),
    ],
)
def test_what_happens_to_the_machine_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def fail(facts: object) -> None:
        raise error

    monkeypatch.setattr("locant.report.listing.print_all", fail)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    result = run("list")
    assert result.exit_code == code
    if code != 1:
        assert said in result.stderr.splitlines()[-1]
        assert "Traceback" not in result.output


def test_our_own_mistake_is_one_line_and_with_the_variable_a_traceback() -> None:
    breaks = "from locant.report import benchmarks\ndef bug(*_, **__): {}['lost']\nbenchmarks.print_recorded = bug"
    short = process("bench", before=breaks)
    assert short.returncode == 1
    (line,) = short.stderr.splitlines()
    assert line.startswith("locant: this is a mistake in locant: KeyError: 'lost'")
    assert "; try: LOCANT_TRACEBACK=1" in line
    long = process("bench", before=breaks, env={**os.environ, "LOCANT_TRACEBACK": "1"})
    assert long.returncode == 1
    assert "Traceback (most recent call last)" in long.stderr


def test_a_reader_that_goes_away_hears_no_complaint() -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "bench", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    assert writer.stderr.read() == ""
    writer.stderr.close()
    assert writer.wait() == 141


def test_a_wrong_input_in_a_real_process_is_one_line_and_exit_code_two(folder: Path) -> None:
    done = process("embed", "missing.txt")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "locant: got missing.txt, but there is no such file; try: the path of a text file\n"


def test_text_that_stdout_cannot_write_is_escaped(folder: Path) -> None:
    (folder / "wide.txt").write_text("ñandú → 😀", encoding="utf-8")
    done = process("embed", "wide.txt", "--vocab-size", 300, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "\\u2192" in done.stdout


TINY = (
    "text.txt", "--tokenizer", "bytes", "--encodings", "nope", "--seeds", "0", "--steps", "1", "--d-model", "8",
    "--num-heads", "2", "--train-length", "40", "--multiples", "1,4",
)  # fmt: skip
LITTLE_ROOM = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))"


@pytest.mark.skipif(os.name != "posix", reason="limits of a process are set the POSIX way")
@pytest.mark.parametrize(
    "words",
    [
        ("embed", "text.txt", "--tokenizer", "bytes", "-o", "x.safetensors"),
        ("plot", "alibi", "-o", "x.png"),
        ("compare", *TINY, "-o", "deep/out"),
    ],
)
def test_a_disk_without_room_leaves_nothing_half_written(folder: Path, words: tuple[str, ...]) -> None:
    before = listing(folder)
    done = process(*words, before=LITTLE_ROOM)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("locant: ")
    assert listing(folder) == before


def test_help_loads_no_torch_and_no_pictures() -> None:
    code = (
        "import sys; from locant.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "names = {'torch', 'locant.lab.decoder', 'locant.report', 'matplotlib', 'rich'}\n"
        "print(sorted(names & set(sys.modules)) if 'click' in sys.modules else 'blind')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version_is_that_of_the_package(run: Run) -> None:
    from locant import __version__

    assert run("--version").stdout == f"locant {__version__}\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_stream_that_is_closed_from_the_start_is_no_fault(closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m locant bench --json {closed}', sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (done.stdout == "") == closed.startswith(">")
