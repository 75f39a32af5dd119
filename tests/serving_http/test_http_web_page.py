"""The page's files, headers and numbers; what a browser makes of them is in test_http_web_page_browser.py."""

import base64
import hashlib
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_fakes import IMAGES, FakeEngine, RunningServer

from hybridjax.serving.api import EngineStats

KEY = "page-key-77"


def test_the_page_is_one_file_that_may_run_its_own_script_only(http: httpx.Client):
    reply = http.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(rule.partition(" ")[::2] for rule in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["frame-ancestors"] == policy["trusted-types"] == "'none'"
    assert policy["connect-src"] == "'self'" and policy["img-src"] == "data:"
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        [inline] = re.findall(rf"<{tag}>(.*?)</{tag}>", reply.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert policy[rule] == f"'sha256-{digest}'"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"
    # Nothing of elsewhere, and no attribute that is code or style.
    assert not re.search(r"https?:|//[a-z]|\bsrc=|@import|url\(", reply.text.replace('rel="icon"', ""))
    assert not re.search(r"<[^>]*\s(on\w+|style)\s*=", reply.text)


def test_the_script_makes_no_markup_and_keeps_no_key():
    script = (files("hybridjax.serving.http") / "web" / "page.js").read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function("):
        assert word not in script
    for word in ("localStorage", "sessionStorage", "indexedDB", "cookie"):
        assert word not in script


def test_the_page_needs_no_key_but_what_it_shows_does(serve: Any):
    server = serve(api_key=KEY)
    page = httpx.get(server.url + "/")
    assert page.status_code == 200
    assert "fake" not in page.text and KEY not in page.text
    assert httpx.get(server.url + "/web/state").status_code == 401
    headers = {"authorization": f"Bearer {KEY}"}
    assert httpx.get(server.url + "/web/state", headers=headers).json()["model"] == "fake"


def test_the_state_is_the_servers(serve: Any):
    engine = FakeEngine(images=IMAGES)
    engine.stats = EngineStats(
        running=3, waiting=2, used_pages=10, total_pages=40, used_slots=3, total_slots=8
    )
    engine.cached_tokens = 1
    server = RunningServer(engine)
    fresh = httpx.get(server.url + "/web/state").json()
    assert fresh == {
        **{"model": "fake", "state": "ready", "chat": True, "images": {"max_count": 3}},
        **{"context_length": 2**20, "max_running": 8, "running": 3, "waiting": 2},
        **{"tokens_per_second": 0, "generated_tokens": 0, "finished": 0, "first_token_seconds": None},
        **{"cache_hit_rate": 0, "page_share": 0.25, "slot_share": 0.375},
    }
    httpx.post(server.url + "/v1/completions", json={"prompt": [1, 2, 3, 4], "max_tokens": 5})
    later = httpx.get(server.url + "/web/state").json()
    assert (later["generated_tokens"], later["finished"], later["cache_hit_rate"]) == (5, 1, 0.25)
    assert 0 < later["first_token_seconds"] < 60
    engine.is_healthy = False
    assert httpx.get(server.url + "/web/state").json()["state"] == "failed"
    server.lifecycle.draining = True
    assert httpx.get(server.url + "/web/state").json()["state"] == "draining"
    server.stop()
    engine.shutdown()


def test_a_server_without_the_page(serve: Any):
    server = serve(disable_web_page=True)
    assert httpx.get(server.url + "/").status_code == 404
    assert httpx.get(server.url + "/web/state").status_code == 404
    assert httpx.get(server.url + "/health").status_code == 200


def test_a_server_without_tokenizer_does_not_chat(engine: FakeEngine):
    server = RunningServer(engine, tokenizer=None)
    assert httpx.get(server.url + "/web/state").json()["chat"] is False
    server.stop()


def test_polling_fills_no_log(serve: Any, caplog: pytest.LogCaptureFixture):
    server = serve()
    with caplog.at_level("INFO"):
        httpx.get(server.url + "/web/state")
        httpx.get(server.url + "/")
        server.settle()
    lines = [record.getMessage() for record in caplog.records if record.name == "hybridjax.http"]
    assert [line.split()[1:3] for line in lines] == [["GET", "/"]]


def test_the_files_are_in_the_package():
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["hybridjax"]
    packaged = {path for pattern in patterns for path in (root / "hybridjax").glob(pattern)}
    web = root / "hybridjax" / "serving" / "http" / "web"
    assert {web / name for name in ("page.html", "page.css", "page.js")} <= packaged
