# SPDX-License-Identifier: Apache-2.0
"""A batch that is advanced in pieces says what one that runs to its end says."""

import dataclasses

import pytest

from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator
from switchx.inference.logits_processors import RowSettings
from switchx.inference.running_batch import RunningBatch
from tests.cases import slow
from tests.inference import tiny
from tests.inference.tiny import assert_same_texts, written

INPUTS = [[3, 4, 5, 8], [6, 2, 7], [5, 5, 2], [11, 4, 4, 3], [9]]
T = 6
NEVER_ENDS = -1


def running(decoding, settings=None, numbers=None, token_limits=None, inputs=INPUTS):
    batch = RunningBatch(*tiny.model(), decoding)
    batch.admit(
        inputs,
        numbers=numbers or range(len(inputs)),
        token_limits=token_limits or [decoding.max_new_tokens] * len(inputs),
        settings=settings,
    )
    return batch


def all_of(batch, most_steps=None):
    said = {}
    while batch.waiting:
        said |= batch.advance(most_steps)
    return [said[index] for index in sorted(said)]


def generated(decoding, inputs=INPUTS, **options):
    decoding = dataclasses.replace(decoding, pruning="experts")
    return written(Generator(*tiny.model(), decoding), inputs, **options)


@pytest.mark.slow
@pytest.mark.parametrize("beam_size", [1, 2])
def test_step_by_step_gives_what_one_run_gives(beam_size):
    decoding, token_limits = DecodingConfig(T, beam_size=beam_size), [6, 2, 5, 2, 4]
    # Two end at once: three of eight rows are left, and a finished one fills up to four.
    batch = running(decoding, token_limits=token_limits)
    assert_same_texts(
        all_of(batch, most_steps=1), generated(decoding, token_limits=token_limits)
    )
    assert len(batch._sentence_B) == 1  # of eight rows at first


@pytest.mark.parametrize("beam_size", [slow(1), 2])
def test_sentences_join_at_any_step_and_say_what_they_say_alone(beam_size):
    """In rows of others, in more rows, with longer inputs and answers than there were."""
    rooms = [3, 40, 20, 2, 33]
    decoding = DecodingConfig(40, beam_size=beam_size, eos_id=NEVER_ENDS)
    want = generated(decoding, token_limits=rooms)
    batch, names, said = RunningBatch(*tiny.model(), decoding), {}, {}

    def admit(*indices, length):
        admitted = batch.admit(
            [INPUTS[index] for index in indices],
            numbers=indices,
            token_limits=[rooms[index] for index in indices],
            length=length,
        )
        names.update(zip(admitted, indices, strict=True))

    def advance(steps):
        ended = batch.advance(steps, is_compacting=False)
        said.update((names[name], hypotheses) for name, hypotheses in ended.items())

    admit(0, length=4)
    advance(2)
    admit(2, 3, length=4)  # more rows, a longer ring
    advance(2)
    advance(11)
    admit(1, length=6)
    advance(5)
    admit(4, length=4)  # where another one was
    assert len(batch._sentence_B) == 4
    while batch.waiting:
        advance(5)
    assert_same_texts([said[index] for index in range(5)], want)


@pytest.mark.parametrize("num_alone", [1, slow(2)])
def test_each_row_has_its_own_settings(num_alone):
    """Rows of different people in one compiled program, each as if it were alone."""
    rows = [
        {"seed": 7, "temperature": 1.5, "top_k": 5, "top_p": 0.9, "length_penalty": 2.0},
        {"seed": 2, "temperature": 0.5, "length_penalty": 0.0},
    ]
    inputs = INPUTS[:2]
    decoding = DecodingConfig(T, temperature=1.0, eos_id=NEVER_ENDS, pruning="experts")
    own = [dataclasses.replace(decoding, **row) for row in rows]
    batch = running(decoding, RowSettings.of(own), numbers=[4, 4], inputs=inputs)
    got = all_of(batch, most_steps=2)
    for row, number in enumerate([4, 4][:num_alone]):
        assert_same_texts([got[row]], generated(own[row], [inputs[row]], first_number=number))


def test_each_search_has_its_own_length_penalty():
    decoding = DecodingConfig(T, beam_size=2, pruning="experts")
    penalties = [0.0, 1.0, 3.0, 1.0, 1.0]
    own = [dataclasses.replace(decoding, length_penalty=each) for each in penalties]
    got = all_of(running(decoding, RowSettings.of(own)))
    want = generated(dataclasses.replace(decoding, length_penalty=3.0))
    assert_same_texts([got[2]], [want[2]])
    # The others have another one.
    for index in (0, 1, 3, 4):
        assert got[index][0].score != pytest.approx(want[index][0].score, rel=1e-3)


def test_the_abandoned_say_nothing_and_what_is_there_grows_to_the_text():
    decoding = DecodingConfig(T, eos_id=NEVER_ENDS, pruning="experts")
    batch = running(decoding)
    batch.advance(1)
    batch.abandon([1, 4, 4, 77])
    assert batch.waiting == {0, 2, 3}
    want = generated(decoding)
    assert_same_texts(all_of(batch), [want[index] for index in (0, 2, 3)])
    batch = running(decoding)
    batch.abandon(range(5))
    assert not batch.waiting and batch.advance() == {}
    decoding = DecodingConfig(T, eos_id=NEVER_ENDS)
    want = generated(decoding)
    batch, seen = running(decoding, token_limits=[T, T, 2, T, T]), []
    while batch.waiting:
        seen.append({index: each.tokens for index, each in batch.so_far().items()})
        batch.advance(2)
    # The first piece ends as soon as a smaller batch is enough.
    assert [{len(tokens) for tokens in each.values()} for each in seen] == [{0}, {2}, {4}]
    assert 2 in seen[0] and 2 not in seen[1]
    for tokens in seen:
        for index, so_far in tokens.items():
            assert want[index][0].tokens[: len(so_far)] == so_far
