# SPDX-License-Identifier: Apache-2.0
"""The request queue, the worker whose answers are the model's own, and who is admitted."""

import asyncio
import contextlib
import dataclasses
import json
import queue
import threading
import time
from collections import Counter

import jax
import numpy as np
import pytest

from switchx.api import Model
from switchx.data.tasks import TextFormat
from switchx.data.tokenizers import ByteVocabulary
from switchx.inference.program_cache import COMPILATIONS, PROGRAMS
from switchx.inference.running_batch import Hypothesis, RunningBatch
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import init_params
from switchx.serving import asked_shapes, scheduler
from switchx.serving.answers import GrowingAnswer
from switchx.serving.limits import Limits
from switchx.serving.metrics import INTER_TOKEN
from switchx.serving.models import Models
from switchx.serving.refusals import Refusal
from switchx.serving.request_queue import (
    Answer,
    Failure,
    NewTokens,
    ProgramShape,
    QueuedInput,
    RequestQueue,
)
from switchx.serving.requests import DecodingConfig, GenerateRequest, read_request
from switchx.serving.scheduler import Batch, Worker
from switchx.serving.service import Events, Service
from tests.serving import served


def waiting(name: int, prompt_length=16) -> QueuedInput:
    shape = ProgramShape(prompt_length, 16, 1, False)
    return QueuedInput([5], DecodingConfig(4), name, shape, deliver=lambda event: None)


def numbers(batch):
    return [each.number for each in batch]


def test_groups_are_of_sizes_and_kinds_and_joined_by_kind():
    limits = Limits(max_new_tokens=100)

    def shape(prompt=20, **settings):
        settings = DecodingConfig(**({"max_new_tokens": 5} | settings))
        return ProgramShape.of([5] * prompt, settings, limits)

    assert shape() == shape(prompt=30, max_new_tokens=16, length_penalty=2.0)
    assert shape(temperature=0.5, seed=1) == shape(temperature=2.0, top_k=4)
    kinds = [shape(), shape(9), shape(max_new_tokens=20), shape(beam_size=2),
             shape(temperature=1.0)]  # fmt: skip
    assert len(set(kinds)) == 5
    long, many = ProgramShape(64, 16, 2, False), ProgramShape(16, 256, 2, False)
    assert long.joined(many) == many.joined(long) == ProgramShape(64, 256, 2, False)
    assert long.kind == many.kind != ProgramShape(64, 16, 1, True).kind


def queue_of(size: int, batch_size: int, batch_wait_ms: float = 0.0) -> RequestQueue:
    limits = Limits(
        max_waiting=size, max_inputs=1, batch_size=batch_size, batch_wait_ms=batch_wait_ms
    )
    return RequestQueue(limits)


def test_inputs_are_taken_in_all_or_none_and_leave_when_abandoned():
    queued = queue_of(3, 8)
    assert queued.put([waiting(0), waiting(1)])
    assert not queued.put([waiting(2), waiting(3)]) and len(queued) == 2
    assert queued.put([waiting(4)]) and len(queued) == 3
    queued.close()
    assert not queued.put([])
    queued = queue_of(2, 8)
    gone = waiting(0)
    queued.put([gone, waiting(1)])
    seen = queued.waiting()
    queued.abandon([gone])
    assert gone.is_abandoned and len(queued) == 1
    assert queued.put([waiting(2)]) and numbers(queued.waiting()) == [1, 2]
    assert numbers(queued.take(seen)) == [1]


def test_an_input_waits_for_others_but_not_for_ever():
    queued = queue_of(99, 2, batch_wait_ms=200)
    assert not queued.wait_left_s()
    queued.put([waiting(0)])
    assert 0 < queued.wait_left_s() <= 0.2
    threading.Timer(0.02, lambda: queued.put([waiting(1)])).start()
    queued.wait(queued.num_changes, 60)
    assert not queued.wait_left_s()
    assert numbers(queued.take(queued.waiting())) == [0, 1]
    queued.put([waiting(2)])
    queued.wait(queued.num_changes, queued.wait_left_s())
    assert queued.wait_left_s() < 0.01


