# SPDX-License-Identifier: Apache-2.0
"""Oracle: the examples of t5.data.preprocessors_test, postprocessors_test and t5_cbqa's."""

import pytest

from switchx.data.downstream import pronouns, published, texts
from tests.data.refusals import refused


def pairs(function, row):
    return [(each.inputs, each.targets) for each in function(row)]


def test_classes():
    row = {"q1": "How so?", "q2": "Why not?", "q3": "Who?", "idx": 10, "label": 0}
    classes = ("not_duplicate", "duplicate")
    (found,) = texts.choice("qqp", ("q1", "q2", "q3"), classes)(row)
    assert found.inputs == "qqp q1: How so? q2: Why not? q3: Who?"
    assert (found.targets, found.example_id, found.label) == ("not_duplicate", "10", 0)
    assert found.choices == classes
    some = texts.choice("qqp", ("q3", "q1"), classes)
    assert pairs(some, row) == [("qqp q3: Who? q1: How so?", "not_duplicate")]
    assert pairs(some, row | {"label": -1}) == [("qqp q3: Who? q1: How so?", "<unk>")]
    with refused("the label None is none of -1 to 1, not_duplicate, duplicate"):
        texts.class_name(None, ("not_duplicate", "duplicate"))
    with refused("the label 2 is none of -1 to 1, not_duplicate, duplicate"):
        list(some(row | {"label": 2}))


def test_multirc():
    row = {
        "paragraph": "<b>Sent 1: </b>Once upon a time, there was a squirrel named Joey.<br>"
        "<b>Sent 2: </b>Joey loved to go outside and play with his cousin Jimmy.",
        "question": "Why was Joey surprised the morning he woke up for breakfast?",
        "answer": "There was only pie to eat",
        "label": 1,
        "idx": {"paragraph": 5, "question": 1, "answer": 3},
    }
    (found,) = texts.multirc(row)
    assert found.inputs == (
        "multirc question: Why was Joey surprised the morning he woke up for breakfast? "
        "answer: There was only pie to eat "
        "paragraph: Sent 1: Once upon a time, there was a squirrel named Joey. "
        "Sent 2: Joey loved to go outside and play with his cousin Jimmy."
    )
    assert (found.targets, found.group, found.example_id) == ("True", "1", "5/1/3")


@pytest.mark.parametrize(
    ("score", "text"), [(2.8, "2.8"), (1.66, "1.6"), (5.0, "5.0"), (0.0, "0.0"), (0.3, "0.4")]
)
def test_stsb(score, text):
    """The first two are T5's; 0.3 * 5 = 1.5 rounds to even, 2, and 2 / 5 = 0.4."""
    row = {"sentence1": "Big news.", "sentence2": "No idea.", "label": score, "idx": 10}
    inputs = "stsb sentence1: Big news. sentence2: No idea."
    assert pairs(texts.similarity, row) == [(inputs, text)]


def test_record():
    passage = "This is the passage\n@highlight\nAnother sentence.\n@highlight\nThird sentence."
    row = {
        "query": "It was @placeholder.",
        "entities": ["A", "B", "C"],
        "passage": passage,
        "answers": ["A", "C"],
        "idx": {"passage": 1, "query": 2},
    }
    inputs = (
        "record query: It was @placeholder. entities: A, B, C passage: This is the passage. "
        "Another sentence. Third sentence."
    )
    assert pairs(texts.record, row) == [(inputs, "A"), (inputs, "C")]
    first, second = texts.record(row)
    assert first.answers == ("A", "C") and first.group == second.group == "1/2"
    assert pairs(texts.record, row | {"answers": []}) == [(inputs, "<unk>")]


def test_squad_and_punctuation():
    row = {
        "id": "testid",
        "context": "Some context.",
        "question": "A question?",
        "answers": {"text": ["The answer.", "Another answer."]},
    }
    (found,) = texts.squad(row)
    assert found.inputs == "question: A question ? context: Some context . "
    assert found.targets == "The answer . "
    assert found.answers == ("The answer . ", "Another answer . ")
    padded = texts.pad_punctuation('"This  is a string with "punctuation (1845-1986) ".')
    assert padded == ' " This is a string with " punctuation ( 1845 - 1986 ) " . '
    assert (
        texts.pad_punctuation('"Introducción (la vídeo)".')
        == ' " Introducción ( la vídeo ) " . '
    )
    with refused("the question 'testid' has no answer"):
        list(texts.squad(row | {"answers": {"text": []}}))


