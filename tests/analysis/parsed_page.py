# SPDX-License-Identifier: Apache-2.0
"""A page as tests read it."""

import html.parser


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
