# SPDX-License-Identifier: Apache-2.0
"""The page and its sections, of a recorded run whose numbers are known by hand."""

import base64
import dataclasses
import math
import re
import xml.etree.ElementTree

import jax.numpy as jnp
import numpy as np
import pytest

from switchx.analysis import report
from switchx.analysis.plots import load_figure
from switchx.analysis.report import Section, Table, page
from switchx.cli.evaluate import print_checkpoints
from switchx.data.token_classes import token_classes
from switchx.data.tokenizers import ByteVocabulary
from switchx.models.config import RouterConfig, SwitchConfig
from switchx.moe.router import normalized_scores, router_scores, task_logits
from switchx.moe.routing_plan import make_plan
from switchx.moe.stats import measure_routing
from tests.analysis.parsed_page import Parser
from tests.analysis.recorded import routing_line, write_lines, write_run, write_snapshot
from tests.data.refusals import refused

FIGURE = load_figure(np.array([1, 2]), np.ones((2, 1, 2)), ["encoder 1"])
SECTION = Section(
    "A & B",
    "if a < b",
    [FIGURE],
    [Table(("expert", "tokens"), [(0, "<pad>\na&b"), (1, "")], "fold <it>", ("tokens",))],
)


def test_page_shows_its_texts_and_refers_to_nothing_outside():
    text = page("run <1>", {"folder": "a&b"}, [SECTION])
    parsed = Parser(text)
    assert len(parsed.references) == 1
    assert parsed.references[0].startswith("data:image/svg+xml;base64,")
    assert not {"script", "link", "iframe"} & set(parsed.opened)
    assert "http" not in re.sub(r"base64,[^\"]*", "", text) and "url(" not in text
    parsed = Parser(page("run <1>", {"folder": "a&b"}, [SECTION]))
    for text in ("run <1>", "a&b", "A & B", "if a < b", "fold <it>", "<pad>", "expert"):
        assert text in parsed.texts
    assert parsed.opened.count("details") == 1 and parsed.opened.count("code") == 2


def test_numbers_stand_to_the_right_and_pictures_are_the_same_each_time():
    first, again = (page("a", {}, [SECTION]) for _ in range(2))
    assert first == again
    data = re.search(r"base64,([^\"]*)", first)[1]
    root = xml.etree.ElementTree.fromstring(base64.b64decode(data))
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"encoder 1", "step", "expert", "load (1 = even share)"} <= texts
    table = Table(("layer", "load", "dead"), [("a", 1.23456, 2), ("b", 0.5, 0)])
    text = Section("t", "", tables=[table])._repr_html_()
    assert '<td class="number">1.235</td><td class="number">2</td>' in text
    assert "<td>a</td>" in text and "details" not in text


