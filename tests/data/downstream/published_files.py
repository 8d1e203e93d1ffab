# SPDX-License-Identifier: Apache-2.0
"""Tiny files of every data set, in the form in which its authors publish them.

Each `Published` says what the task makes of the first row, and what a predictor that always
writes the same scores on the evaluation split. Texts that T5's own tests have are theirs.
"""

import dataclasses
import json

PASSAGE = "This is the passage\n@highlight\nAnother sentence.\n@highlight\nThird sentence."


@dataclasses.dataclass(frozen=True)
class Published:
    """One data set.

    Attributes:
        files: name below the folder -> content.
        inputs, targets: of the first example of the training split.
        constant: a text; `scores`: of writing it everywhere, by hand.
        splits: other than the table's, where the tiny files are too small for these.
    """

    files: dict[str, str]
    inputs: str
    targets: str
    constant: str
    scores: dict[str, float]
    splits: tuple[str, str] | None = None


def tsv(header: str, *rows: str) -> str:
    return "\n".join(row.replace("|", "\t") for row in (header, *rows) if row) + "\n"


def jsonl(*rows: dict) -> str:
    return "\n".join(json.dumps(row) for row in rows) + "\n"


def _pair(first: str, second: str, train: list, dev: list, label="label") -> dict:
    """Files of a GLUE task of two texts: the first rows, with an index in front."""
    texts = {name: f"index|{first}|{second}|{label}" for name in ("train.tsv", "dev.tsv")}
    rows = {"train.tsv": train, "dev.tsv": dev}
    return {
        name: tsv(
            header, *(f'{i}|One, two.|3 "four"?|{each}' for i, each in enumerate(rows[name]))
        )
        for name, header in texts.items()
    }


def _super(train: dict, *val: dict) -> dict:
    return {"train.jsonl": jsonl(train), "val.jsonl": jsonl(*val)}


def _nli(text: dict, labels: tuple[str, ...]) -> dict:
    rows = [text | {"label": label, "idx": i} for i, label in enumerate(labels)]
    return {"train.jsonl": jsonl(rows[0]), "val.jsonl": jsonl(*rows)}


def _multirc(*labels: int) -> dict:
    answers = [
        {"text": f"Answer {i}", "idx": i, "label": each} for i, each in enumerate(labels)
    ]
    text = "<b>Sent 1: </b>Once upon a time.<br><b>Sent 2: </b>Joey."
    questions = [
        {"question": "Why?", "answers": answers[:2], "idx": 0},
        {"question": "When?", "answers": answers[2:], "idx": 1},
    ]
    return {"idx": 5, "passage": {"text": text, "questions": questions}}


def _record(number: int, *answers: str) -> dict:
    text = PASSAGE
    entities = [{"start": text.index(each), "end": text.index(each) + len(each) - 1}
                for each in ("passage", "This", "passage")]  # fmt: skip
    query = {"query": "It was @placeholder.", "idx": number}
    found = [{"text": each, "start": 0, "end": 0} for each in answers]
    return {
        "idx": 1,
        "passage": {"text": text, "entities": entities},
        "qas": [query | {"answers": found}],
    }


def _wsc(span: str, label: bool) -> dict:
    target = {"span1_text": span, "span1_index": 0, "span2_text": "he", "span2_index": 4}
    text = "Mitchell asked Tom if he could lend some money."
    return {"text": text, "target": target, "label": label, "idx": 0}


def _squad(*answers: str) -> str:
    found = [{"text": each, "answer_start": 0} for each in answers]
    question = {"id": "q1", "question": "A question?", "answers": found}
    paragraph = {"context": "Some  context (2).", "qas": [question]}
    return json.dumps({"version": "1.1", "data": [{"title": "T", "paragraphs": [paragraph]}]})


def _arc(*keys: str) -> str:
    choices = [{"text": "the sun", "label": "A"}, {"text": "a leg", "label": "B"}]
    question = {"stem": "What is hot?", "choices": choices}
    return jsonl(*({"id": f"M{k}", "question": question, "answerKey": k} for k in keys))


def _anli(*letters: str) -> str:
    text = {"context": "It rains.", "hypothesis": "It is wet."}
    return jsonl(*({"uid": str(i)} | text | {"label": k} for i, k in enumerate(letters)))


_GLUE_PAIR = 'sentence1: One, two. sentence2: 3 "four"?'
_NLI_ROW = {"premise": "It rains.", "hypothesis": "It is wet."}
_ARC_INPUTS = "question: What is hot? choices: (A) the sun (B) a leg"
_TWO_OF_THREE, _HALF = 200 / 3, {"accuracy": 50.0}