@pytest.mark.parametrize(
    ("sentence", "pronoun", "candidates", "label", "marked"),
    [
        ("Mitchell asked Tom if he could lend some money.", "he", ["Mitchell", "Tom"], 1,
         "Mitchell asked Tom if *he* could lend some money."),
        ("Bill beat Tom at Scrabble because that newbie had all the luck.", "that newbie",
         ["Bill", "Tom"], 0,
         "Bill beat Tom at Scrabble because *that newbie* had all the luck."),
        ("Carl borrowed a book from Richard, but the book was unreadable to him.", "him",
         ["Carl", "Richard"], 0,
         "Carl borrowed a book from Richard, but the book was unreadable to *him*."),
    ],
)  # fmt: skip
def test_definite_pronouns(sentence, pronoun, candidates, label, marked):
    row = {"sentence": sentence, "pronoun": pronoun, "candidates": candidates, "label": label}
    assert pairs(pronouns.definite_pronouns, row) == [(f"wsc: {marked}", candidates[label])]


WSC = {
    "text": "Mitchell asked Tom if he could lend some money.",
    "span1_text": "Tom", "span1_index": 2, "span2_text": "he", "span2_index": 4, "idx": 1,
}  # fmt: skip


def test_wsc():
    inputs = "wsc: Mitchell asked Tom if *he* could lend some money."
    (found,) = pronouns.wsc_eval(WSC)
    assert (found.inputs, found.targets, found.label) == (inputs, "Tom", 0)
    assert list(pronouns.wsc_train(WSC | {"label": 0})) == []
    assert pairs(pronouns.wsc_train, WSC | {"label": 1}) == [(inputs, "Tom")]
    with refused("WSC: word 3 of 'Mitchell asked Tom <any> is 'if', expected the pronoun 'he'"):
        list(pronouns.wsc_eval(WSC | {"span2_index": 3}))


def test_wsc_of_texts_with_miscounted_words():
    assert len(pronouns._MISCOUNTED) == 2
    for text in pronouns._MISCOUNTED:
        (found,) = pronouns.wsc_eval(WSC | {"text": text, "span2_text": "it"})
        assert found.inputs.count("*it*") == 1
        assert "for *it* ," in found.inputs or "use *it* ," in found.inputs


def test_spans_of_wsc_stand_in_the_text():
    """TFDS' wsc.fixed: the case of the first letter, a full stop, a line break."""
    row = WSC | {"text": "The boy and the old man. He left.", "span2_text": "He"}
    fixed = pronouns.fixed_spans(row | {"span1_text": "The old\nman.", "span1_index": 3})
    assert fixed["span1_text"] == "the old man" and fixed["span2_text"] == "He"
    named = row | {"span1_text": "Kamenev and Zinoviev"}
    assert pronouns.fixed_spans(named)["span1_text"] == "Kamenev and Zinoviev"


@pytest.mark.parametrize(
    ("prediction", "referent", "expected"),
    [
        ("potato", "turnip", 0), ("turnip", "turnip", 1), ("the cat", "cat", 1),
        ("Bob's hat", "Bob", 0), ("Bob's hat", "Bob's hat", 1), ("potato", "Potato", 1),
        ("a potato", "my potato", 1), ("fuzzy bunny", "fuzzy hungry bunny", 1), ("", "cat", -1),
        ("a this", "cat", -1),
    ],
)  # fmt: skip
def test_same_referent(prediction, referent, expected):
    assert pronouns.same_referent(prediction, referent) == expected


def choices_of(row):
    (found,) = published.choices(row)
    return found["question"], found["choices"], found["label"]


def test_questions_with_choices_in_all_their_forms():
    want = ("What?", ["sun", "leg"], 1)
    listed = [{"text": "sun", "label": "1"}, {"text": "leg", "label": "2"}]
    stem = {"stem": "What?", "choices": listed}
    assert choices_of({"question": stem, "answerKey": "2", "id": "a"}) == want
    table = {"text": ["sun", "leg"], "label": ["A", "B"]}
    assert choices_of({"question": "What?", "choices": table, "answerKey": "B"}) == want
    # TFDS' ai2_arc: classes as numbers, and the order of the choices decides.
    numbers = {"text": ["leg", "sun"], "label": [1, 0]}
    found = choices_of({"question": "What?", "choices": numbers, "answerKey": 1})
    assert found == ("What?", ["leg", "sun"], 0)
    # TFDS' openbookqa.
    named = {"stem": "What?", "choice_A": "sun", "choice_B": "leg"}
    assert choices_of({"question": named, "answerKey": 1}) == want
    # A test set without answers.
    assert choices_of({"question": stem, "answerKey": "", "id": "a"})[2] == -1
    with refused("the answer '3' of 'What?' is none of ['1', '2']"):
        choices_of({"question": stem, "answerKey": "3", "id": "a"})
