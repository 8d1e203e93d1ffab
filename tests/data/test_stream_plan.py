# SPDX-License-Identifier: Apache-2.0
import numpy as np

from switchx.data.objectives import CausalLM, InputsToTargets
from switchx.data.streams import LANES, cursor_dtype
from tests.data.fakes import make_plan, make_task, pair_corpus, text_corpus

TEXT = make_task("text", text_corpus("5 6", "7 8"), CausalLM())
PAIRS = make_task("pairs", pair_corpus(("5", "6")), InputsToTargets())


def plan_of_both(**options):
    return make_plan(TEXT, PAIRS, probabilities=[0.5, 0.5], **options)


def test_cursor_is_a_vector_of_integers():
    cursor = plan_of_both().new_cursor()
    assert cursor.dtype == np.int64 and cursor.shape == (2 + 2 * (2 + 2 * LANES),)
    fields = cursor.view(cursor_dtype(2))[0]
    fields["drawn"] = 7
    fields["tasks"]["dropped"] = [3, 4]
    assert cursor[1] == 7 and sorted(cursor)[-3:] == [3, 4, 7]


def test_counts_sum_over_rows():
    plan = plan_of_both()
    cursors = np.tile(plan.new_cursor(), (3, 1))
    fields = cursors.view(cursor_dtype(2))[:, 0]
    fields["tasks"]["dropped"][:, 1] = [1, 2, 3]
    fields["tasks"]["truncated"][2, 0] = 5
    assert plan.counts(cursors) == {
        "text/dropped": 0,
        "text/truncated": 5,
        "pairs/dropped": 6,
        "pairs/truncated": 0,
    }
    assert plan.counts(cursors[1])["pairs/dropped"] == 2


def test_tasks_on_one_corpus_are_shuffled_apart():
    corpus = text_corpus(*map(str, range(3, 50)))
    twins = (make_task("a", corpus, CausalLM()), make_task("b", corpus, CausalLM()))
    first, second = make_plan(*twins, probabilities=[0.5, 0.5]).records
    assert [first[i]["text"] for i in range(47)] != [second[i]["text"] for i in range(47)]


def test_evaluation_reads_in_order():
    plan = plan_of_both(is_finite=True)
    assert [plan.records[0][i]["text"] for i in range(2)] == ["5 6", "7 8"]
    assert plan.num_lanes == 1


def test_generators_differ_by_purpose_and_seed():
    def draw(seed, *position):
        return make_plan(TEXT, seed=seed).generator(*position).random()

    assert draw(0, 0, 1, 2) == draw(0, 0, 1, 2)
    assert len({draw(0, 0, 1, 2), draw(0, 1, 1, 2), draw(0, 0, 1, 3), draw(1, 0, 1, 2)}) == 4
