# SPDX-License-Identifier: Apache-2.0
"""What was recorded, counted against loops over tokens, by hand and in closed form."""

import math

import numpy as np
import pytest

from switchx.analysis.routing import (
    TypicalToken,
    class_counts,
    comparable,
    information,
    layer_similarity,
    read_history,
    read_snapshots,
    rows_to_shares,
    saturation,
    saturation_by_step,
    token_counts,
    transitions,
    typical_tokens,
)
from tests.analysis.recorded import (
    DECODER_TOKENS,
    ENCODER_EXPERTS,
    routing_line,
    write_lines,
    write_run,
    write_snapshot,
)
from tests.data.refusals import refused


def test_history_is_by_step_and_layer(tmp_path):
    path = tmp_path / "metrics.jsonl"
    loads = [[[0.25, 0.75], [1.0, 0.0]], [[0.5, 0.5], [0.9, 0.1]]]
    write_lines(path, [routing_line(5, loads[0]), routing_line(10, loads[1])])
    history = read_history(path)
    np.testing.assert_array_equal(history.steps, [5, 10])
    np.testing.assert_allclose(history.load, loads)
    for name in ("dropped", "entropy", "gate"):
        np.testing.assert_allclose(getattr(history, name), [[0.05, 0.05], [0.1, 0.1]])
    assert history.num_experts == 2


def test_loads_of_several_choices_are_shares_of_the_choices(tmp_path):
    path = tmp_path / "metrics.jsonl"
    # Two choices a token: the log counts 2 a token.
    write_lines(path, [routing_line(1, [[1.0, 0.6, 0.4]])])
    np.testing.assert_allclose(read_history(path).load, [[[0.5, 0.3, 0.2]]])


def test_lines_of_skipped_steps_and_the_line_being_written_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [{"step": 1, "loss": None}, routing_line(2, [[0.5, 0.5]])])
    path.write_text(path.read_text() + '{"step": 3, "rou')
    np.testing.assert_array_equal(read_history(path).steps, [2])


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1\n{"step": 2}\n')
    with refused(f"{path}: line 1 is damaged (<any>)"):
        read_history(path)
    for line in (
        "[1, 2]",
        '{"loss": 2}',
        '{"step": "2"}',
        '{"step": 2, "neg_log_perplexity": "x"}',
    ):
        path.write_text(f'{{"step": 1}}\n{line}\n')
        with refused(f"{path}: line 2 is no line of a log (<any>); write it as it was"):
            read_history(path)


