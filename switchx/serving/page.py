# SPDX-License-Identifier: Apache-2.0
"""The page to try a model in: page.html with an input for each setting that requests have.

Its policy (Content Security Policy Level 3, https://www.w3.org/TR/CSP3) allows only the code in
the file to run, by its hash, and only connections to this server.
"""

import base64
import hashlib
import html
import importlib.resources
import json
import re

from starlette.responses import HTMLResponse

from switchx.api import Model
from switchx.data.tokenizers import TokenIdVocabulary
from switchx.fields import Option
from switchx.inference.config import DecodingConfig
from switchx.serving.requests import OPTIONS, fault_of_experts
from switchx.serving.service import Service

FILE = importlib.resources.files("switchx.serving").joinpath("page.html").read_text("utf-8")
SETTINGS = "    <!-- a label and an input of each setting -->\n"
EXPERTS_BOX = '    <label><input id="experts" type="checkbox"> experts of each token</label>\n'


def page_of(service: Service) -> HTMLResponse:
    """The page for a model; it asks for experts if answers can say which were chosen."""
    model = service.model
    own = DecodingConfig(**service.limits.defaults(model.decoding))
    inputs = "".join(_setting(each, getattr(own, each.name)) for each in OPTIONS.values())
    summary = f"{model.num_params:,} parameters, step {model.step};"
    texts = {"TITLE": f"{service.name} - switchx", "NAME": service.name, "ABOUT": summary}
    text = FILE.replace(SETTINGS, inputs)
    for place, value in (texts | {"EXAMPLE": example_of(model)}).items():
        text = text.replace(f">{place}", f">{html.escape(value)}", 1)
    if fault_of_experts(model) is not None:
        text = text.replace(EXPERTS_BOX, "")
    return HTMLResponse(text, headers={"content-security-policy": POLICY})


def example_of(model: Model) -> str:
    """An input like those that the model was trained to read."""
    if isinstance(model.vocabulary or model.ids, TokenIdVocabulary):
        return " ".join(map(str, range(5, 8)))
    if model.text_format.names_sentinels:
        return "import <extra_id_0> as np"
    return "The " if not model.config.is_encoder_decoder else "A man is riding a bicycle."


def _setting(option: Option, default) -> str:
    """A label and an input; one that is no number takes a list, JSON or a text."""
    kind = ("texts" if option.type is str else "ids") if option.is_list else ""
    attributes = {"id": option.name, "data-setting": kind, "title": option.help}
    if option.type in (int, float) and not option.choices and not option.is_list:
        attributes |= {"type": "number", "step": "1" if option.type is int else "any"}
        bounds = {"min": option.least, "max": option.most}
        attributes |= {name: n for name, n in bounds.items() if n is not None}
    shown = json.dumps(default) if default not in (None, ()) else "none"
    if option.name == "seed":  # differs for each request
        shown = "random"
    attributes["placeholder"] = shown.strip('"')
    written = " ".join(f'{name}="{html.escape(str(v))}"' for name, v in attributes.items())
    return f"    <label>{option.name.replace('_', ' ')} <input {written}></label>\n"


def _hash_of(element: str) -> str:
    (content,) = re.findall(rf"<{element}>(.*?)</{element}>", FILE, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"{element}-src 'sha256-{digest}'"


POLICY = (
    f"default-src 'none'; {_hash_of('script')}; {_hash_of('style')}; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
