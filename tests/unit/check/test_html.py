"""Reports as a page and as text: the same verdict, nothing from outside, nothing unescaped."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from slipstream.check import html, text
from slipstream.check.report import Check, Histogram, Planted, Report, Reproducer

REPORT = Report(
    "tiny <b>model</b>: speculation & match",
    settings={"temperature": 0.8, "stop": ("</td>",)},
    checks=[Check("nothing changed", True, "90 of 90 answers equal")],
    planted=[Planted("one token kept", True, "nothing changed", "3 of 4 equal")],
    cases=90,
    equal=88,
    first_divergence_margins=[0.01, 0.01, 0.12, math.inf],
    detectable_tv=0.0499,
    power=0.99,
    histograms=[Histogram("places", [90, 110, 100], [100.0, 100.0, 100.0])],
)
REFUTED = replace(
    REPORT,
    checks=[Check("nothing changed", False, "1 differs")],
    reproducer=Reproducer([1, 2], 7, 3, [5, 6, 7, 8], [5, 6, 7, 9]),
)
BLIND = replace(REPORT, planted=[Planted("one token kept", False, "nothing changed")])
TOO_FEW = replace(REPORT, samples_needed=5678)
UNTESTED = replace(TOO_FEW, untested="nothing was drafted", detectable_tv=None)
VERDICTS = {
    "PROVED": REPORT,
    "REFUTED": REFUTED,
    "NOT ENOUGH SAMPLES": TOO_FEW,
    "NOTHING TESTED": UNTESTED,
}


class Page(HTMLParser):
    """Tags, texts and attributes of a page whose elements are properly nested."""

    VOID = ("meta", "rect", "circle", "line", "polyline")

    def __init__(self, source: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(source)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    def all(self, tag: str, kind: str | None = None) -> list[dict[str, str | None]]:
        return [a for name, a in self.tags if name == tag and (not kind or a.get("class") == kind)]


@pytest.mark.parametrize("word", VERDICTS)
def test_the_verdict_comes_first(word):
    report = VERDICTS[word]
    assert text.render(report).startswith(f"{word}: {report.title}\n")
    seen = [t.strip() for t in Page(html.render(report)).texts if t.strip()]
    assert seen[1:3] == [word, report.title]


def test_a_page_needs_nothing_from_outside():
    source = html.render(REPORT)
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script", source)
    assert "prefers-color-scheme: dark" in source


def test_what_was_measured_is_on_the_page_and_escaped():
    page = Page(html.render(REFUTED))
    assert page.all("b") == [], "a title became markup"
    for shown in ("nothing changed", "1 differs", "one token kept", "('</td>',)", "[5, 6, 7, 9]"):
        assert shown in page.texts
    assert any("0.0499" in t and "99%" in t for t in page.texts)


def test_a_histogram_is_drawn_to_scale():
    bars = Page(html.render(REPORT)).all("rect", "bar")
    heights = [float(bar["height"]) for bar in bars]
    assert heights[0] / heights[1] == pytest.approx(90 / 110, abs=0.01)
    bottoms = {round(float(bar["y"]) + float(bar["height"])) for bar in bars}
    assert len(bottoms) == 1


def test_margins_are_dots_and_equal_ones_pile_up():
    dots = Page(html.render(REPORT)).all("circle")
    assert len(dots) == 3, "an infinite margin has no place on an axis"
    assert dots[0]["cx"] == dots[1]["cx"] != dots[2]["cx"]
    assert dots[0]["cy"] != dots[1]["cy"]
    crowd = replace(REPORT, first_divergence_margins=[0.1] * 500)
    assert all(float(dot["cy"]) > 0 for dot in Page(html.render(crowd)).all("circle"))


def test_a_bare_report_has_no_empty_sections():
    bare = Report("bare", checks=[Check("one", True, "fine")])
    assert len(Page(html.render(bare)).all("section")) == 1
    assert text.render(bare) == "PROVED: bare\n  1 check passed\n\nChecks\n  ok  one\n      fine"


def test_json_has_no_infinity():
    margins = json.loads(json.dumps(REPORT.as_json(), allow_nan=False))["first_divergence_margins"]
    assert margins == [0.01, 0.01, 0.12, None]


def test_text_says_what_failed_and_what_to_do(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    refuted = text.render(REFUTED)
    assert "does not hold: nothing changed" in refuted
    assert re.search(r"got +\[5, 6, 7, 9\]", refuted)
    assert "would not see: one token kept" in text.render(BLIND)
    assert "--samples 5678" in text.render(TOO_FEW)
    assert "nothing was drafted" in text.render(UNTESTED)
    assert "certainty" not in text.render(UNTESTED), "nothing would have been seen"
    assert max(map(len, refuted.splitlines())) <= 60
