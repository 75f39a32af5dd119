"""The page at / in headless Chromium: with the fake engine, and with a real model."""

import base64
import io
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser import Browser
from http_fakes import IMAGES, PATIENCE, FakeEngine, RunningServer, saying
from PIL import Image
from test_http_serve_command import Process

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&lt;b&gt;"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def images() -> FakeEngine:
    engine = FakeEngine(images=IMAGES)
    yield engine  # pyright: ignore
    engine.shutdown()


def wait(condition: Callable[[], Any]) -> Any:
    """Waits for something that the page or the server brings about."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, "the awaited state never came"
        time.sleep(0.02)
    return value


class Page:
    """The page as somebody uses it."""

    def __init__(self, browser: Browser, url: str):
        self.browser, self.driver = browser, browser.driver
        browser.console()
        self.driver.get(url + "/")

    def find(self, name: str) -> Any:
        return self.driver.find_element("id", name)

    def text(self, name: str) -> str:
        return self.find(name).text

    def say(self, text: str) -> None:
        self.find("text").send_keys(text, "\n")

    def bodies(self) -> list[str]:
        return [element.text for element in self.driver.find_elements("css selector", ".message .body")]

    def facts(self) -> list[str]:
        return [element.text for element in self.driver.find_elements("css selector", ".message .facts")]

    def ready(self) -> "Page":
        wait(lambda: self.text("state") == "ready")
        return self


def test_an_answer_streams_and_stays_text(browser: Browser, engine: FakeEngine, serve: Any):
    engine.script = saying(HOSTILE)
    engine.allow(10)
    page = Page(browser, serve().url).ready()
    page.say(HOSTILE)
    # Half an answer is shown while the other half does not exist yet.
    wait(lambda: page.bodies() == [HOSTILE, HOSTILE[:10]])
    assert page.find("stop").is_displayed() and not page.find("send").is_displayed()
    engine.allow(None)
    wait(lambda: page.facts()[-1].startswith("stop · "))
    assert page.bodies() == [HOSTILE, HOSTILE]
    assert page.facts()[-1].startswith(f"stop · {len(HOSTILE) + 1} tokens · ")
    assert HOSTILE in page.find("announce").get_attribute("textContent")
    assert page.driver.title == "fake · hybridjax"
    assert not page.driver.find_elements("css selector", "#log img, #log script, #log b")
    # The next turn repeats the conversation.
    page.say("again")
    wait(lambda: len(page.facts()) == 4 and page.facts()[-1])
    assert engine.tokenizer is not None
    assert [message["role"] for message in engine.tokenizer.rendered[-1]] == ["user", "assistant", "user"]
    page.find("clear").click()
    assert page.bodies() == [] and page.find("empty").is_displayed()
    assert browser.console() == []


def test_reasoning_is_folded_away(browser: Browser, engine: FakeEngine, serve: Any):
    engine.script = saying("<think>because</think>so")
    page = Page(browser, serve(reasoning_parser="qwen3").url).ready()
    page.say("why?")
    wait(lambda: page.facts()[-1:] and page.facts()[-1])
    [details] = page.driver.find_elements("css selector", ".message details")
    assert details.text == "Reasoning"
    details.find_element("css selector", "summary").click()
    assert details.find_element("css selector", ".body").text == "because"
    assert page.driver.find_elements("css selector", ".message > .body")[-1].text == "so"


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stopping_aborts_the_request(browser: Browser, engine: FakeEngine, serve: Any, how: str):
    engine.allow(5)
    page = Page(browser, serve().url).ready()
    page.say("go on")
    wait(lambda: page.bodies()[-1:] == ["abcde"])
    page.find("stop").click() if how == "button" else page.find("text").send_keys("\ue00c")
    wait(lambda: page.facts()[-1].startswith("stopped"))
    engine.wait_until(lambda: not engine.live)
    assert list(engine.aborts.values()) == [1]
    assert page.find("send").is_displayed()
    assert browser.console() == []


def test_the_settings_are_sent(browser: Browser, engine: FakeEngine, serve: Any):
    engine.script = saying("ok")
    page = Page(browser, serve().url).ready()
    given = {"temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.1, "max_tokens": 9, "seed": 5}
    for name, value in given.items():
        page.find(name).clear()
        page.find(name).send_keys(str(value))
    page.find("system").send_keys("be brief")
    page.say("hello")
    wait(lambda: page.facts()[-1:] and page.facts()[-1])
    [(_, params)] = engine.submitted.values()
    assert {name: getattr(params, name) for name in given} == given
    assert engine.tokenizer is not None
    [messages] = engine.tokenizer.rendered
    assert [(m["role"], m["content"]) for m in messages] == [("system", "be brief"), ("user", "hello")]
    # What the server refuses is told.
    page.find("min_p").clear()
    page.find("min_p").send_keys("7")
    page.say("hello")
    wait(lambda: "failed: min_p is 7" in page.facts()[-1])


def test_a_failure_is_told_and_not_repeated(browser: Browser, engine: FakeEngine, serve: Any):
    engine.script = lambda prompt, params: iter([97, RuntimeError("no")])
    page = Page(browser, serve().url).ready()
    page.say("hello")
    wait(lambda: page.facts()[-1:] and page.facts()[-1].startswith("failed: The server failed"))
    # What failed is not part of the next turn.
    engine.script = saying("ok")
    page.say("again")
    wait(lambda: page.bodies()[-1:] == ["ok"])
    assert engine.tokenizer is not None and len(engine.tokenizer.rendered[-1]) == 1
    engine.is_healthy = False
    wait(lambda: page.text("state") == "failed")


def test_the_key_is_asked_for(browser: Browser, engine: FakeEngine, serve: Any):
    engine.script = saying("ok")
    page = Page(browser, serve(api_key="key-31").url)
    wait(lambda: page.text("state") == "needs a key")
    page.find("key").send_keys("key-31\n")
    page.ready().say("hello")
    wait(lambda: page.bodies()[-1:] == ["ok"])
    # Gone with the page.
    page.driver.refresh()
    wait(lambda: page.text("state") == "needs a key")
    assert page.find("key").get_attribute("value") == ""


def test_images_go_along(browser: Browser, images: FakeEngine, tmp_path: Any):
    images.script = saying("ok")
    server = RunningServer(images)
    picture = tmp_path / "red.png"
    Image.new("RGB", (8, 4), "red").save(picture)
    page = Page(browser, server.url).ready()
    wait(lambda: page.find("attach").is_displayed())
    page.find("files").send_keys(str(picture))
    page.find("files").send_keys(str(picture))
    wait(lambda: len(page.driver.find_elements("css selector", "#attached img")) == 2)
    page.driver.find_element("css selector", "#attached button").click()
    page.say("what is it?")
    wait(lambda: page.bodies()[-1:] == ["ok"])
    [sent] = images.images.values()
    assert [array.shape for array in sent] == [(4, 8, 3)]
    assert browser.console() == []
    server.stop()


def test_without_a_chat_template_text_is_continued(browser: Browser, engine: FakeEngine):
    engine.tokenizer.has_chat_template = False  # pyright: ignore
    engine.script = saying("def")
    server = RunningServer(engine)
    page = Page(browser, server.url).ready()
    assert page.find("text").get_attribute("placeholder") == "Text to continue"
    page.say("abc")
    wait(lambda: page.bodies() == ["abc", "def"])
    server.stop()


@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_and_nothing_sticks_out(
    browser: Browser, engine: FakeEngine, serve: Any, width: int, scheme: str
):
    engine.script = saying("x" * 300)
    browser.show(width, 800, scheme)
    page = Page(browser, serve().url).ready()
    page.say("hello")
    wait(lambda: page.facts()[-1:] and page.facts()[-1])
    page.driver.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width
    shown = Image.open(io.BytesIO(base64.b64decode(page.driver.get_screenshot_as_base64()))).convert("L")
    assert (shown.getpixel((3, 400)) > 128) == (scheme == "light")  # pyright: ignore
    assert page.driver.execute_script(CONTRAST) == []
    # Everything can be reached with the keyboard, in the order in which it is seen.
    page.driver.execute_script("document.getElementById('log').focus()")
    reached = ["log"]
    for _ in range(20):
        page.driver.switch_to.active_element.send_keys("\ue004")
        reached.append(page.driver.switch_to.active_element.get_attribute("id"))
    wanted = ["log", "text", "clear", "send", "temperature", "seed", "system", "key"]
    assert [name for name in dict.fromkeys(reached) if name in wanted] == wanted
    browser.show(1200, 800, "light")


# Texts whose contrast with their ground is below 4.5 (WCAG AA).
CONTRAST = """
const numbers = (color) => color.match(/[0-9.]+/g).map(Number);
const light = (color) => {
  const part = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = numbers(color).map(part);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element) => {
  for (; element; element = element.parentElement) {
    const color = getComputedStyle(element).backgroundColor;
    if (numbers(color)[3] !== 0) return color;
  }
  return "rgb(255, 255, 255)";
};
return [...document.querySelectorAll("body *")]
  .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && e.offsetParent)
  .filter((e) => !e.disabled)
  .filter((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05) < 4.5;
  })
  .map((e) => e.outerHTML.slice(0, 80));
"""


def test_a_real_model_answers_and_its_numbers_move(browser: Browser):
    server = Process(
        *("--context-length", "512", "--max-running-requests", "2", "--skip-server-warmup"),
        *("--chunked-prefill-size", "64"),
        command=("-m", "hybridjax.serve"),
    )
    try:
        page = Page(browser, server.url).ready()
        assert (page.text("model"), page.text("generated_tokens")) == ("tiny-sala", "0")
        page.say("Tell me a story")
        wait(lambda: page.bodies()[-1:] != [""] and len(page.bodies()) == 2)
        if page.find("stop").is_displayed():
            page.find("stop").click()
        wait(lambda: page.facts()[-1])
        wait(lambda: page.text("finished") == "1")
        assert int(page.text("generated_tokens")) > 0
        assert page.text("first_token_seconds") != "–"
        wait(lambda: page.text("running") == "0")
        assert browser.console() == []
    finally:
        server.kill()
