"""How the report looks: light or dark as the reader's system is, on a phone, a screen or paper."""

from __future__ import annotations

from locant.figures.canvas import DARK, LIGHT, Theme

__all__ = ["stylesheet"]

RULES = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 58rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .35rem; text-wrap: balance; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .7rem; }
p, li { max-width: 46rem; }
li { margin: .3rem 0; }
.facts, .note, figcaption { color: var(--muted); }
.note, figcaption { font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .42rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--grid); }
thead th { font-weight: 600; border-bottom: 2px solid var(--grid); white-space: nowrap; }
thead small, td small { display: block; font-weight: 400; color: var(--muted); font-size: .82rem; }
.losses { width: 100%; }
.losses th + th, .losses td { text-align: right; white-space: nowrap; }
tr > :first-child { padding-left: 0; }
.best { font-weight: 700; background: var(--mark); }
.best small { color: var(--ink); }
.settings th { font-weight: 400; color: var(--muted); white-space: nowrap; padding-right: 2rem; }
.settings td { overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); gap: 1.5rem 3rem;
  align-items: start; }
.pair table { width: 100%; }
figure { margin: .4rem 0 1.4rem; }
figure img { width: 100%; height: auto; display: block; }
pre { background: var(--mark); padding: .9rem 1rem; border-radius: .4rem;
  white-space: pre-wrap; overflow-x: auto;
  font: .9rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre span { white-space: nowrap; }
summary { cursor: pointer; color: var(--muted); }
details table { margin-top: .8rem; }
@media (max-width: 40rem) { .pair { grid-template-columns: minmax(0, 1fr); } }
@media print { body { max-width: none; padding: 0; } figure, tr { break-inside: avoid; } }
"""


def stylesheet() -> str:
    """The whole style of the page; it loads nothing."""
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {_colors(DARK, '#222a35')} }} }}"
    return f":root {{ color-scheme: light dark; {_colors(LIGHT, '#eef4fb')} }}\n{dark}\n{RULES.strip()}\n"


def _colors(theme: Theme, mark: str) -> str:
    return f"--paper: {theme.paper}; --ink: {theme.ink}; --muted: {theme.muted}; --grid: {theme.grid}; --mark: {mark};"
