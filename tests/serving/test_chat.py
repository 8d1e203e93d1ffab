# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client asks `/v1/chat/completions`; prompts are by the folder's template."""

import dataclasses

import pytest
from starlette.testclient import TestClient

from switchx.api import Model
from switchx.data.bpe import read_bpe
from switchx.data.tasks import TextFormat
from switchx.models.config import ModelConfig
from switchx.models.params import init_params
from switchx.serving.app import make_app
from switchx.serving.chat import ChatForm, prompt_of_chat
from switchx.serving.limits import Limits
from switchx.serving.models import Models
from switchx.serving.refusals import Refusal
from switchx.serving.requests import prompt_of
from tests.data.tokenizer_files import tokenizer_folder
from tests.serving import served

CHATML = """\
{%- for message in messages %}
    {%- if loop.index0 > 8 %}{% break %}{% endif %}
    {%- if message.role == 'developer' %}{{ raise_exception('no developer here') }}{% endif %}
<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Trained with transformers' masks of what an assistant wrote; `who` ends with its block.
WITH_GENERATION = """\
{%- set who = 'none' %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
<|im_start|>{{ message.role }}
    {% generation %}
        {%- set who = message.role %}
        {%- for word in message.content.split() if word != 'Hello' %}
            {%- if word == '日本' %}{% break %}{% endif %}
{{ word | tojson }} of {{ who }}
        {%- endfor %}
    {%- endgeneration -%}
    <|im_end|>{{ who }}
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>{% generation %} assistant {% endgeneration %}
{% endif %}"""
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hello <there> 日本 "},
]
TEXT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello <there> 日本<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tokenizer_folder(tmp_path_factory.mktemp("chat"), "qwen")
    (folder / "chat_template.jinja").write_text(CHATML)
    vocabulary = read_bpe(folder)
    config = ModelConfig("decoder_only", vocabulary.size, 8, 8, 1, 8, 1, init_scale=4.0)
    params = init_params(config, served.jax.random.key(3))
    return Model(config, params, vocabulary, 0, TextFormat(False, True, False), "")


@pytest.fixture(scope="module")
def service(model):
    limits = dataclasses.replace(
        served.LIMITS, max_input_tokens=128, max_new_tokens=8, warm_up_tokens=0
    )
    with served.started(limits, model, name="tiny") as service:
        yield service


@pytest.fixture
def client(service):
    return TestClient(make_app(Models([service])))


def test_a_conversation_is_the_template_s_text_with_special_tokens_as_ids(model):
    ids = prompt_of_chat(model, TALK)
    assert ids == model.vocabulary.encode_special(TEXT)
    assert ids.count(model.vocabulary.encode_special("<|im_start|>")[0]) == 3


def test_tools_and_documents_are_none_as_templates_expect(model, monkeypatch):
    template = "{% if tools is none and documents is none %}plain{% else %}tools{% endif %}"
    monkeypatch.setattr(type(model.vocabulary), "chat_template", template)
    assert prompt_of_chat(model, TALK) == model.vocabulary.encode_special("plain")


def test_an_answer_ends_where_the_model_has_no_more_places(model, monkeypatch):
    prompt = prompt_of_chat(model, TALK)
    most = len(model.prompt(prompt)) + 5
    config = dataclasses.replace(model.config, positions="learned", max_length=most)
    form = ChatForm(dataclasses.replace(model, config=config), "tiny", 8, None)
    limits = dataclasses.replace(served.LIMITS, max_input_tokens=128, max_new_tokens=8)
    assert form.read({"messages": TALK}, limits).settings.max_new_tokens == 5
    message = "conversation needs .*lower max_completion_tokens"
    with pytest.raises(Refusal, match=message) as said:
        form.read({"messages": TALK, "max_completion_tokens": 6}, limits)
    assert said.value.field == "messages"


def test_a_start_is_read_where_the_template_writes_one(tmp_path):
    folder = tokenizer_folder(tmp_path, "llama_2")
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    vocabulary = read_bpe(folder)
    config = ModelConfig("decoder_only", vocabulary.size, 8, 8, 1, 8, 1)
    model = Model(config, {}, vocabulary, 0, TextFormat(False, True, False), "")
    for template in ("{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"):
        (folder / "chat_template.jinja").write_text(template)
        said = prompt_of_chat(model, [{"role": "user", "content": "hello"}])
        read = prompt_of(model, Limits(), lambda prompt: None, "messages", said)
        assert read.count(vocabulary.start_id) == ("bos_token" in template)


@pytest.mark.hf
def test_it_is_the_prompt_of_transformers(model, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=model.vocabulary.path, eos_token="<|im_end|>"
    )
    want = tokenizer.apply_chat_template(
        TALK, chat_template=CHATML, add_generation_prompt=True, tokenize=False
    )
    assert want == TEXT
    assert prompt_of_chat(model, TALK) == tokenizer.encode(want, add_special_tokens=False)
    monkeypatch.setattr(type(model.vocabulary), "chat_template", WITH_GENERATION)
    want = tokenizer.apply_chat_template(
        TALK, chat_template=WITH_GENERATION, add_generation_prompt=True, tokenize=False
    )
    assert '"<there>" of user<|im_end|>none' in want and "system" not in want
    assert prompt_of_chat(model, TALK) == tokenizer.encode(want, add_special_tokens=False)
    for wrong in ("{% generation %}", "{% for i in 'a' %}{% generation %}{% break %}"):
        monkeypatch.setattr(type(model.vocabulary), "chat_template", wrong)
        with pytest.raises(Refusal, match="the chat template: Unexpected end of template"):
            prompt_of_chat(model, TALK)


def test_openai_s_client_gets_messages_whole_and_in_chunks(model, service):
    package = pytest.importorskip("openai", reason="needs openai, of the extra dev")
    asked = {"model": "tiny", "messages": TALK, "temperature": 0}
    (want,) = model.generate([model.vocabulary.encode_special(TEXT)], max_new_tokens=8)
    want = model.vocabulary.decode(want)
    with served.listening(service) as (host, port):
        base = f"http://{host}:{port}/v1"
        with package.OpenAI(base_url=base, api_key="none", max_retries=0) as openai:
            whole = openai.chat.completions.create(**asked, max_completion_tokens=8)
            chunks = list(openai.chat.completions.create(**asked, stream=True))
    (choice,) = whole.choices
    assert (whole.object, whole.id[:9]) == ("chat.completion", "chatcmpl-")
    assert (choice.message.role, choice.message.content) == ("assistant", want)
    assert choice.finish_reason in ("stop", "length")
    assert whole.usage.prompt_tokens == len(model.vocabulary.encode_special(TEXT))
    deltas = [each.choices[0].delta for each in chunks]
    assert {each.object for each in chunks} == {"chat.completion.chunk"}
    assert deltas[0].role == "assistant" and not any(each.role for each in deltas[1:])
    assert "".join(each.content for each in deltas) == want
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "without tools"),
        ({"response_format": {"type": "json_object"}}, "response_format", "texts alone"),
        ({"logprobs": True}, "logprobs", "leave it out"),
        ({"prompt": "a"}, "prompt", "is no field"),
        ({"max_tokens": 9}, "max_tokens", "max_tokens is a number (9)"),
        ({"max_completion_tokens": 9}, "max_completion_tokens", "max_completion_tokens is"),
        ({"messages": []}, "messages", "give a list"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages", "there are no tools"),
        ({"messages": [{"role": "user"}]}, "messages", "role and content"),
        ({"messages": [{"role": "user", "content": [{"image": 1}]}]}, "messages", "no text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "file", "text": "a"}]}]},
            "messages",
            "no text",
        ),
        (
            {"messages": [{"role": "user", "content": "a<|im_end|>b"}]},
            "messages",
            "special token",
        ),
        ({"messages": [{"role": "developer", "content": "a"}]}, "messages", "no developer"),
        ({"messages": [{"role": "user", "content": "日" * 99}]}, "messages", "expected 128"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused_by_name(client, changes, field, says):
    response = client.post("/v1/chat/completions", json={"messages": TALK} | changes)
    error = response.json()["error"]
    assert (response.status_code, error["field"]) == (400, field) and says in error["message"]


def test_parts_of_texts_are_read_and_templates_see_no_python(model, client, monkeypatch):
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    outside = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    monkeypatch.setattr(type(model.vocabulary), "chat_template", outside)
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "unsafe" in response.json()["error"]["message"]


def test_a_model_without_a_template_says_so(client, model, monkeypatch):
    def none(self):
        raise ValueError("x has no chat template; copy it from the chat model's folder")

    monkeypatch.setattr(type(model.vocabulary), "chat_template", property(none))
    response = client.post("/v1/chat/completions", json={"messages": TALK})
    assert response.status_code == 400 and "copy it" in response.json()["error"]["message"]


def test_a_model_of_another_vocabulary_has_none_either():
    with pytest.raises(Refusal, match="use /v1/completions"):
        prompt_of_chat(served.model(), TALK)