def test_changes_and_the_end_wake_who_waits():
    queued = queue_of(9, 8)
    seen = queued.num_changes
    queued.notify()
    queued.wait(seen, None)
    queued = queue_of(9, 8)
    thread = threading.Thread(target=lambda: queued.wait(queued.num_changes, None))
    thread.start()
    queued.close()
    thread.join(5)
    assert not thread.is_alive()


WAIT_S = 60


def ask(service, prompts, settings=None, *, is_streaming=False):
    """Inputs that are put into the queue at once, and the queue of their events."""
    events, settings = queue.Queue(), settings or [DecodingConfig(8)] * len(prompts)
    inputs = [
        QueuedInput(
            prompt,
            own,
            number,
            ProgramShape.of(prompt, own, service.limits),
            events.put,
            is_streaming,
        )
        for number, (prompt, own) in enumerate(zip(prompts, settings, strict=True))
    ]
    assert service._queue.put(inputs)
    return inputs, events


def answers(events, count):
    found = {}
    while len(found) < count:
        event = events.get(timeout=WAIT_S)
        assert not isinstance(event, Failure)
        if isinstance(event, Answer):
            assert event.number not in found
            found[event.number] = event.hypothesis
    return [found[number] for number in sorted(found)]


def same(got, want):
    assert (got.tokens, got.is_finished) == (want.tokens, want.is_finished)
    assert got.score == pytest.approx(want.score, rel=1e-4)


def test_times_between_tokens_are_counted_for_each_and_show_a_pause(service, monkeypatch):
    """A token a look, and 0.4 s before the third."""
    metrics, advance, calls = service.metrics, RunningBatch.advance, []

    def slower(batch, most_steps, **options):
        calls.append(most_steps)
        time.sleep(0.4 * (len(calls) == 3))
        return advance(batch, 1, **options)

    def counts(histogram):
        return np.array([each.get() for each in histogram._buckets])

    monkeypatch.setattr(RunningBatch, "advance", slower)
    histograms = metrics.first_token_s, metrics.inter_token_s
    before = [counts(each) for each in histograms]
    _, events = ask(service, service.model.prompts(["gate"]))
    (got,) = answers(events, 1)
    number = len(got.tokens) + got.is_finished
    first, later = (counts(each) - old for each, old in zip(histograms, before, strict=True))
    assert number > 3 and (first.sum(), later.sum()) == (1, number - 1)
    is_slow = np.array([*INTER_TOKEN, np.inf]) > 0.4
    assert 1 <= later[is_slow].sum() < number - 1


def test_a_new_group_is_compiled_while_others_are_answered(service, monkeypatch):
    """A batch of the compiled shape is answered while the compiler is held up."""
    compile_more, begun = type(service.worker).compile_more, threading.Event()
    go_on = threading.Event()

    def held_up(worker, shape):
        if shape.beam_size == 2:
            begun.set()
            assert go_on.wait(WAIT_S)
        compile_more(worker, shape)

    monkeypatch.setattr(type(service.worker), "compile_more", held_up)
    greedy = {g: size for g, size in service.worker._compiled.items() if g.beam_size == 1}
    monkeypatch.setattr(service.worker, "_compiled", greedy)
    prompts = service.model.prompts(served.TEXTS[:2])
    _, searches = ask(service, prompts[:1], [DecodingConfig(8, beam_size=2)])
    assert begun.wait(WAIT_S)
    _, others = ask(service, prompts)
    assert len(answers(others, 2)) == 2 and searches.empty()
    go_on.set()
    (got,) = answers(searches, 1)
    ((_, (want, *_)),) = service.model.generator(max_new_tokens=8, beam_size=2)(prompts[:1])
    same(got, want)


