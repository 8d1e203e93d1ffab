# SPDX-License-Identifier: Apache-2.0
"""The page in a browser: tokens come, experts have a number and a colour, keys suffice."""

import base64
import colorsys
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import types

import pytest
from starlette.testclient import TestClient

from switchx.data.tasks import TextFormat
from switchx.serving.app import make_app
from switchx.serving.models import Models
from switchx.serving.page import EXPERTS_BOX, FILE, example_of, page_of
from switchx.serving.requests import OPTIONS
from tests.serving import chromium, served


def test_the_page_runs_what_it_holds_and_loads_nothing(service):
    response = TestClient(make_app(Models([service]))).get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "connect-src 'self'" in policy and "unsafe" not in policy
    assert not re.findall(r"https?:|src=|@import|url\(|style=|\bon\w+=", response.text)
    for element in ("script", "style"):
        (content,) = re.findall(f"<{element}>(.*?)</{element}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy
    inputs = set(re.findall(r'id="(\w+)" data-setting', response.text))
    assert inputs == OPTIONS.keys() and response.text.count("<!--") == 0
    assert EXPERTS_BOX in response.text
    config = dataclasses.replace(served.CONFIG, switch=None)
    dense = dataclasses.replace(served.model(), config=config)
    other = types.SimpleNamespace(model=dense, limits=served.LIMITS, name="<b>")
    assert EXPERTS_BOX in FILE
    body = page_of(other).body
    assert b'id="experts"' not in body and b"<h1>&lt;b&gt;</h1>" in body
    assert b'placeholder="8"' in body  # max_new_tokens, within the limits


def test_examples_are_what_models_read(service):
    model = service.model
    assert example_of(model) == "import <extra_id_0> as np"
    plain = TextFormat(False, False, False)
    assert example_of(dataclasses.replace(model, text_format=plain)).endswith("bicycle.")
    ids = dataclasses.replace(model, vocabulary=None)
    assert example_of(ids) == "5 6 7"


@pytest.fixture
def page(address, tmp_path):
    if chromium.PROGRAM is None:
        pytest.skip(f"needs one of {', '.join(chromium.NAMES)}")
    with chromium.browsing("http://{}:{}/".format(*address), tmp_path / "profile") as page:
        yield page
        thrown = [params for name, params in page.events if name == "Runtime.exceptionThrown"]
        logged = [params["entry"] for name, params in page.events if name == "Log.entryAdded"]
        logged = [entry for entry in logged if entry["level"] != "info"]
        # A refusal is no fault of the page.
        assert [*thrown, *(each for each in logged if "400" not in each["text"])] == []


def contrast_with_black(colour: str) -> float:
    """WCAG 2.2's contrast ratio of black text on it."""
    hue, saturation, lightness = map(float, re.findall(r"[\d.]+", colour))
    rgb = colorsys.hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    luminance = sum(part * c for part, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return (luminance + 0.05) / 0.05


STATUS = "document.getElementById('status').textContent"
# What the answer that an event was of showed after it.
RECORD = """
window.shown = [];
const handled = handle;
handle = (name, data, boxes) => {
  handled(name, data, boxes);
  if (name === "done") return;
  shown.push([name, data.input, boxes[data.input].querySelector(".answer").textContent]);
};
"""
CELLS = """
[...document.querySelectorAll('article')].map((article) =>
  [...article.querySelectorAll('tbody tr')].map((row) => [...row.querySelectorAll('td')].map(
    (cell) => [cell.textContent, getComputedStyle(cell).backgroundColor])))
"""


def test_tokens_and_their_experts_are_shown(page, address, tmp_path):
    texts = served.TEXTS[:2]
    page.value(RECORD)
    page.wait_for("document.getElementById('state').textContent === 'ready'")
    page.value("document.getElementById('inputs').select()")
    page.write("\n".join(texts))  # the inputs have the focus
    page.value("document.getElementById('experts').focus()")
    page.press("Space")
    page.press("Enter", chromium.CONTROL)
    page.wait_for(f"{STATUS}.endsWith(' tokens')")

    settings = {"inputs": texts, "experts": True}
    status, body = served.post(address, settings)
    assert status == 200
    answers = page.value("[...document.querySelectorAll('.answer')].map((e) => e.textContent)")
    assert answers == [each["text"].replace("\n", "\u21b5") for each in body["results"]]
    order = "[...document.querySelector('article').children].map((e) => e.className)"
    assert page.value(order) == ["note", "strip", "answer", "note"]
    assert all(map(served.is_said, body["results"], texts))
    for number in range(2):
        *grown, last = [each for each in page.value("shown") if each[1] == number]
        assert grown and last[0] == "answer"
        texts_so_far = [text for name, _, text in grown if name == "tokens"]
        assert texts_so_far == sorted(set(texts_so_far), key=len) and last[2] == answers[number]
    colours = {}
    for rows, result in zip(page.value(CELLS), body["results"], strict=True):
        layers = result["experts"]["layers"]
        assert list(layers) == ["decoder 0"] and result["experts"]["num_experts"] == 2
        assert [[cell[0] for cell in row] for row in rows] == [
            ["+".join(map(str, chosen)) or "–" for chosen in layer] for layer in layers.values()
        ]
        for text, colour in (cell for row in rows for cell in row):
            assert colours.setdefault(text, colour) == colour
    assert len(set(colours.values())) == len(colours) >= 1
    many = page.value("[...Array(256).keys()].map(colour)")
    assert len(set(many)) == 256 and min(map(contrast_with_black, many)) > 4.5
    folder = pathlib.Path(os.environ.get("SWITCHX_SCREENSHOTS", tmp_path))
    page.screenshot(folder / "colour.png")
    page.screenshot(folder / "grey.png", in_grey=True)
    page.call("Emulation.setDeviceMetricsOverride", width=360, height=740, mobile=True,
              deviceScaleFactor=2)  # fmt: skip
    page.value("document.querySelector('details').open = true")
    assert page.value("document.documentElement.scrollWidth") <= 360
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    page.call("Emulation.setEmulatedMedia", features=[dark])
    colours = "getComputedStyle(document.body)"
    assert page.value(f"{colours}.backgroundColor") == "rgb(24, 26, 27)"
    assert page.value(f"{colours}.color") == "rgb(221, 221, 221)"
    page.screenshot(folder / "phone.png")


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"beam_size": 2, "num_return_sequences": 2}, 2),
        ({"temperature": 1, "num_return_sequences": 3, "seed": 1}, 3),
        ({"temperature": 1, "best_of": 3, "seed": 1}, 1),
    ],
)
def test_every_answer_of_an_input_is_shown(page, address, settings, count):
    page.wait_for("document.getElementById('state').textContent === 'ready'")
    texts = served.TEXTS[:2]
    page.value(f"document.getElementById('inputs').value = {json.dumps(chr(10).join(texts))}")
    for name, value in settings.items():
        page.value(f"document.getElementById('{name}').value = {json.dumps(str(value))}")
    page.value("generate()")
    page.wait_for(f"{STATUS}.endsWith(' tokens')")
    status, body = served.post(address, {"inputs": texts} | settings)
    assert status == 200
    want = [
        [each["text"].replace("\n", "\u21b5") for each in result.get("hypotheses", [result])]
        for result in body["results"]
    ]
    assert all(len(each) == count for each in want)
    shown = "[...document.querySelectorAll('article')].map((article) => "
    shown += "[...article.querySelectorAll('.answer')].map((each) => each.textContent))"
    assert page.value(shown) == want


