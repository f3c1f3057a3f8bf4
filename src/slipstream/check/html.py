"""A report as one page that needs nothing else: no scripts, no fonts, no network.

Colours follow the reader's light or dark setting; plots are SVG drawn here.
"""

import math
from collections import Counter
from collections.abc import Iterable
from html import escape

from slipstream.check import text
from slipstream.check.report import PROVED, REFUTED, Histogram, Report

_WIDTH, _HEIGHT = 640, 180  # of a plot, in its own units
_LEFT, _BOTTOM = 48, 24  # room for its labels

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --dim: #667078; --page: #fbfbfa; --card: #fff;
  --line: #dfe3e6; --good: #17784a; --bad: #b3261e; --open: #8a6100; --bar: #7aa7d8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --dim: #98a2ab; --page: #14171a;
  --card: #1c2024; --line: #343a40; --good: #58c58d; --bad: #ff8a80; --open: #e0b453;
  --bar: #4d7fb5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 56rem; padding: 2rem 1rem 4rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
header, section { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 1rem 1.25rem; margin-bottom: 1rem; overflow-x: auto; }
header { border-left: 6px solid var(--verdict); }
h1 { margin: 0; font-size: 1.1rem; font-weight: 500; }
h2 { margin: 0 0 .5rem; font-size: 1rem; }
p { margin: .25rem 0; }
.verdict { font-size: 1.6rem; font-weight: 700; color: var(--verdict); }
.good { --verdict: var(--good); } .bad { --verdict: var(--bad); } .open { --verdict: var(--open); }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .75rem .3rem 0;
  border-top: 1px solid var(--line); overflow-wrap: anywhere; }
tr:first-child > * { border-top: 0; }
th { font-weight: 500; white-space: nowrap; }
td.mark { color: var(--verdict); font-weight: 600; white-space: nowrap; width: 5rem; }
small { color: var(--dim); font-size: .875rem; display: block; }
code { font: .875rem/1.4 ui-monospace, monospace; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--dim); font: 12px system-ui, sans-serif; }
.bar { fill: var(--bar); } .axis { stroke: var(--dim); } .dot { fill: var(--bar); }
.expected { stroke: var(--ink); stroke-dasharray: 5 4; fill: none; }
.band { fill: var(--ink); opacity: .1; }
"""


def render(report: Report) -> str:
    """The page."""
    word, sentence = text.verdict(report)
    kind = {PROVED: "good", REFUTED: "bad"}.get(report.exit_code, "open")
    finite = [m for m in report.first_divergence_margins if math.isfinite(m)]
    power = text.power(report)
    sections = [
        _section(
            "Checks", _marked((c.passed, "ok", "failed", c.name, c.detail) for c in report.checks)
        ),
        _section(
            "Planted bugs",
            _marked(
                (
                    bug.caught,
                    "caught",
                    "missed",
                    bug.name,
                    f"by {bug.by}; {bug.detail}".rstrip("; "),
                )
                for bug in report.planted
            ),
        ),
        _section("Power", f"<p>{escape(power)}</p>" if power else ""),
        _section("Smallest reproducer, in token ids", _table(text.reproducer(report))),
        *(_section(h.name.capitalize(), _histogram(h)) for h in report.histograms),
        _section(
            "Margins where answers part, in units of logits", _strip(finite) if finite else ""
        ),
        _section("Settings", _table(text.settings(report))),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(f"{word}: {report.title}")}</title>
<style>{_STYLE}</style>
</head>
<body>
<header class="{kind}">
<div class="verdict">{escape(word)}</div>
<h1>{escape(report.title)}</h1>
<p>{escape(sentence)}</p>
</header>
{"".join(sections)}</body>
</html>
"""


def _section(heading: str, body: str) -> str:
    """A titled card; nothing where there is nothing to show."""
    return f"<section>\n<h2>{escape(heading)}</h2>\n{body}\n</section>\n" if body else ""


def _marked(rows: Iterable[tuple[bool, str, str, str, str]]) -> str:
    """Rows of (is good, word if so, word if not, name, detail)."""
    body = "".join(
        f'<tr class="{"good" if is_good else "bad"}"><td class="mark">{good if is_good else bad}'
        f"</td><td>{escape(name)}<small>{escape(detail)}</small></td></tr>\n"
        for is_good, good, bad, name, detail in rows
    )
    return f"<table>\n{body}</table>" if body else ""


def _table(rows: text.Rows) -> str:
    body = "".join(
        f"<tr><th>{escape(name)}</th><td><code>{escape(value)}</code></td></tr>\n"
        for name, value in rows
    )
    return f"<table>\n{body}</table>" if body else ""


# Plots ---------------------------------------------------------------------------------------
#
#     _LEFT                 _WIDTH
#       |  bars, dots          |
#       |______________________|  _HEIGHT - _BOTTOM
#          labels                 _HEIGHT


def _histogram(histogram: Histogram) -> str:
    """Bars of what was seen; dashes of what should be, in a band of three standard deviations."""
    observed, expected = histogram.observed, histogram.expected
    top = 1.1 * max(*observed, *(e + 3 * math.sqrt(e) for e in expected), 1)
    step = (_WIDTH - _LEFT) / len(observed)
    bars, bands, line = [], [], []
    for i, (seen, mean) in enumerate(zip(observed, expected, strict=True)):
        left, spread = _LEFT + i * step, 3 * math.sqrt(mean)
        bars.append(_rect("bar", left + 1, _y(seen / top), step - 2, _y(0) - _y(seen / top)))
        high, low = _y((mean + spread) / top), _y(max(mean - spread, 0) / top)
        bands.append(_rect("band", left, high, step, low - high))
        line += [(left, _y(mean / top)), (left + step, _y(mean / top))]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
    labels = _label(_LEFT - 6, _y(max(observed) / top) + 4, str(max(observed)), "end")
    return _svg(
        f"{histogram.name}: {observed}",
        "".join(bars) + "".join(bands) + f'<polyline class="expected" points="{points}"/>' + labels,
    )


def _strip(margins: list[float]) -> str:
    """One dot per divergence; those at the same place pile up."""
    right = max(*margins, 1e-12) * 1.05
    places = [round(100 * margin / right) for margin in margins]
    step = min(0.08, 0.9 / max(Counter(places).values()))
    piles: Counter[int] = Counter()
    dots = []
    for place in places:
        x = _LEFT + (_WIDTH - _LEFT) * place / 100
        y = _y(0.04 + step * piles[place])
        piles[place] += 1
        dots.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
    ends = _label(_LEFT, _HEIGHT - 6, "0", "middle")
    ends += _label(_WIDTH, _HEIGHT - 6, f"{right:.2g}", "end")
    return _svg(f"{len(margins)} margins up to {max(margins):.3g}", "".join(dots) + ends)


def _svg(description: str, content: str) -> str:
    axis = f'<line class="axis" x1="{_LEFT}" y1="{_y(0)}" x2="{_WIDTH}" y2="{_y(0)}"/>'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(description)}">'
        f"{content}{axis}</svg>"
    )


def _y(share: float) -> float:
    """Where a share of the plot's height is drawn; SVG counts downwards."""
    return (_HEIGHT - _BOTTOM) * (1 - share)


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
    )


def _label(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'
