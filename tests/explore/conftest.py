"""A running explorer, a browser, and pages of it that must stay silent and on this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Opens = Callable[..., "Page"]

LONGEST = 120_000
"""Milliseconds until a test gives up waiting: a machine may have much else to do."""

SHOWN = "#screen[data-shown]:not([aria-busy])"


@contextmanager
def explorer(*words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`locant explore` in a process and an empty folder of its own, and the address it prints."""
    command = [sys.executable, "-m", "locant", "explore", "--no-open", *words]
    with (
        tempfile.TemporaryDirectory() as folder,  # it would show the report of a `make demo` beside it
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, cwd=folder) as process,
    ):
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip().partition("#")[0], process
        finally:
            ended = process.poll()
            process.kill()
            said.seek(0)
            if ended not in (None, -signal.SIGKILL):
                pytest.fail(f"the explorer ended by itself with {ended}: {said.read()}")


@pytest.fixture(scope="session")
def address(browser: Browser) -> Iterator[str]:
    """Of an explorer that all tests share: nothing is kept in it but what is dropped on it."""
    with explorer() as (printed, _):
        yield printed


@pytest.fixture
def opened(browser: Browser, address: str) -> Iterator[Opens]:
    """Opens a part of an address, such as ``compare?length=64``; at the end no page may have complained."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 900}, accept_downloads=True,
        reduced_motion="reduce",  # a colour on its way to another one is neither
    )  # fmt: skip
    context.set_default_timeout(LONGEST)
    said: list[str] = []
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    context.on("weberror", lambda error: said.append(str(error.error)))
    context.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)

    def open_page(part: str, *, at: str | None = None, shown: bool = True) -> Page:
        page = context.new_page()
        page.goto(f"{address if at is None else at}#{part}")
        if shown:
            page.wait_for_selector(SHOWN)
        return page

    open_page.said = said  # type: ignore[attr-defined]
    yield open_page
    context.close()
    assert said == [], "the console of a page is not empty"
    foreign = [url for url in asked if not url.startswith(("http://127.0.0.1:", "data:", "blob:", "file:"))]
    assert foreign == [], "a page asked another machine"
