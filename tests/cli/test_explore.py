"""``locant explore`` writes a page, or says what it cannot open."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Complains, Run
from tests.minilm import MINILM


def test_a_page_is_exported_without_a_server(run: Run, folder: Path) -> None:
    result = run("explore --show 'compare?length=32&1=t5' --export page.html")
    assert (result.exit_code, result.stdout) == (0, "page.html\n")
    assert '"length":"32"' in (folder / "page.html").read_text("utf-8")
    result = run("explore", MINILM, "text.txt", "--show", "text", "--export", "page.html")
    assert (result.exit_code, result.stdout) == (0, "page.html\n")
    assert '"vocab_size":30522' in (folder / "page.html").read_text("utf-8")


def test_what_cannot_be_opened_costs_one_line(complains: Complains) -> None:
    assert "got no file" in complains("explore missing.txt --no-open")
    assert "llama-3.1-8b" in complains("explore --config lama-3.1-8b --no-open")
    assert "screen" in complains("explore --show compair --no-open")
    Path("empty").mkdir()
    assert "config.json nor a results.json" in complains("explore empty --no-open")
    for name in (MINILM, "text.txt"):
        assert f"screen compare shows nothing of {Path(name).name}" in complains(
            "explore", name, "--export", "page.html"
        )
    assert "screen text shows nothing of gpt2" in complains(
        "explore text.txt --config gpt2 --show text --export page.html"
    )
    assert "for length" in complains("explore --show 'compare?length=1' --export page.html")
