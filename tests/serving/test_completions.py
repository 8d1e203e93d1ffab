# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client asks `/v1/completions` and `/v1/models`; answers are `/v1/generate`'s."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import threading
import time
from types import SimpleNamespace

import hypothesis
import jax
import pytest
from hypothesis import strategies as st
from starlette.testclient import TestClient

from switchx.api import Model
from switchx.data.bpe import read_bpe
from switchx.data.tasks import TextFormat
from switchx.data.tokenizers import ByteVocabulary
from switchx.inference.running_batch import Hypothesis
from switchx.inference.score import Score
from switchx.models.config import ModelConfig
from switchx.models.params import init_params
from switchx.serving.answers import Behind, GrowingText, encoded, logprobs_json
from switchx.serving.app import make_app
from switchx.serving.completions import (
    CHUNK_BYTES,
    DEFAULT_TOKENS,
    FIELDS,
    UNSUPPORTED,
    CompletionForm,
    padded,
)
from switchx.serving.models import Models
from switchx.serving.refusals import Refusal
from tests.data.tokenizer_files import tokenizer_folder
from tests.serving import served

TOKEN = "0123456789abcdef"
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def openai(service):
    """OpenAI's client of a server that asks for a token and calls its model `tiny`."""
    package = pytest.importorskip("openai", reason="needs openai, of the extra dev")
    with served.listening(service, TOKEN) as (host, port):
        base_url = f"http://{host}:{port}/v1"
        with package.OpenAI(base_url=base_url, api_key=TOKEN, max_retries=0) as client:
            yield client


@pytest.fixture
def client(service):
    return TestClient(make_app(Models([service])))


def test_a_completion_of_texts_or_token_ids_is_the_models_own(openai):
    got = openai.completions.create(prompt=served.TEXTS[:3], **GREEDY)
    assert (got.object, got.model) == ("text_completion", "tiny")
    assert [choice.index for choice in got.choices] == [0, 1, 2]
    for choice, text in zip(got.choices, served.TEXTS, strict=False):
        want = served.said()[text]
        assert choice.text == want.output
        assert choice.finish_reason == ("stop" if want.is_finished else "length")
    prompts = served.model().prompts(served.TEXTS[:3])
    assert got.usage.prompt_tokens == sum(map(len, prompts))
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    (tokens,) = served.model().prompts(["gate"])
    for prompt in ("gate", ["gate"], tokens, [tokens]):
        got = openai.completions.create(prompt=prompt, **GREEDY)
        assert [choice.text for choice in got.choices] == [served.said()["gate"].output]


def test_a_stream_is_the_completion_in_pieces(openai):
    options = {"include_usage": True}
    chunks = list(
        openai.completions.create(
            prompt=served.TEXTS[:2], stream=True, stream_options=options, **GREEDY
        )
    )
    *pieces, last = chunks
    assert last.choices == [] and last.usage.completion_tokens > 0
    assert len({chunk.id for chunk in chunks}) == 1
    for index, text in enumerate(served.TEXTS[:2]):
        own = [chunk.choices[0] for chunk in pieces if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in own) == served.said()[text].output
        assert [choice.finish_reason is None for choice in own] == [True] * (len(own) - 1) + [
            False
        ]


