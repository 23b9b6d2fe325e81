"""How long does a visitor of `locant explore` wait?

For the first picture of a screen, and for what a moved slider shows: in Python, from settings to JSON, and on the page,
from the change of the address to the frame that is painted, where playwright and a Chromium are there. A ratio is to
what is promised: a second for the first picture, and a tenth of one for a slider.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from benchmarks.timing import Row
from locant.explore.screens import answer, as_json
from locant.explore.session import Session

__all__ = ["rows"]

FIRST, SLIDER = 1000.0, 100.0
"""Milliseconds that are promised."""

SLIDERS = {
    "compare": ("alike", [f"0.{number}5" for number in range(11, 41)]),
    "rotary": ("position", [str(number) for number in range(5000, 5030)]),
    "model": ("to", [str(number) for number in range(70_000, 70_030)]),
    "text": ("stride", [str(number) for number in range(1, 31)]),
    "images": ("at", [str(number) for number in range(10, 40)]),
    "swap": ("factor", [str(number) for number in range(2, 32)]),
    "rows": ("cache", [str(number) for number in range(1, 31)]),
    "known_bugs": ("position", [str(number) for number in range(4001, 4031)]),
}

MOVE = """async ([setting, value]) => {
  const place = document.getElementById("screen");
  const [screen, settings] = location.hash.split("?");
  const wanted = new URLSearchParams(settings);
  wanted.set(setting, value);
  const began = performance.now();
  const shown = new Promise((done) => new MutationObserver((_, observer) => {
    if (JSON.parse(place.dataset.shown)[setting] !== value) return;
    observer.disconnect();
    requestAnimationFrame(() => setTimeout(done));
  }).observe(place, {attributes: true}));
  location.hash = `${screen}?${wanted}`;
  await shown;
  return performance.now() - began;
}"""


def rows() -> list[Row]:
    """Of every screen with sliders: in Python, and on the page."""
    return [*_in_python(), *_on_the_page()]


def _in_python() -> Iterator[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the server does
    for screen, (setting, values) in SLIDERS.items():
        session, times = Session(), []
        for value in values:
            began = time.perf_counter()
            as_json(answer(screen, {setting: value}, session))
            times.append(1000 * (time.perf_counter() - began))
        yield _row("A slider's answer in Python", screen, times[2:], SLIDER)
    torch.set_num_threads(threads)


def _on_the_page() -> Iterator[Row]:
    path = os.environ.get("LOCANT_CHROMIUM") or shutil.which("chromium")
    if path is None or find_spec("playwright") is None:
        print("found no playwright or no Chromium: the page is not measured", file=sys.stderr)
        return
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "locant", "explore", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        address = server.stdout.readline().partition("#")[0]
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for screen, (setting, values) in SLIDERS.items():
            first = []
            for _ in range(5):
                page = browser.new_page()
                began = time.perf_counter()
                page.goto(f"{address}#{screen}")
                page.wait_for_selector("#screen[data-shown] svg[role=img]")
                first.append(1000 * (time.perf_counter() - began))
                page.close()
            yield _row("The first picture on the page", screen, first, FIRST)
            page = browser.new_page()
            page.goto(f"{address}#{screen}")
            page.wait_for_selector("#screen[data-shown]")
            times = [page.evaluate(MOVE, [setting, value]) for value in values]
            yield _row("A slider's answer on the page", screen, times[2:], SLIDER)
            page.close()
        browser.close()
        server.kill()


def _row(question: str, screen: str, times: list[float], promised: float) -> Row:
    median = statistics.median(times)
    return Row(question=question, contender=screen, milliseconds=round(median, 4), ratio=round(median / promised, 3))