def test_keys_reach_everything_and_everything_has_a_name(page):
    assert not page.value("document.querySelector('details').open")
    page.value("document.querySelector('details').open = true")
    reached = ["inputs"]
    for _ in range(len(OPTIONS) + 5):
        page.press("Tab")
        reached.append(page.value("document.activeElement.id || document.activeElement.type"))
    assert set(reached) >= {"inputs", *OPTIONS, "experts", "token", "submit"}
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    controls = [
        node
        for node in nodes
        if any(
            each["name"] == "focusable" and each["value"]["value"]
            for each in node.get("properties", ())
        )
        and node["role"]["value"] != "RootWebArea"
    ]
    assert len(controls) >= len(OPTIONS) + 4
    assert [node["role"] for node in controls if not node["name"]["value"]] == []


def test_settings_are_sent_and_refusals_shown(page):
    page.value("""
        window.sent = [];
        const fetch_ = fetch;
        window.fetch = (url, options) => {
          sent.push(JSON.parse(options.body));
          return fetch_(url, options);
        };
    """)
    page.value("document.getElementById('inputs').select()")
    page.write("gate")
    page.value("document.querySelector('details').open = true")
    ids = page.value("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len({*ids})
    typed = {"temperature": "0.5", "seed": "7", "beam_size": "2"}
    typed |= {"forced_prefix": "5, 6", "stop": "9"}
    for name, text in typed.items():
        page.value(f"document.getElementById('{name}').focus()")
        page.write(text)
    page.press("Enter")
    page.wait_for(f"{STATUS}.includes('beam_size')")
    assert page.value("document.getElementById('status').className") == "error"
    wanted = {"inputs": ["gate"], "stream": True, "temperature": 0.5, "seed": 7, "beam_size": 2}
    wanted |= {"forced_prefix": [5, 6], "stop": "9"}
    assert page.value("sent") == [wanted]


@pytest.mark.parametrize("key", ["Escape", None])
def test_an_answer_can_be_stopped(page, service, monkeypatch, key):
    monkeypatch.setattr(service.worker, "candidates", list)  # no input is ever answered
    page.value("document.getElementById('inputs').select()")
    page.write("gate")
    page.press("Enter", chromium.CONTROL)
    served.wait_until(lambda: len(service.worker.queue) == 1)
    assert not page.value("document.getElementById('halt').disabled")
    page.press("Escape") if key else page.value("document.getElementById('halt').click()")
    page.wait_for(f"{STATUS} === 'stopped'")
    assert page.value("document.getElementById('halt').disabled")
    served.wait_until(lambda: len(service.worker.queue) == 0)