def test_inputs_of_a_compiled_group_join_and_leave_without_a_compilation(service):
    """Any number beside any number, in the largest batch."""
    shape, worker = ProgramShape(16, 16, 1, False), service.worker
    while worker._num_compiled(shape) < served.LIMITS.batch_size:
        worker.compile_more(shape)

    def inputs(number, tokens):
        return [QueuedInput([5], DecodingConfig(tokens), i, shape, id) for i in range(number)]

    def compiled_by(there: int, joining: int) -> int:
        before, running = COMPILATIONS.number, worker._running_batch(shape)
        worker._read(running, inputs(there, 4), shape, {})
        running.advance(1)
        worker._read(running, inputs(joining, 2), shape, {})
        while running.waiting:
            running.advance(1)
        return COMPILATIONS.number - before

    most = served.LIMITS.batch_size
    pairs = [(there, most - there) for there in range(1, most)]
    assert [compiled_by(*pair) for pair in [*pairs, (1, 1)]] == [0] * most


def test_experts_are_given_back_between_the_programs_that_are_compiled(service, monkeypatch):
    """A batch that waits for them waits for one compilation, not for a larger batch's."""
    held, most = [], []

    @contextlib.contextmanager
    def moving(worker):
        held.append(0)
        yield

    def counted(running, *args, run=RunningBatch.advance, **options):
        held[-1] += 1
        most.append(held[-1])
        return run(running, *args, **options)

    monkeypatch.setattr(Worker, "_moving_experts", moving)
    monkeypatch.setattr(RunningBatch, "advance", counted)
    worker = Worker(service.model, service.limits, service.metrics)  # whose thread never runs
    for _ in range(2):
        worker.compile_more(ProgramShape(16, 16, 1, False))
    assert len(held) > 4 and {*most} == {1}


def test_inputs_are_answered_where_not_even_their_programs_are_kept(service, monkeypatch):
    prompts = service.model.prompts(served.TEXTS[:1])
    with monkeypatch.context() as patch:
        patch.setattr(PROGRAMS, "most", 1)
        (asked,), events = ask(service, prompts)
        (got,) = answers(events, 1)
        _, events = ask(service, prompts)
        same(answers(events, 1)[0], got)
    # Other tests have the programs of whole batches.
    while service.worker._num_compiled(asked.shape) < served.LIMITS.batch_size:
        service.worker.compile_more(asked.shape)
    want = served.said()[served.TEXTS[0]]
    assert service.model.vocabulary.decode(got.tokens) == want.output


def test_inputs_are_answered_by_the_programs_there_are(service, monkeypatch, caplog):
    """Where those of a larger batch cannot be compiled: which is tried once."""
    tried = []

    def fail(worker, running, shape, *sizes):
        tried.append(shape)
        raise RuntimeError("no memory to compile, say")

    prompts = service.model.prompts(served.TEXTS[:5])
    shape = ProgramShape.of(prompts[0], DecodingConfig(8), service.limits)
    monkeypatch.setattr(type(service.worker), "_read_ones", fail)
    monkeypatch.setattr(service.worker, "_compiled", {shape: 2})
    monkeypatch.setattr(service.worker, "_most", {})
    for _ in range(2):
        _, events = ask(service, prompts)
        got = [service.model.vocabulary.decode(each.tokens) for each in answers(events, 5)]
        assert got == [served.said()[text].output for text in served.TEXTS[:5]]
    assert tried == [shape] and "2 inputs at most are decoded together" in caplog.text


def test_nothing_is_compiled_where_all_is(service):
    """As where it was compiled between a look at what there is and the question for it."""
    worker, shape = service.worker, ProgramShape(16, 8, 1, False)
    while worker._num_compiled(shape) < served.LIMITS.batch_size:
        worker.compile_more(shape)
    before = COMPILATIONS.number
    worker.compile_more(shape)
    assert COMPILATIONS.number == before