def read(folder):
    vocabulary = ByteVocabulary()
    classes = token_classes(vocabulary)
    return report.read_run(
        folder, classes.names, classes.class_V, lambda token: vocabulary.piece(token).text
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read(write_run(tmp_path_factory.mktemp("recorded") / "run"))


def with_switch(run, switch):
    final = dataclasses.replace(run.final, switch=switch)
    return dataclasses.replace(run, snapshots=[*run.snapshots[:-1], final])


def maps(section) -> list[np.ndarray]:
    (figure,) = section.figures
    return [np.ma.filled(axis.images[0].get_array(), np.nan)
            for axis in figure.axes if axis.images]  # fmt: skip


def test_all_sections_are_shown(run):
    titles = [section.title for section in report.all_sections(run)]
    assert titles == [
        "At the end",
        "Balance and margin",
        "Alarms",
        "Checkpoints",
        "Load per expert",
        "Drops, entropy, gate, dead experts",
        "Saturation",
        "From expert to expert",
        "Token classes",
        "Typical tokens",
        "Likeness of layers",
    ]
    assert all(section._repr_html_() for section in report.all_sections(run))


def test_overview_and_course_count_the_dead_and_have_levels(run):
    (table,) = report.overview(run).tables
    assert table.rows == [
        ("encoder 1", 1.0, 1.0, "none", "20.0%", 0.2, 0.2),
        ("encoder 3", 2.0, 0.0, "1", "20.0%", 0.2, 0.2),
        ("decoder 1", 1.5, 0.5, "none", "20.0%", 0.2, 0.2),
    ]
    (figure,) = report.course(run).figures
    encoder = figure.axes[6]  # the fourth row of two stacks
    assert encoder.get_ylabel() == "dead experts"
    assert [line.get_ydata().tolist() for line in encoder.lines] == [[0, 0], [0, 1]]
    (figure,) = (section := report.course(run)).figures
    assert figure.axes[2].lines[-1].get_ydata() == pytest.approx([np.log(2)] * 2)
    assert figure.axes[4].lines[-1].get_ydata() == [0.5, 0.5]
    assert section.text.endswith("a router that knows nothing: entropy 0.693, gate 0.5.")


ROUTERS = {
    "switch": RouterConfig(),
    "gshard": RouterConfig(num_selected=2, gate="normalized"),
    "scaled": RouterConfig(num_selected=2, gate="normalized", gate_scale=1.5),
    "sigmoid": RouterConfig(num_selected=2, score="sigmoid", gate="score"),
    "softplus": RouterConfig(score="sqrt_softplus", gate="score", gate_scale=2.0),
    "task": RouterConfig(kind="task", num_tasks=2, exploration="none"),
    "experts choose": RouterConfig(kind="expert_choice", exploration="none"),
    "hash": RouterConfig(kind="hash", exploration="none"),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_that_knows_nothing_against_a_layer(name):
    router = ROUTERS[name]
    logits_GTE, is_token_GT = jnp.zeros((1, 8, 6)), jnp.ones((1, 8), bool)
    if name == "task":
        logits_GTE = task_logits(logits_GTE, jnp.arange(8, dtype=jnp.int32)[None] % 2, 2)
    score_GTE = router_scores(router.score, logits_GTE)
    plan = make_plan(router, logits_GTE, score_GTE, is_token_GT, 8)
    prob_GTE = normalized_scores(router.score, score_GTE)
    means = measure_routing(logits_GTE, prob_GTE, plan, is_token_GT, router).means()
    gate, entropy = report.ignorant(SwitchConfig(6, router=router))
    assert (gate is None) == (name in ("hash", "experts choose"))
    assert gate is None or gate == pytest.approx(float(means["gate"]))
    assert (entropy is None) == (name == "hash")
    assert entropy is None or entropy == pytest.approx(float(means["entropy"]))


def test_balance_shows_what_every_line_has(run):
    section = report.balance(run)
    (table,), (figure,) = section.tables, section.figures
    assert table.columns == ("layer", "MaxVio", "effective experts", "information", "margin")
    assert table.rows[1] == ("encoder 3", 0.2, 0.2, 0.2, 0.2)
    assert figure.axes[0].get_ylabel() == "MaxVio"
    assert figure.axes[2].lines[-1].get_ydata() == [2, 2]  # all experts
    before = dataclasses.replace(run, history=dataclasses.replace(run.history, others={}))
    assert "before these were logged" in report.balance(before).text


def test_alarms_are_listed_as_they_were_raised(run, tmp_path):
    assert report.alarms(run).text == "None was raised."
    folder = write_run(tmp_path / "run")
    alarm = {"step": 20, "kind": "dead_expert", "layer": "encoder 3", "text": "encoder 3: dead"}
    write_lines(folder / "alarms.jsonl", [alarm])
    (table,) = report.alarms(read(folder)).tables
    assert table.rows == [(20, "dead_expert", "encoder 3: dead")]


def test_saturation_transitions_and_likeness(run):
    (figure,) = report.saturation(run).figures
    encoder, _ = figure.axes
    assert encoder.lines[0].get_ydata().tolist() == [0.5, 0.75, 1.0]
    assert encoder.lines[-1].get_ydata() == [12 / 13 / 2] * 2  # a choice of 13 is none
    by_task = with_switch(run, SwitchConfig(2, router=ROUTERS["task"]))
    (figure,) = report.saturation(by_task).figures
    assert figure.axes[0].lines[-1].get_ydata() == [12 / 13] * 2  # of one expert a task
    # Encoder 1 -> 3: tokens 0, 1 go 0 -> 0, tokens 2, 3 go 1 -> 1; the last is nowhere first.
    (share_EE,) = maps(report.transition(run))
    np.testing.assert_array_equal(share_EE, [[1, 0], [0, 1]])
    (similarity_NN,) = maps(report.similarity(run))  # the decoder has one layer
    np.testing.assert_allclose(similarity_NN, np.ones((2, 2)))
    choosing = with_switch(run, SwitchConfig(2, router=ROUTERS["experts choose"]))
    assert "a token has no first choice to compare" in report.similarity(choosing).text


def test_classes_of_the_last_step(run):
    section = report.classes(run)
    encoder_1, encoder_3, decoder_1 = maps(section)
    # a b | 1 | ! | space, and all of them; "!" has no expert in the first layer.
    names = [tick.get_text() for tick in section.figures[0].axes[0].get_xticklabels()]
    assert names == [
        "letter (2)", "digits (1)", "punctuation (1)", "whitespace (1)", "all (5)",
    ]  # fmt: skip
    np.testing.assert_array_equal(encoder_1, [[1, 0, 0, 0, 0.4], [0, 1, 0, 1, 0.4]])
    np.testing.assert_array_equal(encoder_3, [[1, 0, 1, 0, 0.6], [0, 1, 0, 1, 0.4]])
    np.testing.assert_allclose(decoder_1, [[0, 1, 1 / 3], [1, 0, 2 / 3]])
    # Shares are of tokens where each has two choices, the second of them expert 1.
    stack = run.final.stacks[0]
    expert_NTS = np.concatenate([stack.expert_NTS, np.ones_like(stack.expert_NTS)], axis=-1)
    two = dataclasses.replace(stack, expert_NTS=expert_NTS, gate_NTS=np.ones(expert_NTS.shape))
    final = dataclasses.replace(run.final, stacks=(two,))
    encoder_1, _ = maps(report.classes(dataclasses.replace(run, snapshots=[final])))
    np.testing.assert_array_equal(encoder_1, [[1, 0, 0, 0, 0.4], [1, 2, 1, 2, 1.4]])


def test_typical_tokens_can_be_read_invisible_ones_too(run):
    encoder_1 = report.tokens(run).tables[0]
    assert encoder_1.title == "encoder 1"
    assert encoder_1.rows == [(0, 2, "a 100%\nb 100%"), (1, 2, "\u2423 100%\n1 100%")]
    strange = dataclasses.replace(run, text_of=lambda token: " \n\t\x00<")
    text = report.tokens(strange).tables[0].rows[0][2]
    assert text.split("\n")[0] == "\u2423\u21b5\u21e5\\x00< 100%"


def test_one_evaluation_and_single_layers_are_said_so(run):
    alone = dataclasses.replace(run, snapshots=run.snapshots[-1:])
    assert "takes a run folder with two evaluations" in report.saturation(alone).text
    decoder = dataclasses.replace(run.final, stacks=run.final.stacks[1:])
    single = dataclasses.replace(run, snapshots=[decoder])
    assert "No stack has two" in report.transition(single).text
    assert "No stack has two" in report.similarity(single).text


def test_a_checkpoint_whose_loss_is_not_finite_has_its_row(run, capsys):
    numbers = {"neg_log_perplexity": None, "accuracy": 0.5, "dropped_fraction": 0.0}
    line = {"step": 3, **numbers, "routing": {"max_violation": [0.5]}}
    (table,) = report.checkpoints(dataclasses.replace(run, evaluations=[line])).tables
    assert math.isnan(table.rows[0][1]) and table.rows[0][2] == 0.5
    print_checkpoints([line])
    assert capsys.readouterr().out.splitlines()[1].split() == ["3", "nan", "0.5000", "0.0000"]


def test_evaluations_of_other_tokens_are_left_out_and_counted(tmp_path):
    folder = write_run(tmp_path)
    write_snapshot(folder / "routing", 0, decoder_token_T=np.array([9, 9, 9]))
    run = read(folder)
    assert [each.step for each in run.snapshots] == [10, 20] and run.num_others == 1
    assert "1 evaluations of other tokens are left out" in report.saturation(run).text


def test_files_of_two_runs_are_refused(tmp_path):
    folder = write_run(tmp_path)
    write_lines(folder / "metrics.jsonl", [routing_line(10, [[0.5, 0.5]])])
    with refused(
        f"{folder}: metrics.jsonl has 1 Switch layers of 2 experts, routing/ has 3 of 2"
    ):
        read(folder)
    write_snapshot(folder / "routing", 0, num_experts=3)
    said = "routing/step_000000.npz is of 3 experts in <any>, and step_000020.npz of 2 in <any>"
    with refused(f"{folder}/{said}; they are of two models: remove the one"):
        read(folder)