def test_logs_without_routing_say_what_to_do(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with refused(f"{path} cannot be read (No such file or directory)"):
        read_history(path)
    path.write_text("")
    with refused(f"{path} has no line yet"):
        read_history(path)
    write_lines(path, [{"step": 1, "loss": 2.0}])
    with refused(f"{path} has no routing, the model is dense or every step was skipped"):
        read_history(path)


E = 5


def choices(seed: int, layers=3, tokens=40, num_choices=2) -> np.ndarray:
    """Different experts for each token, some of them missing (E)."""
    rng = np.random.default_rng(seed)
    expert_NTS = np.array(
        [[rng.permutation(E)[:num_choices] for _ in range(tokens)] for _ in range(layers)]
    )
    expert_NTS[rng.random(expert_NTS.shape) < 0.2] = E
    return expert_NTS.astype(np.int16)


def test_snapshots_are_read_in_the_order_of_steps(tmp_path):
    snapshots = read_snapshots(write_run(tmp_path) / "routing")
    assert [each.step for each in snapshots] == [0, 10, 20]
    last = snapshots[-1]
    assert last.layers == ["encoder 1", "encoder 3", "decoder 1"] and last.num_experts == 2
    np.testing.assert_array_equal(last.stacks[0].expert_NTS[..., 0], ENCODER_EXPERTS[20])
    np.testing.assert_array_equal(last.stacks[1].token_T, DECODER_TOKENS)
    assert last.stacks[0].gate_NTS.dtype == np.float32 and last.stacks[0].gate_NTS.max() == 0.75


def test_steps_of_seven_digits_come_last(tmp_path):
    for recorded, step in ((20, 200000), (10, 1000000)):
        write_snapshot(tmp_path, recorded, **{"step": step})
        (tmp_path / f"step_{recorded:06d}.npz").rename(tmp_path / f"step_{step}.npz")
    assert [each.step for each in read_snapshots(tmp_path)] == [200000, 1000000]


def test_samples_of_other_tokens_cannot_be_compared(tmp_path):
    write_snapshot(tmp_path, 0, encoder_token_T=np.array([9, 9, 9, 9, 9]))
    write_snapshot(tmp_path, 10)
    write_snapshot(tmp_path, 20)
    snapshots = read_snapshots(tmp_path)
    assert [each.step for each in comparable(snapshots)] == [10, 20]


def test_no_sample_and_a_damaged_one_say_what_to_do(tmp_path):
    with refused(f"{tmp_path} holds no routing sample"):
        read_snapshots(tmp_path)
    write_snapshot(tmp_path, 0)
    path = tmp_path / "step_000000.npz"
    for content in (path.read_bytes()[:300], b"", b"text"):
        path.write_bytes(content)
        with refused(f"{path} is no routing sample that can be read (<any>)"):
            read_snapshots(tmp_path)


@pytest.mark.parametrize("num_choices", [1, 3])
def test_transitions_equal_a_loop_over_tokens(num_choices):
    expert_NTS = choices(0, num_choices=num_choices)
    want = np.zeros((2, E, E))
    for n in range(2):
        for t in range(expert_NTS.shape[1]):
            here = [e for e in expert_NTS[n, t] if e < E]
            there = [e for e in expert_NTS[n + 1, t] if e < E]
            for a in here:
                for b in there:
                    want[n, a, b] += 1 / (len(here) * len(there))
    got = transitions(expert_NTS, E)
    np.testing.assert_allclose(got, want)
    # Every token that is routed in both layers counts once.
    is_routed = (expert_NTS < E).any(axis=-1)
    np.testing.assert_allclose(got.sum(axis=(1, 2)), (is_routed[:-1] & is_routed[1:]).sum(1))


def test_one_layer_has_no_transition():
    assert transitions(choices(0, layers=1), E).shape == (0, E, E)


def test_rows_become_shares_and_empty_rows_nan():
    got = rows_to_shares(np.array([[1.0, 3.0], [0.0, 0.0]]))
    np.testing.assert_array_equal(got, [[0.25, 0.75], [np.nan, np.nan]])


def test_class_counts_equal_a_loop():
    expert_TS = choices(1, layers=1)[0]
    class_T = np.random.default_rng(2).integers(0, 3, len(expert_TS))
    want = np.zeros((E, 3))
    for t, experts in enumerate(expert_TS):
        for e in experts:
            if e < E:
                want[e, class_T[t]] += 1
    np.testing.assert_array_equal(class_counts(expert_TS, class_T, E, 3), want)


def test_typical_tokens_by_hand():
    # Token 7 eight times, 8 four times, 9 four times; expert 0 gets all of 8 and half of 7.
    token_T = np.array([7] * 8 + [8] * 4 + [9] * 4)
    expert_TS = np.array([0] * 4 + [1] * 4 + [0] * 4 + [1] * 4)[:, None]
    counts = token_counts(expert_TS, token_T, 2)
    assert typical_tokens(counts, 0, num=5) == [TypicalToken(8, 4, 1.0)]
    assert typical_tokens(counts, 1, num=5) == [TypicalToken(9, 4, 1.0)]


def test_typical_tokens_are_ordered_by_what_they_tell():
    token_T = np.array([1] * 10 + [2] * 10 + [3] * 2 + [4] * 18)
    expert_T = np.array([0] * 8 + [1] * 2 + [0] * 6 + [1] * 4 + [0] * 2 + [1] * 18)
    counts = token_counts(expert_T[:, None], token_T, 2)
    got = typical_tokens(counts, 0, num=3)
    # q ln(q / p): 8/16 ln 2, 6/16 ln 1.5, 2/16 ln 2.5.
    told = {1: 0.5 * math.log(2), 2: 0.375 * math.log(1.5), 3: 0.125 * math.log(2.5)}
    assert [t.token for t in got] == sorted(told, key=told.get, reverse=True) == [1, 2, 3]
    assert [t.count for t in got] == [8, 6, 2]
    assert [t.share for t in got] == [0.8, 0.6, 1.0]
    assert [t.token for t in typical_tokens(counts, 0, num=1)] == [1]


def test_an_expert_without_tokens_has_no_typical_one():
    nothing = np.full((3, 1), 2)
    for experts in (np.zeros((3, 1), int), nothing):
        counts = token_counts(experts, np.array([1, 2, 3]), 2)
        assert typical_tokens(counts, 1, 5) == []


def test_saturation_equals_a_loop_over_sets():
    expert_NTS, final_NTS = choices(3), choices(4)
    want = []
    for here_TS, final_TS in zip(expert_NTS, final_NTS, strict=True):
        shares = []
        for here, final in zip(here_TS, final_TS, strict=True):
            final = {e for e in final if e < E}
            if final:
                shares.append(len(final & set(here)) / len(final))
        want.append(np.mean(shares))
    np.testing.assert_allclose(saturation(expert_NTS, final_NTS, E), want)
    assert min(want) > 0 and max(want) < 1
    np.testing.assert_allclose(saturation(final_NTS, final_NTS, E), 1)


def test_saturation_by_step_of_the_recorded_run(tmp_path):
    got = saturation_by_step(read_snapshots(write_run(tmp_path) / "routing"))
    # Encoder: of 4 tokens (the fifth ends nowhere) 2, then 3 are right; of 5 tokens 3, then 4.
    # Decoder: of 3 tokens 2, then 2.
    np.testing.assert_allclose(got, [[0.5, 0.6, 2 / 3], [0.75, 0.8, 2 / 3], [1, 1, 1]])


def test_saturation_of_other_tokens_is_refused():
    with refused(
        "routing of shape (3, 40, 2) cannot be compared with the final one of shape (3, 39, 2)"
    ):
        saturation(choices(0), choices(0, tokens=39), E)


NUM_EXPERTS = 4


def test_renamed_experts_are_the_same_layer_and_independent_ones_share_nothing():
    # All 16 pairs of experts once: the second layer is independent of the first.
    first_T = np.repeat(np.arange(NUM_EXPERTS), NUM_EXPERTS)
    second_T = np.tile(np.arange(NUM_EXPERTS), NUM_EXPERTS)
    renamed_T = np.array([2, 3, 1, 0])[first_T]
    got = layer_similarity(np.stack([first_T, renamed_T, second_T])[..., None], NUM_EXPERTS)
    np.testing.assert_allclose(got, [[1, 1, 0], [1, 1, 0], [0, 0, 1]], atol=1e-12)


def test_information_of_two_layers_by_hand():
    # Layer a halves what layer b tells apart in four: I = H(a) = ln 2, H(b) = ln 4.
    b_T = np.arange(8) % 4
    got = layer_similarity(np.stack([b_T // 2, b_T])[..., None], NUM_EXPERTS)
    assert math.isclose(got[0, 1], math.log(2) / math.sqrt(math.log(2) * math.log(4)))


def test_information_of_a_table_by_hand():
    # Rows are halves and tell nothing of columns; then row and column are the same.
    none, all_of_it = information(np.ones((2, 4))), information(np.eye(4))
    assert math.isclose(none.mutual, 0, abs_tol=1e-12) and math.isclose(none.rows, math.log(2))
    assert math.isclose(none.columns, math.log(4))
    assert math.isclose(all_of_it.mutual, math.log(4)) and math.isclose(all_of_it.normalised, 1)
    # p = 3/8, 1/8, 1/8, 3/8: I = 2 ln 2 - H, in sums of p ln p.
    entropy = -2 * (3 / 8 * math.log(3 / 8) + 1 / 8 * math.log(1 / 8))
    found = information(np.array([[3, 1], [1, 3]]))
    assert math.isclose(found.mutual, 2 * math.log(2) - entropy)


def test_tokens_without_an_expert_and_further_choices_do_not_count():
    first_TS = np.array([[0, 3], [1, 3], [NUM_EXPERTS, 3], [0, 2]])
    second_TS = np.array([[1, 0], [0, 0], [0, 0], [1, 0]])
    got = layer_similarity(np.stack([first_TS, second_TS]), NUM_EXPERTS)
    np.testing.assert_allclose(got, np.ones((2, 2)))


def test_a_layer_with_one_expert_tells_nothing():
    got = layer_similarity(
        np.stack([np.zeros(6, int), np.arange(6) % NUM_EXPERTS])[..., None], NUM_EXPERTS
    )
    np.testing.assert_allclose(got, [[0, 0], [0, 1]])