def test_an_input_whose_batch_cannot_be_joined_is_the_next_to_be_decoded(service, monkeypatch):
    """A long input waits for a short one; a later short one does not go before it."""
    worker = Worker(service.model, service.limits, service.metrics)  # whose thread never runs
    short, long = ProgramShape(16, 256, 1, False), ProgramShape(64, 16, 1, False)
    compiled, joined = {short: 4, long: 4}, []
    monkeypatch.setattr(worker, "_num_compiled", lambda shape: compiled.get(shape, 0))
    monkeypatch.setattr(worker, "_join", lambda kind, inputs, shape: joined.append(inputs))
    # Of both lengths no program could be compiled, though the inputs have theirs.
    worker.queue.put([dataclasses.replace(waiting(9), shape=short.joined(long))])
    worker.give_up(short.joined(long))
    assert not worker.queue.waiting()
    first, second, third = (
        dataclasses.replace(waiting(i), shape=shape)
        for i, shape in enumerate((short, long, short))
    )
    worker.queue.put([second, third])
    worker._batches[short.kind] = batch = Batch(None, short, {0: first})
    assert not worker._admit() and not joined and batch.is_full
    worker._batches.clear()
    assert worker._admit() and joined == [[second]] and worker.queue.waiting() == [third]


def test_a_batch_that_fails_fails_alone(service, monkeypatch, caplog):
    def fail(*arguments, **keywords):
        raise RuntimeError("out of memory, say")

    prompts = service.model.prompts(served.TEXTS[:2])
    with monkeypatch.context() as patch:
        patch.setattr("switchx.serving.scheduler.RunningBatch", fail)
        _, events = ask(service, prompts)
        failures = [events.get(timeout=WAIT_S) for _ in prompts]
    assert failures == [Failure(0), Failure(1)]
    assert "out of memory, say" in caplog.text
    _, events = ask(service, prompts)
    assert len(answers(events, 2)) == 2
    assert service.worker.is_ready and service.worker.error is None


def spoilt_model() -> Model:
    """That of `served`, but an expert of the encoder gives NaN: of the texts "of" alone has no
    token that chooses it."""
    model = served.model()
    params = jax.tree.map(lambda leaf: leaf, model.params)
    experts = params["encoder"]["blocks"]["layer_0"]["ffn"]["experts"]
    experts["w_out_EFD"] = experts["w_out_EFD"].at[1].set(np.nan)
    return dataclasses.replace(model, params=params)


