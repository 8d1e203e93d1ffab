# SPDX-License-Identifier: Apache-2.0
"""The page: whole by itself, nothing in it mistaken for HTML."""

import base64
import html.parser
import re
import xml.etree.ElementTree

import numpy as np

from switchx.analysis.plots import load_figure
from switchx.analysis.report import Section, Table, page

FIGURE = load_figure(np.array([1, 2]), np.ones((2, 1, 2)), ["encoder 1"])
SECTION = Section(
    "A & B",
    "if a < b",
    [FIGURE],
    [Table(("expert", "tokens"), [(0, "<pad>\na&b"), (1, "")], "fold <it>", ("tokens",))],
)


class Parser(html.parser.HTMLParser):
    """Tags, what they refer to, and the text between them."""

    def __init__(self, text: str):
        super().__init__()
        self.opened, self.references, self.texts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.opened.append(tag)
        self.references += [v for k, v in attributes if k in ("src", "href", "data", "action")]

    def handle_data(self, data):
        self.texts.append(data.strip())


def test_page_refers_to_nothing_outside():
    text = page("run <1>", {"folder": "a&b"}, [SECTION])
    parsed = Parser(text)
    assert len(parsed.references) == 1
    assert parsed.references[0].startswith("data:image/svg+xml;base64,")
    assert not {"script", "link", "iframe"} & set(parsed.opened)
    assert "http" not in re.sub(r"base64,[^\"]*", "", text) and "url(" not in text


def test_texts_are_shown_as_they_are():
    parsed = Parser(page("run <1>", {"folder": "a&b"}, [SECTION]))
    for text in ("run <1>", "a&b", "A & B", "if a < b", "fold <it>", "<pad>", "expert"):
        assert text in parsed.texts
    assert parsed.opened.count("details") == 1 and parsed.opened.count("code") == 2


def test_picture_is_an_svg_with_its_words_the_same_each_time():
    first, again = (page("a", {}, [SECTION]) for _ in range(2))
    assert first == again
    data = re.search(r"base64,([^\"]*)", first)[1]
    root = xml.etree.ElementTree.fromstring(base64.b64decode(data))
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"encoder 1", "step", "expert", "load (1 = even share)"} <= texts


def test_numbers_stand_to_the_right():
    table = Table(("layer", "load", "dead"), [("a", 1.23456, 2), ("b", 0.5, 0)])
    text = Section("t", "", tables=[table])._repr_html_()
    assert '<td class="number">1.235</td><td class="number">2</td>' in text
    assert "<td>a</td>" in text and "details" not in text