PUBLISHED = (
    {
        # Matthews' correlation of a constant is 0.
        "glue_cola": Published(
            {
                "train.tsv": tsv("", "gj04|1||Our friends won't."),
                "dev.tsv": tsv("", "gj04|1||A.", "cj|0|*|B c."),
            },
            "cola sentence: Our friends won't.",
            "acceptable",
            "acceptable",
            {"matthews_corrcoef": 0.0},
        ),
        "glue_sst2": Published(
            {
                "train.tsv": tsv("sentence|label", 'a "bonus" |1'),
                "dev.tsv": tsv("sentence|label", "a|1", "b|0"),
            },
            'sst2 sentence: a "bonus" ',
            "positive",
            "negative",
            _HALF,
        ),
        # Two of three are equivalent: precision 2/3, recall 1.
        "glue_mrpc": Published(
            {
                "train.tsv": "\ufeff"
                + tsv("Quality|#1 ID|#2 ID|#1 String|#2 String", '0|7|8|One, two.|3 "four"?'),
                "dev.tsv": tsv(
                    "Quality|#1 ID|#2 ID|#1 String|#2 String",
                    "1|7|8|a|b",
                    "1|7|8|a|b",
                    "0|7|8|a|b",
                ),
            },
            f"mrpc {_GLUE_PAIR}",
            "not_equivalent",
            "equivalent",
            {"f1": 80.0, "accuracy": _TWO_OF_THREE},
        ),
        # No number is -1, and a constant has no correlation.
        "glue_stsb": Published(
            _pair("sentence1", "sentence2", ["1.66"], ["1.0", "2.0", "5.0"], "score"),
            f"stsb {_GLUE_PAIR}",
            "1.6",
            "no number",
            {"pearson_corrcoef": None, "spearman_corrcoef": None},
        ),
        "glue_qqp": Published(
            _pair("question1", "question2", ["1"], ["1", "0", "0", "0"], "is_duplicate"),
            'qqp question1: One, two. question2: 3 "four"?',
            "duplicate",
            "duplicate",
            {"f1": 40.0, "accuracy": 25.0},
        ),
        "glue_mnli": Published(
            {
                "train.tsv": tsv(
                    "index|sentence1|sentence2|gold_label", "0|It rains.|It is wet.|neutral"
                ),
                "dev_matched.tsv": tsv(
                    "index|sentence1|sentence2|gold_label",
                    "0|a|b|neutral",
                    "1|a|b|contradiction",
                ),
                "dev_mismatched.tsv": tsv(
                    "index|sentence1|sentence2|gold_label", "0|a|b|contradiction"
                ),
            },
            "mnli hypothesis: It is wet. premise: It rains.",
            "neutral",
            "neutral",
            _HALF,
        ),
        "glue_qnli": Published(
            _pair("question", "sentence", ["not_entailment"], ["entailment", "not_entailment"]),
            'qnli question: One, two. sentence: 3 "four"?',
            "not_entailment",
            "entailment",
            _HALF,
        ),
        "glue_rte": Published(
            _pair("sentence1", "sentence2", ["entailment"], ["entailment", "not_entailment"]),
            f"rte {_GLUE_PAIR}",
            "entailment",
            "not_entailment",
            _HALF,
        ),
        "glue_wnli": Published(
            _pair("sentence1", "sentence2", ["0"], ["1", "1", "0"]),
            f"wnli {_GLUE_PAIR}",
            "not_entailment",
            "entailment",
            {"accuracy": _TWO_OF_THREE},
        ),
        # Sets that diagnose have no metrics, as in T5; GLUE's has no labels either.
        "glue_ax": Published(
            {
                "diagnostic.tsv": tsv(
                    "index|sentence1|sentence2", '0|The "cat" sat.|The cat did not sit.'
                )
            },
            'mnli hypothesis: The cat did not sit. premise: The "cat" sat.',
            "<unk>",
            "neutral",
            {},
            ("test", "test"),
        ),
        "super_glue_axb": Published(
            {
                "AX-b.jsonl": jsonl(
                    {
                        "sentence1": "The cat sat.",
                        "sentence2": "The cat did not sit.",
                        "logic": "Negation",
                        "label": "not_entailment",
                        "idx": 0,
                    }
                )
            },
            "rte hypothesis: The cat did not sit. premise: The cat sat.",
            "not_entailment",
            "entailment",
            {},
            ("test", "test"),
        ),
        "super_glue_axg": Published(
            {"AX-g.jsonl": jsonl(_NLI_ROW | {"label": "entailment", "idx": 0, "pair_id": 7})},
            "rte hypothesis: It is wet. premise: It rains.",
            "entailment",
            "entailment",
            {},
            ("test", "test"),
        ),
        "super_glue_boolq": Published(
            _super(
                {"question": "is it wet", "passage": "It rains.", "label": True, "idx": 0},
                {"question": "q", "passage": "p", "label": False, "idx": 0},
                {"question": "q", "passage": "p", "label": True, "idx": 1},
            ),
            "boolq passage: It rains. question: is it wet",
            "True",
            "False",
            _HALF,
        ),
        # F1 of entailment 2/3 (precision 1/2, recall 1), of the others 0.
        "super_glue_cb": Published(
            _nli(_NLI_ROW, ("entailment", "neutral")),
            "cb hypothesis: It is wet. premise: It rains.",
            "entailment",
            "entailment",
            {"mean_3class_f1": 200 / 9, "accuracy": 50.0},
        ),
        "super_glue_copa": Published(
            _super(
                {
                    "premise": "A.",
                    "choice1": "B.",
                    "choice2": "C.",
                    "question": "cause",
                    "label": 1,
                    "idx": 0,
                },
                {
                    "premise": "A.",
                    "choice1": "B.",
                    "choice2": "C.",
                    "question": "effect",
                    "label": 0,
                    "idx": 0,
                },
            ),
            "copa choice1: B. choice2: C. premise: A. question: cause",
            "choice2",
            "choice2",
            {"accuracy": 0.0},
        ),
        # Right are the answers 0, 2, 3 of the questions {0, 1} and {2, 3}: precision 3/4,
        # recall 1; of the two questions the second is all right.
        "super_glue_multirc": Published(
            {
                "train.jsonl": jsonl(_multirc(1, 0, 1, 1)),
                "val.jsonl": jsonl(_multirc(1, 0, 1, 1)),
            },
            "multirc question: Why? answer: Answer 0 paragraph: Sent 1: Once upon a time. "
            "Sent 2: Joey.",
            "True",
            "True",
            {"f1": 600 / 7, "exact_match": 50.0},
        ),
        # Two queries: of the first, which stands there twice, `This` is right.
        "super_glue_record": Published(
            {
                "train.jsonl": jsonl(_record(2, "This", "passage")),
                "val.jsonl": jsonl(_record(2, "This", "passage"), _record(3, "passage")),
            },
            "record query: It was @placeholder. entities: This, passage passage: This is the "
            "passage. "
            "Another sentence. Third sentence.",
            "This",
            "this!",
            {"exact_match": 50.0, "f1": 50.0},
        ),
        "super_glue_rte": Published(
            _nli(_NLI_ROW, ("not_entailment", "entailment")),
            "rte hypothesis: It is wet. premise: It rains.",
            "not_entailment",
            "entailment",
            _HALF,
        ),
        "super_glue_wic": Published(
            _super(
                {
                    "word": "place",
                    "sentence1": "A place.",
                    "sentence2": "To place.",
                    "label": False,
                    "idx": 0,
                    "start1": 2,
                    "start2": 3,
                    "end1": 7,
                    "end2": 8,
                },
                {"word": "w", "sentence1": "a", "sentence2": "b", "label": True, "idx": 0},
            ),
            "wic sentence1: A place. sentence2: To place. word: place",
            "False",
            "True",
            {"accuracy": 100.0},
        ),
        "super_glue_wsc_train": Published(
            {
                "train.jsonl": jsonl(_wsc("Mitchell", False), _wsc("tom", True)),
                "val.jsonl": jsonl(_wsc("Tom", True)),
            },
            "wsc: Mitchell asked Tom if *he* could lend some money.",
            "Tom",
            "Tom",
            {},
        ),
        # `Tom` names the right noun in the second example, and not the wrong one in the first.
        "super_glue_wsc_eval": Published(
            {
                "train.jsonl": jsonl(_wsc("Tom", True)),
                "val.jsonl": jsonl(_wsc("Mitchell", False), _wsc("Tom", True)),
            },
            "wsc: Mitchell asked Tom if *he* could lend some money.",
            "Tom",
            "the Tom",
            {"accuracy": 100.0},
        ),
        # Against `Another answer . `: one word of two in common, F1 2/3.
        "squad": Published(
            {
                "train-v1.1.json": _squad("The answer."),
                "dev-v1.1.json": _squad("The  answer.", "Another answer."),
            },
            "question: A question ? context: Some context ( 2 ) . ",
            "The answer . ",
            "another",
            {"exact_match": 0.0, "f1": 200 / 3},
        ),
        "cnn_dailymail": Published(
            {
                "train.csv": 'id,article,highlights\n1,"An article, long.","A b . C"\n',
                "validation.csv": 'id,article,highlights\n2,"An article.","a b c d"\n',
            },
            "summarize: An article, long.",
            "A b . C",
            "a b",
            {"rouge1": 200 / 3, "rouge2": 50.0, "rougeLsum": 200 / 3},
        ),
        "xsum": Published(
            {
                "train.jsonl": jsonl({"document": "Doc.", "summary": "Sum.", "id": "1"}),
                "validation.jsonl": jsonl({"document": "D.", "summary": "a", "id": "2"}),
            },
            "summarize: Doc.",
            "Sum.",
            "a",
            {"rouge1": 100.0, "rouge2": 0.0, "rougeLsum": 100.0},
        ),
        # The best of several summaries counts.
        "scitldr": Published(
            {
                "train.jsonl": jsonl(
                    {"source": ["One.", "Two."], "target": ["Short."], "paper_id": "x"}
                ),
                "dev.jsonl": jsonl(
                    {"source": ["One."], "target": ["q r", "a b"], "paper_id": "y"}
                ),
            },
            "summarize: One. Two.",
            "Short.",
            "a b",
            {"rouge1": 100.0, "rouge2": 100.0, "rougeLsum": 100.0},
        ),
        "openbookqa": Published(
            {
                "train.tsv": tsv(
                    "ID|Question Stem|Choices|Complete Question|Answer Key",
                    "7-980|The sun is|(A) hot (B) a  star (C) far (D) old|The sun is (A) hot|B",
                ),
                "dev.tsv": tsv(
                    "ID|Question Stem|Choices|Complete Question|Answer Key",
                    "1|s|(A) x (B) y (C) z (D) w|c|A",
                    "2|s|(A) x (B) y (C) z (D) w|c|D",
                ),
            },
            "openbookqa question: The sun is choices: (A) hot (B) a  star (C) far (D) old",
            "a  star",
            "w",
            _HALF,
        ),
        "winogrande": Published(
            {
                "train_xl.jsonl": jsonl(
                    {
                        "qID": "3Q",
                        "sentence": "Ian _ Dennis.",
                        "option1": "I",
                        "option2": "D",
                        "answer": "2",
                    }
                ),
                "dev.jsonl": jsonl(
                    {"qID": "1", "sentence": "s", "option1": "a", "option2": "b", "answer": "1"}
                ),
            },
            "winogrande option1: I option2: D sentence: Ian _ Dennis.",
            "option2",
            "option1",
            {"accuracy": 100.0},
        ),
        "trec": Published(
            {
                "train.txt": "DESC:manner How did it ?\n",
                "test.txt": "NUM:dist How far ?\nLOC:city Where ?\n",
            },
            "trec question: How did it ?",
            "description",
            "number",
            _HALF,
        ),
        "natural_questions_open": Published(
            {
                "NQ-open.train.jsonl": jsonl(
                    {"question": "who is it", "answer": ["Ann Lee", "Lee"]},
                    {"question": "b", "answer": ["x"]},
                )
            },
            "nq question: who is it",
            "Ann Lee",
            "the x",
            {"exact_match": 100.0, "f1": 100.0},
            ("train[:1]", "train[1:]"),
        ),
        "web_questions": Published(
            {
                "webquestions.examples.train.json": json.dumps(
                    [
                        {
                            "url": "u",
                            "targetValue": '(list (description "Ann Lee") (description Lee))',
                            "utterance": "who?",
                        },
                        {
                            "url": "v",
                            "targetValue": '(list (description "a b"))',
                            "utterance": "b?",
                        },
                    ]
                )
            },
            "wq question: who?",
            "Ann Lee",
            "b",
            {"exact_match": 100.0, "f1": 100.0},
            ("train[:1]", "train[1:]"),
        ),
        # `correct2.1` becomes two words.
        "trivia_qa": Published(
            {
                "unfiltered-web-train.json": json.dumps(
                    {
                        "Data": [
                            {
                                "Question": "Who?",
                                "QuestionId": "t1",
                                "Answer": {"Value": "Ann ", "Aliases": ["Ann", "Lee "]},
                            },
                            {
                                "Question": "b",
                                "QuestionId": "t2",
                                "Answer": {"Value": "x", "Aliases": ["correct2.1", "x"]},
                            },
                        ]
                    }
                )
            },
            "trivia_qa question: Who?",
            "Ann",
            "the correct2 1",
            {"exact_match": 100.0, "f1": 100.0},
            ("train[:1]", "train[1:]"),
        ),
    }
    | {
        f"anli_r{number}": Published(
            {"train.jsonl": _anli("n"), "dev.jsonl": _anli("e", "c")},
            "anli hypothesis: It is wet. premise: It rains.",
            "neutral",
            "entailment",
            _HALF,
        )
        for number in (1, 2, 3)
    }
    | {
        f"arc_{level.lower()}": Published(
            {
                f"ARC-{level}-Train.jsonl": _arc("B"),
                f"ARC-{level}-Dev.jsonl": _arc("A", "B", "B"),
            },
            f"arc {_ARC_INPUTS}",
            "a leg",
            "a leg",
            {"accuracy": _TWO_OF_THREE},
        )
        for level in ("Easy", "Challenge")
    }
)