@pytest.mark.parametrize("beam_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_input_whose_scores_are_nan_fails_alone(service, caplog, beam_size):
    """It gets no tokens, and what is decoded beside it goes on."""
    model, settings = spoilt_model(), DecodingConfig(8, beam_size=beam_size)
    prompts = model.prompts(["gate", "of"])
    with served.started(a_model=model) as spoilt:
        _, events = ask(spoilt, prompts, [settings] * 2, is_streaming=True)
        found = []
        while len([each for each in found if not isinstance(each, NewTokens)]) < 2:
            found.append(events.get(timeout=WAIT_S))
        assert spoilt.worker.error is None and not spoilt.worker.running
    with pytest.raises(ValueError, match="input [0-7] has no answer whose score is a number"):
        model.generate(served.TEXTS, max_length=8, beam_size=beam_size, pruning="none")
    failures = [each for each in found if isinstance(each, Failure)]
    assert [each.number for each in failures] == [0]
    assert "no answer whose score is a number" in failures[0].message
    assert "an input of 5 tokens has no answer" in caplog.text
    assert {each.number for each in found if not isinstance(each, Failure)} == {1}
    (got,) = [each.hypothesis for each in found if isinstance(each, Answer)]
    ((_, (want, *_)),) = service.model.generator(
        max_new_tokens=8, beam_size=beam_size, pruning="none"
    )(prompts[1:])
    same(got, want)


def test_a_decoder_only_model_with_few_positions():
    """The program has space for more than there are positions; a request may not."""
    switch = SwitchConfig(2, every=1)
    config = ModelConfig(
        "decoder_only", 384, 8, 8, 1, 8, 1, switch=switch, positions="learned", max_length=12
    )
    params = init_params(config, jax.random.key(1))
    format_ = TextFormat(False, True, False)
    model = Model(config, params, ByteVocabulary(), 0, format_, "")
    limits = dataclasses.replace(
        served.LIMITS, batch_size=2, max_new_tokens=16, warm_up_tokens=0
    )
    prompts = model.prompts(["ab", "c"])
    assert prompts[1] == [0, *model.vocabulary.encode("c")]
    with served.started(limits, model) as service:
        _, events = ask(service, prompts, [DecodingConfig(9)] * 2)
        got = [model.vocabulary.decode(each.tokens) for each in answers(events, 2)]
    assert got == model.generate(["ab", "c"], max_length=9)
    with pytest.raises(Refusal, match="needs 13 positions, the model has 12"):
        read_request({"inputs": "ab", "max_new_tokens": 10}, model, limits)


def test_inputs_are_answered_once_the_first_programs_are_there(monkeypatch):
    """The other ones are compiled behind those that inputs wait for."""
    worker, goes_on, compiled = scheduler.Worker, threading.Event(), []
    compile_more = worker.compile_more

    def compile_later(self, shape):
        if compiled:
            assert goes_on.wait(60)
        compile_more(self, shape)
        compiled.append((shape.beam_size, self.compiled[shape]))

    monkeypatch.setattr(worker, "compile_more", compile_later)
    service = Service(served.model(), served.LIMITS)
    try:
        while not service.worker.is_ready:
            time.sleep(0.01)
        (event,) = asyncio.run(all_events(service, request_of(["gate"])))
        assert served.model().vocabulary.decode(event.hypothesis.tokens) == (
            served.said()["gate"].output
        )
        assert compiled == [(1, 1)] and not service.worker.is_warm
        prompts = served.model().prompts(["of"])
        searched = GenerateRequest(prompts, DecodingConfig(8, beam_size=2), False)

        async def searched_late():
            asking = asyncio.create_task(all_events(service, searched))
            while not service.worker.compiler._asked:
                await asyncio.sleep(0.01)
            goes_on.set()
            return await asking

        assert len(asyncio.run(searched_late())) == 1
        while not service.worker.is_warm:
            time.sleep(0.01)
        # One that was begun before it was asked, and then that which was waited for.
        assert (2, 1) in compiled[1:3] and compiled[-1] == (1, 4)
        assert [shape.beam_size for shape, _ in service.worker.asked.most_common()] == [1, 2]
    finally:
        goes_on.set()
        served.stop(service)


def test_no_program_is_compiled_unasked_that_no_request_can_use(service, monkeypatch):
    limits = dataclasses.replace(service.limits, max_input_tokens=17, warm_up_tokens=128)
    worker = Worker(service.model, limits, service.metrics)  # whose thread never runs
    monkeypatch.setattr(worker, "compile_more", lambda shape: None)
    worker._warm_up()
    assert {shape.prompt_length for shape in worker.compiler.planned} == {16, 32}


def test_what_fits_larger_programs_does_not_wait_for_its_own(monkeypatch):
    limits = dataclasses.replace(served.LIMITS, max_new_tokens=64)
    with served.started(limits) as service:
        (long,) = service.worker.compiled
        monkeypatch.setattr(service.worker.compiler, "ask", lambda shape: None)
        short = dataclasses.replace(request_of(["gate"]), settings=DecodingConfig(8))
        assert ProgramShape.of([1], short.settings, limits).answer_length < long.answer_length
        (event,) = asyncio.run(all_events(service, short))
        assert list(service.worker.compiled) == [long]
        assert service.worker._covering(dataclasses.replace(long, beam_size=2), 1) is None
    want = served.said()["gate"]
    assert served.model().vocabulary.decode(event.hypothesis.tokens) == want.output


def test_what_was_asked_for_is_compiled_first_at_the_next_start(tmp_path, caplog):
    limits, path = served.LIMITS, tmp_path / "served/a.json"
    greedy, beams = (
        ProgramShape.of([1], DecodingConfig(8, beam_size=size), limits) for size in (1, 2)
    )
    assert asked_shapes.read_shapes(path, limits) == []
    asked_shapes.write_shapes(path, Counter({greedy: 1, beams: 5}))
    assert asked_shapes.read_shapes(path, limits) == [beams, greedy]
    narrow = dataclasses.replace(limits, max_beam_size=1)
    assert asked_shapes.read_shapes(path, narrow) == [greedy]
    assert asked_shapes.read_shapes(path, dataclasses.replace(limits, decodings="beam2")) == [
        beams
    ]
    with served.started(asked_before=[beams]) as service:
        assert list(service.worker.compiled)[0] == beams and len(service.worker.compiled) == 2
    whole = json.dumps([dataclasses.asdict(greedy)])
    flags = (whole.replace('"is_recorded": false', f'"is_recorded": {x}') for x in ("[1]", "2"))
    others = whole.replace('": 16', '": 16.0'), whole.replace("null", "0.5"), "[" * 10**5
    others += (whole.replace('": 16', '": 131072'),)  # longer than any
    for text in ("[{}]", "nothing", '[{"prompt_length": "a"}]', "[[]]", *flags, *others):
        path.write_text(text)
        assert asked_shapes.read_shapes(path, limits) == []
    assert caplog.text.count("is not read") == 10


def test_two_names_of_a_model_keep_what_both_were_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = (
        ProgramShape.of([1], DecodingConfig(8, beam_size=n), served.LIMITS) for n in (1, 2)
    )
    asked_shapes.keep_asked([("a" * 40, Counter({first: 2})), ("a" * 40, Counter({second: 3}))])
    assert asked_shapes.read_shapes(asked_shapes.history_of("a" * 40), served.LIMITS) == [
        second,
        first,
    ]


def test_a_server_is_ready_where_what_was_asked_for_cannot_be_compiled(monkeypatch):
    beams = ProgramShape.of([1], DecodingConfig(8, beam_size=2), served.LIMITS)
    compile_more = Worker.compile_more

    def without_beams(worker, shape):
        if shape == beams:
            raise RuntimeError("no memory")
        compile_more(worker, shape)

    monkeypatch.setattr(Worker, "compile_more", without_beams)
    with served.started(asked_before=[beams]) as service:
        assert service.worker.is_ready and beams not in service.worker.compiled


def request_of(texts, is_streaming=False):
    return GenerateRequest(served.model().prompts(texts), DecodingConfig(8), is_streaming)


def refusal(raising) -> Refusal:
    with pytest.raises(Refusal) as caught:
        raising()
    return caught.value


def admit(service):
    with service.admitted():
        pass


async def all_events(service, request):
    async with service.events(request) as events:
        return [event async for event in events]


def test_a_slow_reader_keeps_one_event_an_input():
    """A thousand events of two inputs: the newest of each, in the order of the inputs."""

    async def read_late():
        events = Events(2, 60.0, lambda number, num_tokens, reason: None)
        rows = [GrowingAnswer(None, request_of(["a"])) for _ in range(2)]
        for length in range(1, 500):
            for number in (1, 0):
                events.put(NewTokens(number, [5] * length))
        assert len(events._waiting) == 2
        found = [await anext(events), await anext(events)]
        events.put(NewTokens(0, [5] * 500))
        events.put(Answer(0, Hypothesis([5] * 501, -1.0, True)))
        events.put(Failure(0))
        events.put(Answer(1, Hypothesis([5], -1.0, False)))
        async for event in events:
            found.append(event)
            rows[event.number].grow(event, events)
        return found, events.num_tokens

    found, num_tokens = asyncio.run(read_late())
    assert [(event.number, type(event)) for event in found] == [
        (1, NewTokens), (0, NewTokens), (0, Answer), (1, Answer),
    ]  # fmt: skip
    assert [len(event.tokens) for event in found[:2]] == [499, 499] and num_tokens == 502


def test_an_answer_stands_though_its_batch_fails_later(service, limited, monkeypatch):
    """Of two inputs in two batches; the first one's batch fails once it is answered."""
    deliver = type(service.worker)._deliver_answer

    def deliver_and_fail(worker, each, best):
        deliver(worker, each, best)
        if each.number == 0:
            raise RuntimeError("out of memory, say")

    monkeypatch.setattr(type(service.worker), "_deliver_answer", deliver_and_fail)
    limited(batch_size=1)
    found = asyncio.run(all_events(service, request_of(served.TEXTS[:2])))
    assert [event.number for event in found if isinstance(event, Answer)] == [0, 1]


def test_no_request_is_admitted_when_it_stops_or_has_not_begun(service, monkeypatch):
    admit(service)
    models = Models([service])
    admit(models)
    assert models.is_ready and service.num_open == models.num_open == 0
    models.is_draining = True
    assert "is stopping" in refusal(lambda: admit(models)).message
    assert not models.is_ready
    with monkeypatch.context() as patch:
        patch.setattr(service.worker, "is_ready", False)
        early = refusal(lambda: admit(service))
        assert early.status == 503 and "compiling" in early.message and early.retry_after_s
        patch.setattr(service.worker, "error", MemoryError())
        assert "not running any more" in refusal(lambda: admit(service)).message


def test_rows_with_processors_are_each_ones_own(service):
    """In one batch, a row that asks for none of it among them."""
    prompt = service.model.prompts(["gate"])[0]
    settings = [*PROCESSED[:2], DecodingConfig(8, repetition_penalty=0.5)]
    assert len({ProgramShape.of(prompt, own, service.limits) for own in settings}) == 1
    _, events = ask(service, [prompt] * 3, settings)
    for number, got in enumerate(answers(events, 3)):
        generator = service.model.generator(**dataclasses.asdict(settings[number]))
        ((_, (want, *_)),) = generator([prompt], first_number=number)
        same(got, want)


def test_a_model_that_cannot_generate_is_refused_at_once():
    model = served.model()
    switch = dataclasses.replace(model.config.switch, sublayers="attention")
    config = dataclasses.replace(model.config, switch=switch)
    with pytest.raises(ValueError, match="experts in self-attention have no cache"):
        Service(dataclasses.replace(model, config=config), served.LIMITS)


SETTINGS = (
    DecodingConfig(8),
    DecodingConfig(3),
    DecodingConfig(8, temperature=0.9, seed=4, top_k=20),
    DecodingConfig(5, temperature=1.4, seed=9, top_p=0.7),
    DecodingConfig(8, beam_size=2, length_penalty=0.5),
    DecodingConfig(2, beam_size=2),
)
# Of a program with processors, or with log-probabilities, too.
PROCESSED = (
    DecodingConfig(8, repetition_penalty=1.6, no_repeat_ngram_size=2),
    DecodingConfig(4, forced_prefix=(80, 81), no_repeat_ngram_size=1),
    DecodingConfig(8, temperature=0.8, seed=6, no_repeat_ngram_size=3),
    DecodingConfig(6, beam_size=2, repetition_penalty=1.9, logprobs=2),
)


@pytest.mark.parametrize(
    "num_requests",
    [60, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_an_answer_is_the_models_own_whatever_runs_beside_it(service, num_requests):
    """Requests that come at random, of several kinds, longer and shorter than others."""
    settings = SETTINGS if num_requests < 100 else SETTINGS + PROCESSED
    # As many tokens each: the oracle has few programs.
    prompts = service.model.prompts(["gate", "slot", "door"])
    random = np.random.default_rng(num_requests)
    want = {}
    for i, own in enumerate(settings):
        generator = service.model.generator(**dataclasses.asdict(own))
        for j, prompt in enumerate(prompts):
            ((_, (best, *_)),) = generator([prompt])
            want[i, j] = best
    asked = []
    for _ in range(num_requests):
        i, j = random.integers(len(settings)), random.integers(len(prompts))
        while len(service._queue) > 8:
            time.sleep(0.001)
        time.sleep(random.exponential(0.002))
        asked.append((i, j, ask(service, [prompts[j]], [settings[i]])[1]))
    for i, j, events in asked:
        (got,) = answers(events, 1)
        same(got, want[i, j])
