"""The page in a real browser, with the keyboard, in light and dark, and at the width of a phone.

SLIPSTREAM_SCREENSHOT=docs/server-page.png with `-m weights` takes the picture in the docs.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import serving
from slipstream import LLM

CHROMIUM = shutil.which("chromium")
playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine; apt-get install chromium"
)
PICTURED = "Write a Python class Stack with push, pop and peek."
PHONE, DESK = {"width": 375, "height": 700}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def url(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    drafting = {"method": "ngram", "num_speculative_tokens": 4, "controller": "fixed"}
    llm = LLM(
        str(tiny_gguf),
        device="cpu",
        quiet=True,
        kv_cache_memory=2**20,
        speculative_config=drafting,
    )
    with serving(llm) as url:
        yield url


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """A page that may load nothing from elsewhere, and must not log an error."""
    page = browser.new_page(viewport=DESK)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.on("request", lambda r: problems.append(r.url) if not r.url.startswith(url) else None)
    page.goto(url)
    yield page
    page.close()
    # The empty icon, and responses that are errors, which the browser logs itself.
    known = ("data:", "Failed to load resource")
    assert [problem for problem in problems if not problem.startswith(known)] == []


def ask(page: Any, text: str) -> Any:
    """Send a message by keyboard; the finished turn."""
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")
    page.wait_for_function("document.querySelector('.turn.model:last-child .note')?.textContent")
    return page.locator(".turn.model").last


def test_tokens_are_shaded_by_where_they_came_from(page: Any) -> None:
    page.locator("summary").click()
    page.locator("#max_tokens").fill("80")
    turn = ask(page, "write a poem")
    origins = set(turn.locator(".t").evaluate_all("all => all.map((t) => t.title)"))
    assert "accepted" in origins
    assert origins <= {"accepted", "recovered", "bonus", "plain"}
    assert "drafted accepted" in turn.locator(".note").inner_text()
    assert page.locator("#strip rect").count() > 10
    page.wait_for_function("document.querySelectorAll('#positions rect').length > 0")
    page.wait_for_function("document.querySelector('#gamma polyline')?.points.length > 3")
    assert page.locator("#per_pass").inner_text() != "–"
    assert page.locator("#model").inner_text() == "tiny"


def test_speculation_is_off_for_one_answer_and_says_the_same(page: Any) -> None:
    spoken = ask(page, "count to ten").locator(".text").inner_text()
    page.locator("#clear").click()
    page.locator("#speculate").focus()
    page.keyboard.press("Space")
    turn = ask(page, "count to ten")
    assert turn.locator(".text").inner_text() == spoken
    assert set(turn.locator(".t").evaluate_all("all => all.map((t) => t.title)")) == {"plain"}
    assert "speculation off" in turn.locator(".note").inner_text()
    assert page.locator("#speculate").is_checked()


def test_everything_is_reached_by_keyboard(page: Any) -> None:
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"theme", "log", "prompt", "speculate", "clear", "send", "shades", "SUMMARY"} <= reached


def test_errors_are_shown(page: Any) -> None:
    page.locator("#prompt").fill("x" * 300)
    page.locator("#prompt").press("Enter")
    page.wait_for_selector(".turn.error")
    assert "the prompt has" in page.locator(".turn.error").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_at_the_width_of_a_phone(page: Any, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size(PHONE)

    def background() -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return int(colour.partition("(")[2].partition(",")[0])

    assert (background() > 128) == (scheme == "light")
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= PHONE["width"]
    assert page.locator("#send").is_visible()
    page.locator("#theme").click()
    assert (background() > 128) == (scheme == "dark")


@pytest.mark.weights
def test_picture(browser: Any, model_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model_path("smollm2-135m")
    target = os.environ.get("SLIPSTREAM_SCREENSHOT")
    if not target:
        pytest.skip("no picture asked for; set SLIPSTREAM_SCREENSHOT to a file")
    with serving(LLM("smollm2-135m", quiet=True), model_names=("smollm2-135m",)) as url:
        page = browser.new_page(viewport=DESK)
        page.goto(url)
        ask(page, PICTURED)
        page.wait_for_timeout(1600)  # until the page has asked for the latest numbers
        page.screenshot(path=target, full_page=True)
        page.close()