def test_a_stream_ends_with_done(client):
    response = client.post("/v1/completions", json=GREEDY | {"prompt": "gate", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last, end = response.text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    for chunk in chunks:
        assert "usage" not in json.loads(chunk.removeprefix("data: "))


def test_samples_are_of_the_seed_and_n_of_them_differ(openai):
    def texts(**settings):
        got = openai.completions.create(
            model="tiny", prompt=["gate", "of"], n=2, max_tokens=8, **settings
        )
        assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
        return [choice.text for choice in got.choices]

    one = texts(seed=3, top_p=1)
    assert one == texts(seed=3, temperature=1.0) != texts(seed=4)
    assert one[0] != one[1] and texts() != texts()
    # They are those of /v1/generate with the same inputs in the same places.
    model = served.model()
    generator = model.generator(max_new_tokens=8, temperature=1.0, seed=3, pruning="none")
    prompts = model.prompts(["gate", "gate", "of", "of"])
    want = {number: best.tokens for number, (best, *_) in generator(prompts)}
    assert one == [model.vocabulary.decode(want[number]) for number in range(4)]


def place_to_stop(text: str) -> tuple[str, str]:
    """A string in a text, and what stands before it there first."""
    stop = text[len(text) // 2 :][:2]
    return stop, text[: text.index(stop)]


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_stop_string_ends_a_text_before_it(client, service, is_streaming):
    stop, before = place_to_stop(served.said()["gate"].output)
    metrics = service.metrics

    def counted():
        counters = (metrics.abandoned, metrics.success["stop"], metrics.success["length"])
        return [counter._value.get() for counter in counters]

    counts = counted()
    request = GREEDY | {"prompt": "gate", "stop": ["\0", stop], "stream": is_streaming}
    response = client.post("/v1/completions", json=request)
    if is_streaming:
        chunks = [line.removeprefix("data: ") for line in response.text.split("\n\n")[:-2]]
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
        text, reason = "".join(c["text"] for c in choices), choices[-1]["finish_reason"]
    else:
        body = response.json()
        (choice,) = body["choices"]
        text, reason = choice["text"], choice["finish_reason"]
        assert 0 < body["usage"]["completion_tokens"] <= 8
    assert (text, reason) == (before, "stop")
    assert counted() == [counts[0], counts[1] + 1, counts[2]]
    assert service.num_open == 0


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/completions"])
def test_tokens_are_counted_up_to_a_stop_string_in_an_answer(
    client, service, monkeypatch, path
):
    """Where the whole answer is there before its text is looked at."""
    monkeypatch.setattr("switchx.serving.scheduler.STEPS", (8, 8))
    generator = service.model.generator(max_new_tokens=8)
    ((_, (said,)),) = generator(service.model.prompts(["gate"]))
    decode, metrics = service.model.vocabulary.decode, service.metrics
    tokens, stop = said.tokens, decode(said.tokens[2:4])
    number = next(n for n in range(8) if stop in decode(tokens[:n]))
    assert 1 < number < len(tokens)

    def counted():
        counters = (metrics.generation_tokens, *metrics.success.values(), metrics.abandoned)
        return [counter._value.get() for counter in counters]

    counts = counted()
    if path == "/v1/generate":
        body = client.post(path, json={"inputs": "gate", "stop": [stop]}).json()
        assert body["results"][0]["tokens"] == tokens[:number]
        assert body["usage"]["generation_tokens"] == number
    else:
        body = client.post(path, json=GREEDY | {"prompt": "gate", "stop": [stop]}).json()
        assert body["choices"][0]["text"] == decode(tokens[:number]).removesuffix(stop)
        assert body["usage"]["completion_tokens"] == number
    # Tokens, `stop`, `length`, abandoned.
    assert [new - old for new, old in zip(counted(), counts, strict=True)] == [number, 1, 0, 0]


def test_echo_puts_the_prompt_before_the_text(openai):
    (tokens,) = served.model().prompts(["gate"])
    for prompt in ("gate", tokens):
        got = openai.completions.create(prompt=prompt, echo=True, **GREEDY)
        assert got.choices[0].text == "gate" + served.said()["gate"].output
    chunks = list(openai.completions.create(prompt="gate", echo=True, stream=True, **GREEDY))
    assert chunks[0].choices[0].text == "gate"
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == "gate" + served.said()["gate"].output


def test_log_probabilities_are_the_models_own(openai):
    request = {"prompt": "gate", "logprobs": 2, **GREEDY}
    (choice,) = openai.completions.create(**request).choices
    own = served.model().generate(["gate"], max_length=8, logprobs=2, with_scores=True)[0]
    kept, length = choice.logprobs, len(choice.logprobs.tokens)
    assert "".join(kept.tokens) == choice.text == own.output and length > 1
    assert kept.token_logprobs == pytest.approx(own.token_logprobs[:length], abs=1e-4)
    assert kept.text_offset == [len("".join(kept.tokens[:i])) for i in range(length)]
    for token, value, top, want in zip(
        kept.tokens, kept.token_logprobs, kept.top_logprobs, own.top_logprobs, strict=False
    ):
        assert len(top) == 2 and (not token or top[token] == value)
        assert list(top.values()) == pytest.approx(list(want.values()), abs=1e-4)
    chunks = openai.completions.create(stream=True, **request)
    pieces = [chunk.choices[0].logprobs for chunk in chunks]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert sum((getattr(piece, name) for piece in pieces), []) == getattr(kept, name)


def test_what_is_no_whole_character_stays_where_it_is():
    """A prompt's own mark of it, and more pieces than a token's text depends on."""
    vocabulary = ByteVocabulary()
    gate = vocabulary.encode("gate")
    for before in ("a\ufffd", "\ufffd" * 3):
        assert Behind(vocabulary, vocabulary.encode(before)).decode(gate) == "gate"
    smile = vocabulary.encode("\N{GRINNING FACE}")
    assert Behind(vocabulary, smile[:2]).decode(smile[2:]) == "\N{GRINNING FACE}"
    tokens = [*gate, *smile[1:2] * 12, *gate]
    said = Score(0.0, len(tokens), [0.0] * len(tokens))
    found = logprobs_json(vocabulary, tokens, said, 0)
    assert "".join(found["tokens"]) == vocabulary.decode(tokens)
    assert found["text_offset"][-3:] == [17, 18, 19]


def test_likeliest_tokens_without_a_text_are_named_by_their_ids(tmp_path):
    """Those of a table that is larger than the tokenizer."""
    vocabulary = read_bpe(tokenizer_folder(tmp_path, "qwen"))
    (token,), beyond = vocabulary.encode("a"), vocabulary.size + 3
    said = Score(-1.0, 1, [-1.0], [{token: -1.0, beyond: -2.0}])
    (top,) = logprobs_json(vocabulary, [token], said, 2)["top_logprobs"]
    assert top == {"a": -1.0, f"token_id:{beyond}": -2.0}


def test_a_prompt_of_one_token_behind_no_start_is_echoed_without_a_score(tmp_path):
    """As OpenAI has the first token of any prompt: null."""
    vocabulary = read_bpe(tokenizer_folder(tmp_path, "qwen"))
    config = ModelConfig("decoder_only", vocabulary.size, 8, 8, 1, 8, 1)
    model = Model(config, {}, vocabulary, 0, TextFormat(False, False, False), "")
    form = CompletionForm(model, "tiny", 8, None)
    wanted = form.read({"prompt": "a", "echo": True, "logprobs": 1}, served.LIMITS)
    events = SimpleNamespace(deadline_s=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "scorer", lambda *_, **__: lambda pairs: iter(pairs))
        (kept,) = asyncio.run(form._scored(wanted, events))
    want = {"tokens": ["a"], "text_offset": [0]}
    assert kept == want | {"token_logprobs": [None], "top_logprobs": [None]}


def test_n_best_of_a_search_and_of_samples(openai):
    settings = {"prompt": served.TEXTS[:2], "n": 2, "max_tokens": 8}
    got = openai.completions.create(model="tiny", extra_body={"beam_size": 2}, **settings)
    want = served.model().generate(
        served.TEXTS[:2], max_length=8, beam_size=2, num_return_sequences=2, pruning="none"
    )
    assert [choice.text for choice in got.choices] == sum(want, [])
    got = openai.completions.create(model="tiny", best_of=3, seed=4, **settings)
    sampling = {"temperature": 1.0, "best_of": 3, "num_return_sequences": 2, "seed": 4}
    want = served.model().generate(served.TEXTS[:2], max_length=8, pruning="none", **sampling)
    assert [choice.text for choice in got.choices] == sum(want, [])
    assert got.usage.prompt_tokens == sum(map(len, served.model().prompts(served.TEXTS[:2])))


@pytest.mark.slow
def test_echo_with_log_probabilities_scores_the_prompt():
    config = ModelConfig("decoder_only", 384, 8, 8, 1, 8, 1, init_scale=4.0)
    params = init_params(config, jax.random.key(1))
    format_ = TextFormat(False, False, False)
    model = Model(config, params, ByteVocabulary(), 0, format_, "")
    limits = dataclasses.replace(served.LIMITS, warm_up_tokens=0)
    request = {"prompt": ["gate", "of", ""], "logprobs": 1, "echo": True} | GREEDY
    with served.started(limits, model, name="tiny") as service:
        client = TestClient(make_app(Models([service])))
        got = client.post("/v1/completions", json=request)
        assert got.status_code == 200, got.text
        choices = got.json()["choices"]
        streamed = client.post("/v1/completions", json=request | {"stream": True}).text
    chunks = [json.loads(line[6:]) for line in streamed.split("\n\n")[:-2]]
    for index, (choice, prompt) in enumerate(zip(choices, request["prompt"], strict=True)):
        kept = choice["logprobs"]
        length, want = len(prompt), []
        if prompt:
            (score,) = model.score(None, [model.vocabulary.encode(prompt)], logprobs=1)
            want = score.token_logprobs
        assert kept["tokens"][:length] == list(prompt)
        assert kept["token_logprobs"][:length] == pytest.approx(want, abs=1e-4)
        assert len(kept["tokens"]) > length and choice["text"].startswith(prompt)
        own = [x["choices"][0] for x in chunks if x["choices"][0]["index"] == index]
        assert sum((x["logprobs"]["tokens"] for x in own), []) == kept["tokens"]
        assert "".join(x["text"] for x in own) == choice["text"]


def test_a_completion_keeps_the_space_behind_its_prompt(tmp_path):
    """Decoders of Llama 2 cut the one that a text begins with."""
    pytest.importorskip("tokenizers", reason="needs pip install 'switchx[bpe]'")
    vocabulary = read_bpe(tokenizer_folder(tmp_path, "llama_2"))
    prompt, answer = vocabulary.encode("Hello"), vocabulary.encode("Hello world there")
    answer = answer[len(prompt) :]
    config = ModelConfig("decoder_only", vocabulary.size, 8, 8, 1, 8, 1)
    model = Model(config, {}, vocabulary, 0, TextFormat(False, False, False), "")
    form = CompletionForm(model, "tiny", 8, None)
    values = {"prompt": "Hello", "logprobs": 0, "stop": [" there"]}
    wanted = dataclasses.replace(form.read(values, served.LIMITS), echoes=["Hello"])
    (row,) = form._rows(wanted)
    said = Hypothesis(answer, 0.0, True, token_logprobs=[-1.0] * len(answer))
    pieces = [row._text.grow(answer[:n]) for n in range(1, len(answer) + 1)]
    assert "".join(pieces) == " world" and row._text.is_stopped
    row.hypotheses = [said]
    (choice,) = form._choices(wanted, [row], [None])
    assert choice["text"] == "Hello world"
    assert "".join(choice["logprobs"]["tokens"]) == " world there"


@pytest.fixture
def scoring(monkeypatch):
    """Passes over texts that are done when its `go_on` is set, whatever the model is."""

    class Scoring:
        go_on, sizes, num_begun = threading.Event(), [], 0
        num_running = most_running = 0

        @contextlib.contextmanager
        def one(self):
            self.num_begun += 1
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
            assert self.go_on.wait(60)
            yield
            self.num_running -= 1

    scoring = Scoring()

    def scorer(model, *, batch_size=32, logprobs):
        scoring.sizes.append(batch_size)

        def scores(pairs):
            for number, (_, tokens) in enumerate(pairs):
                with scoring.one():
                    score = Score(-1.0, len(tokens), [-1.0] * len(tokens))
                yield number, score

        return scores

    monkeypatch.setattr(CompletionForm, "_require_scores", lambda form: None)
    monkeypatch.setattr(Model, "scorer", scorer)
    yield scoring
    scoring.go_on.set()


SCORED = GREEDY | {"prompt": ["gate", "of"], "echo": True, "logprobs": 0}


def test_texts_are_read_again_one_batch_at_a_time(service, limited, scoring):
    """Of all requests; those that ask for no such pass are answered meanwhile."""
    limited(max_waiting=32)
    path = "/v1/completions"
    with (
        served.listening(service) as address,
        concurrent.futures.ThreadPoolExecutor(9) as pool,
    ):
        asking = [pool.submit(served.post, address, SCORED, path=path) for _ in range(8)]
        try:
            end_s = time.monotonic() + 30
            while service.num_open < 8 or not scoring.num_begun:
                assert time.monotonic() < end_s
                time.sleep(0.01)
            time.sleep(0.1)
            request = GREEDY | {"prompt": "x"}
            status, body = served.post(address, request, path=path, timeout_s=20)
            assert status == 200 and body["choices"][0]["text"] == served.said()["x"].output
        finally:
            scoring.go_on.set()
        assert all(each.result()[0] == 200 for each in asking)
    assert scoring.most_running == 1 and scoring.num_begun == 8 * 2
    assert scoring.sizes == [service.limits.batch_size] * 8


def test_no_prompt_is_scored_after_the_deadline(service, limited, scoring):
    limited(request_timeout_s=0.2)
    with served.listening(service) as address:
        status, body = served.post(address, SCORED, path="/v1/completions")
        assert status == 504
        assert "the prompts were not scored in time" in body["error"]["message"]
        scoring.go_on.set()
        time.sleep(0.1)
    assert scoring.num_begun <= 1  # none where the machine is busy


def test_models_and_request_ids(openai):
    import openai as package

    (model,) = openai.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "switchx")
    assert openai.models.retrieve("tiny") == model
    for ask in (
        lambda: openai.models.retrieve("other/model"),
        lambda: openai.completions.create(model="other", prompt="gate"),
    ):
        with pytest.raises(package.NotFoundError) as caught:
            ask()
        assert caught.value.code == "model_not_found" and caught.value.param == "model"
    got = openai.completions.create(
        prompt="gate", extra_headers={"X-Request-Id": "mine-7"}, **GREEDY
    )
    assert (got._request_id, got.id) == ("mine-7", "cmpl-mine-7")
    other = openai.completions.create(prompt="gate", **GREEDY)
    assert len(other._request_id) == 32 and other.id == f"cmpl-{other._request_id}"


def test_errors_are_what_its_client_reads(openai):
    import openai as package

    with pytest.raises(package.AuthenticationError) as caught:
        openai.with_options(api_key="another").completions.create(prompt="gate", **GREEDY)
    assert caught.value.code == "invalid_api_key"
    with pytest.raises(package.BadRequestError) as caught:
        openai.completions.create(prompt="gate", logprobs=6, **GREEDY)
    assert caught.value.param == "logprobs" and caught.value.type == "invalid_request_error"
    assert "use 0 to 5" in caught.value.message
    with pytest.raises(package.BadRequestError, match="no chat template"):
        message = {"role": "user", "content": "gate"}
        openai.chat.completions.create(model="tiny", messages=[message])


def test_an_error_in_a_stream_is_raised(openai, service, limited):
    import openai as package

    limited(batch_wait_ms=500, request_timeout_s=0.05)
    with pytest.raises(package.APIError, match="no answer within 0.05 s"):
        list(openai.completions.create(prompt="gate", stream=True, **GREEDY))
    with pytest.raises(package.InternalServerError):
        openai.completions.create(prompt="gate", **GREEDY)


# Nothing is scored with it.
FORM = CompletionForm(served.model(), "tiny", served.LIMITS.batch_size, None)


def read(**values):
    return FORM.read({"prompt": "ab"} | values, served.LIMITS)


def test_defaults_are_openais():
    got = read()
    assert got.settings.temperature == 1.0 and got.settings.max_new_tokens == 8
    limits = dataclasses.replace(served.LIMITS, max_new_tokens=64)
    assert FORM.read({"prompt": "ab"}, limits).settings.max_new_tokens == DEFAULT_TOKENS
    assert read(temperature=0, top_p=0.5, top_k=3).settings.is_sampling is False
    assert read(beam_size=2).settings.beam_size == 2
    neutral = {name: values[0] for name, (values, _) in UNSUPPORTED.items() if values}
    assert list(read(**neutral, user="me", stop=None, n=1).stops) == []
    assert set(UNSUPPORTED) <= set(FIELDS)
    assert read(temperature=1e-6).settings.temperature == 1e-6
    assert read(temperature=1e-300, top_p=0.5).settings.is_sampling is False


def test_a_models_own_stop_gives_way_to_none():
    own = dataclasses.replace(served.model(), decoding={"stop": ["x"]})
    form = CompletionForm(own, "tiny", 8, None)
    assert form.read({"prompt": "ab"}, served.LIMITS).stops == ("x",)
    assert form.read({"prompt": "ab", "stop": "y"}, served.LIMITS).stops == ("y",)
    assert form.read({"prompt": "ab", "stop": []}, served.LIMITS).stops == ()
    assert form.read({"prompt": "ab", "beam_size": 2}, served.LIMITS).stops == ()


@pytest.mark.parametrize(
    ("values", "field", "message"),
    [
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"prompt": {}}, "prompt", "prompt is an object"),
        ({"prompt": []}, "prompt", "prompt has 0 items; expected 1 to 8"),
        ({"prompt": ["a"] * 5, "n": 2}, "prompt", "5 items; expected 1 to 4, over n"),
        ({"prompt": [1, "a"]}, "prompt[0]", "expected a text, or a list of token ids"),
        ({"prompt": "a" * 99}, "prompt[0]", "prompt[0] has 100 tokens; expected 16 at most"),
        ({"max_tokens": -1}, "max_tokens", "expected a whole number, 0 to 8"),
        ({"max_tokens": 9}, "max_tokens", "max_tokens is a number (9); expected a whole"),
        ({"n": 0}, "n", "n is a number (0)"),
        ({"n": 3, "best_of": 2}, "best_of", "expected n=3 or more"),
        ({"best_of": 9}, "best_of", "expected a whole number, 1 to 8"),
        ({"best_of": 2, "temperature": 0}, "best_of", "it chooses among samples"),
        ({"best_of": 2, "beam_size": 2}, "best_of", "it chooses among samples"),
        ({"best_of": 2, "stream": True}, "best_of", "leave out stream"),
        ({"n": 3, "beam_size": 2}, "n", "expected 1 to 2"),
        ({"echo": 1}, "echo", "expected true or false"),
        ({"logprobs": -1}, "logprobs", "use 0 to 5"),
        ({"logprobs": True}, "logprobs", "expected a whole number, 0 to 5"),
        ({"logprobs": 1, "echo": True}, "logprobs", "this model's encoder reads the prompt"),
        ({"repetition_penalty": 0}, "repetition_penalty", "use 0.01 to 100"),
        ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size", "use 0 to"),
        ({"forced_prefix": "fr"}, "forced_prefix", "expected a list of token ids"),
        ({"forced_prefix": [384]}, "forced_prefix", "the vocabulary has 0 to 383"),
        ({"forced_prefix": [5] * 9}, "forced_prefix", "use max_tokens=8 ids at most"),
        ({"min_new_tokens": 9}, "min_new_tokens", "use 0 to max_tokens=8"),
        ({"suffix": "x"}, "suffix", "texts are not completed in their middle"),
        ({"presence_penalty": 0.5}, "presence_penalty", "use repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "logits have no biases"),
        ({"stop": ["a"] * 5}, "stop", "stop has 5 items; expected 4 at most"),
        ({"stop": ""}, "stop", "expected a text, or a list of texts"),
        ({"stop": "a", "beam_size": 2}, "stop", "with beam_size above 1; a search is"),
        ({"top_p": "x", "temperature": 0}, "top_p", "expected a number"),
        ({"top_p": 1.5, "temperature": 0}, "top_p", "top_p is a number (1.5); use 0 to 1"),
        ({"top_k": -1, "temperature": 0}, "top_k", "top_k is a number (-1); use 1 to"),
        ({"stream_options": {}}, "stream_options", "is for streams"),
        ({"messages": []}, "messages", "'messages' is no field"),
        ({"user": 3}, "user", "expected a text"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_named(values, field, message):
    with pytest.raises(Refusal) as caught:
        read(**values)
    assert (caught.value.status, caught.value.field) == (400, field)
    assert message in caught.value.message


def test_a_model_without_a_vocabulary():
    model = dataclasses.replace(served.model(), vocabulary=None)
    form = CompletionForm(model, "tiny", served.LIMITS.batch_size, None)
    with pytest.raises(Refusal, match="came without a vocabulary; use /v1/generate"):
        form.read({"prompt": "ab"}, served.LIMITS)


@hypothesis.example("éaé", ["a", "éaé"], [3])  # where what comes after 3 bytes is another stop
@hypothesis.given(
    st.lists(st.sampled_from("abé🙂"), max_size=14).map("".join),
    st.lists(st.lists(st.sampled_from("abé"), min_size=1, max_size=3).map("".join), max_size=3),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_pieces_up_to_a_stop_are_the_text_before_it(text, stops, cuts):
    """Against str.find of the whole text: before the stop that is complete first."""
    vocabulary = ByteVocabulary()
    tokens, growing, pieces = vocabulary.encode(text), GrowingText(vocabulary, stops), ""
    ends = [*sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    for end in ends:
        pieces += growing.grow(tokens[:end], is_last=end == len(tokens))
        if growing.is_stopped:
            break
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    first_end, place = min(found, default=(None, len(text)))
    assert pieces == growing.text == text[:place]
    assert growing.is_stopped == bool(found)
    if found:
        assert growing.num_tokens(tokens[:end]) == len(vocabulary.encode(text[:first_end]))


def test_no_tokens_are_asked_for(openai):
    """`max_tokens` of 0: evaluations have prompts echoed, and nothing is decoded."""
    asked = {"model": "tiny", "max_tokens": 0, "n": 2, "prompt": ["gate", "of"]}
    got = openai.completions.create(**asked, echo=True)
    assert [each.text for each in got.choices] == ["gate", "gate", "of", "of"]
    assert {each.finish_reason for each in got.choices} == {"length"}
    assert got.usage.completion_tokens == 0 < got.usage.prompt_tokens
    assert [each.text for each in openai.completions.create(**asked).choices] == [""] * 4
    chunks = list(openai.completions.create(**asked, stream=True))
    assert [each.choices[0].finish_reason for each in chunks] == ["length"] * 4


@pytest.mark.parametrize("seed", [-1, 2**31, 2**63 - 1, -(2**63), 10**30])
def test_any_whole_number_is_a_seed(seed):
    got = read(seed=seed).settings.seed
    assert got == seed % 2**31 == read(seed=got).settings.seed


def test_chunks_are_padded_to_few_sizes_where_that_is_asked_for(openai):
    # How many tokens a chunk has depends on the clock: the sizes are tested below.
    for is_padded in (False, True):
        raw = openai.completions.with_raw_response.create(
            prompt="gate",
            stream=True,
            stream_options={"include_obfuscation": is_padded},
            **GREEDY,
        )
        lines = [each for each in raw.http_response.iter_lines() if each.startswith("data: {")]
        assert lines and all(("obfuscation" in each) is is_padded for each in lines)
    # Texts of one size class make chunks of the same size, and stay as they are.
    chunks = [{"choices": [{"text": "x" * length, "index": 0}]} for length in range(200)]
    answers = [padded(each) for each in chunks]
    sizes = [len(encoded(each)) for each in answers]
    assert [each["choices"] for each in answers] == [each["choices"] for each in chunks]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) <= 2 + 200 // CHUNK_BYTES
