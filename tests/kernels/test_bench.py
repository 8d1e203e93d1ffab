# SPDX-License-Identifier: Apache-2.0
"""`switchx bench kernels` and `tune kernels`: cells, contenders, times, checks, tilings.

Also what `python -m pallas_kernels` prints of them, and what it refuses.
"""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import __main__ as command
from pallas_kernels.bench import kernels, products, tune
from pallas_kernels.bench.cells import Cell, all_cells, cells_of_a_cpu
from pallas_kernels.bench.timing import (
    LEAST_CALLS,
    Contender,
    all_in_one_program,
    geometric_mean,
    one_by_one,
    speedup,
    take_turns,
)
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.reference import Tiling
from pallas_kernels.tiling.tuned import read
from pallas_kernels.tpu_chip import described_tpu
from tests.kernels import loops

CELL = Cell(8, 12, 4, 4, 3)


@pytest.fixture(autouse=True)
def few_sets(monkeypatch):
    monkeypatch.setitem(products.ROTATED_BYTES, "cpu", 2**11)


def test_every_cell_has_its_rows_and_its_active_experts():
    for cell in all_cells() + cells_of_a_cpu():
        for first in (0, 1, cell.E - 1):
            sizes_E = cell.group_sizes(first)
            assert sizes_E.sum() == cell.R == cell.active * cell.tokens
            assert (sizes_E > 0).sum() == cell.active
            is_balanced = sizes_E.max() == sizes_E[sizes_E > 0].min()
            assert is_balanced == (cell.load == "balanced"), cell


def test_shares_of_a_skewed_load_fall_as_ranks_grow():
    sizes_E = Cell(8, 8, 4, 8, 25, "skewed").group_sizes(1)
    # Of 96 rows beside one each: 46, 23, 15 and 11 by 1, 1/2, 1/3, 1/4; one is left.
    assert sizes_E.tolist() == [0, 48, 24, 16, 12, 0, 0, 0]


def test_other_weights_are_read_from_call_to_call():
    cell = Cell(8, 8, 4, 32, 2)
    used = np.array([cell.group_sizes(first) for first in range(0, 32, 4)]) > 0
    assert used.sum(axis=0).tolist() == [1] * 32


def test_contenders_of_a_cpu():
    names = [product.name for product in products.products(CELL)]
    assert names == [
        "float32", "int8", "int4", "dequantize int8", "batched einsum", "tile schedule",
    ]  # fmt: skip
    skewed = dataclasses.replace(CELL, load="skewed")
    assert "batched einsum" not in [product.name for product in products.products(skewed)]


def test_contenders_of_an_accelerator(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    names = [product.name for product in products.products(CELL)]
    assert names == [
        "bfloat16", "int8", "int4", "dequantize int8", "dequantize int4", "ragged_dot bfloat16",
        "dense bfloat16", "tile schedule",
    ]  # fmt: skip


def test_gradients_where_an_expert_has_the_rows_of_training(monkeypatch):
    training = [each for each in products.products(Cell(8, 12, 4, 4, 64)) if each.of[0] == "d"]
    assert [(each.name, each.of) for each in training] == [
        ("float32 dx", "dx"), ("batched einsum dx", "dx"), ("float32 dw", "dw"),
        ("batched einsum dw", "dw"),
    ]  # fmt: skip
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    names = [each.name for each in products.products(Cell(8, 12, 4, 4, 64))]
    assert {"ragged_dot bfloat16 dx", "ragged_dot bfloat16 dw"} <= set(names)


def test_libraries_of_others_take_part_where_they_are_installed(monkeypatch):
    there = {"tokamax"}
    monkeypatch.setattr(
        products.importlib.util, "find_spec", lambda name: name in there or None
    )
    assert products.installed() == []  # they have no product for a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert products.installed() == [products.tokamax]
    assert "tokamax bfloat16" in [each.name for each in products.products(CELL)]
    there.add(products.MEGABLOX)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert products.installed() == [products.megablox, products.tokamax]


def test_megablox_is_called_as_it_wants_to_be():
    """Traced alone: its interpreter is no measure."""
    x_RD = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)
    w_EDF = jax.ShapeDtypeStruct((4, 128, 256), jnp.bfloat16)
    run = products.Product("megablox", products.megablox)
    sizes_E = jax.ShapeDtypeStruct((4,), jnp.int32)
    y_RF = jax.eval_shape(run.run, x_RD, w_EDF, sizes_E)
    assert (y_RF.shape, y_RF.dtype) == ((256, 256), jnp.bfloat16)
    dw = products.gradient(run, "dw", Cell(128, 256, 4, 4, 64))
    assert jax.eval_shape(dw.run, (x_RD, y_RF), w_EDF, sizes_E).shape == w_EDF.shape


@pytest.mark.parametrize("run", [products.ragged_dot, products.batched_einsum])
def test_what_we_compare_with_multiplies_the_same(run):
    x_RD, w_EDF = np.random.default_rng(0).normal(size=(12, 8)), np.zeros((4, 8, 12))
    w_EDF += np.random.default_rng(1).normal(size=w_EDF.shape)
    y_RF = run(jnp.array(x_RD), jnp.array(w_EDF), jnp.array(CELL.group_sizes()))
    expected_RF = loops.product(x_RD, w_EDF, CELL.group_sizes())
    np.testing.assert_allclose(np.asarray(y_RF), expected_RF, rtol=1e-4, atol=1e-4)


def test_every_contender_is_checked_and_right():
    for each in products.contenders(dataclasses.replace(CELL, tokens=64), {}):
        each.measure(1)
        if each.of == "schedule":
            assert (each.error, each.weight_bytes) == (None, 0)
            continue
        assert each.error < 1e-6, each.name
        assert each.weight_bytes == {
            "float32": 4 * 8 * 12 * 4, "batched einsum": 4 * 8 * 12 * 4,
            "int4": 4 * (4 * 12 + 4 * 12),
        }.get(each.name.removesuffix(f" {each.of}"), 4 * (8 * 12 + 4 * 12))  # fmt: skip


def test_a_wrong_product_has_a_large_error():
    wrong = products.Product("wrong", lambda x_RD, w_EDF, sizes_E: x_RD @ w_EDF[0])
    x_RD = jnp.array(np.random.default_rng(0).normal(size=(12, 8)), jnp.float32)
    w_EDF = products.random_weights(CELL, None, 0)
    given = x_RD, [w_EDF], [jnp.array(CELL.group_sizes())]
    assert products.relative_error(wrong, given) > 0.5
    dense = products.Product("dense", products.dense)
    assert products.relative_error(dense, given) is None


@pytest.mark.slow
def test_weights_rotate_and_stay_for_cells_of_the_same_matrices():
    cache = {}
    products.contenders(CELL, cache)
    sets = cache[8]
    assert sum(q.nbytes for q in sets) >= 2**11
    assert not np.array_equal(np.asarray(sets[0].values), np.asarray(sets[1].values))
    products.contenders(dataclasses.replace(CELL, tokens=1), cache)
    assert cache[8] is sets
    products.contenders(dataclasses.replace(CELL, F=4), cache)
    assert cache[8] is not sets


def test_turns_alternate_and_each_has_its_rounds():
    steps = []
    a, b = (Contender(name, lambda name=name: steps.append(name)) for name in "ab")
    take_turns([a, b], rounds=3)
    assert "".join(steps) == "ab" + "ab" + "ba" + "ab"  # the first two to warm up
    assert len(a.times_s) == len(b.times_s) == 3


def test_figures():
    fast = Contender("fast", None, times_s=[1.0, 2.0, 3.0])
    slow = Contender("slow", None, times_s=[2.0, 8.0, 9.0])
    assert speedup(fast, slow) == 3.0  # of 2, 4, 3
    assert (fast.median_s, fast.percentile_s(10), fast.percentile_s(90)) == (2.0, 1.0, 3.0)
    assert geometric_mean([1, 8]) == pytest.approx(8**0.5)


SETS, SIZES = [jnp.array([1.0]), jnp.array([2.0])], [jnp.array([3]), jnp.array([4])]


def test_one_by_one_goes_through_all_weights_and_sizes():
    results = []
    step = one_by_one(lambda x, w, s: x + w + s, jnp.zeros(1), SETS, SIZES)
    for _ in range(5):
        results.append(float(step()[0]))
    assert results == [4, 5, 5, 6, 4]


def test_one_program_makes_every_call():
    """Not left out although nobody wants its result; test_aot.py compiles it for a GPU."""
    seen = []

    def on_host(weights, sizes):
        seen.append((float(weights[0]), int(sizes[0])))
        return np.float32(weights * sizes)

    def product(x_RD, weights, sizes):
        # Without effects, as a product: XLA may drop it.
        result = jax.ShapeDtypeStruct((1,), jnp.float32)
        return x_RD + jax.pure_callback(on_host, result, weights, sizes)

    step, calls = all_in_one_program(product, jnp.ones(1), SETS, SIZES)
    assert calls == LEAST_CALLS
    total = step()
    each = [(1.0, 3), (1.0, 4), (2.0, 3), (2.0, 4)]
    assert sorted(seen) == sorted(each * (calls // 4))
    assert float(total) == sum(1 + w * s for w, s in each) * calls // 4


def test_a_dense_product_takes_turns_with_single_matrices():
    """As many of 64 float32 as a cache of 2,048 bytes does not hold."""
    x_RD, w_EDF = jnp.ones((8, 8)), jnp.arange(6.0)[:, None, None] * jnp.ones((6, 8, 8))
    given = x_RD, [w_EDF, -w_EDF], [jnp.full(6, 2)]
    _, matrices, _ = products._of_one_matrix(given, Cell(8, 8, 6, 6, 2))
    found = [float(products.dense(x_RD, w_DF, None)[0, 0]) for w_DF in matrices]
    assert found == [0, 8, 16, 24, 32, 40, 0, -8]


def test_rows_and_checks_of_small_cells():
    cells = [Cell(8, 12, 4, 4, 3), Cell(8, 12, 1, 4, 3)]
    notes = []
    rows, checks = kernels.run(2, cells, notes.append)
    assert len(notes) == 2
    measured = [row for row in rows if "us" in row]
    assert len(measured) == 6 + 5
    assert all({"pass", "predicted_us"} <= row.keys() for row in measured)
    [schedule, _] = [row for row in measured if row["pass"] == "schedule"]
    assert schedule["contender"] == "tile schedule" and schedule["weight_gb_per_s"] is None
    assert all(
        row["us"] > 0 and row["p10_us"] <= row["us"] <= row["p90_us"] for row in measured
    )
    assert measured[0]["speedup"] == 1
    means = [row for row in rows if row["matrix"] == "geometric mean"]
    assert {(row["active"], row["tokens"]) for row in means} == {
        (4, "all"), (4, "<=16"), (1, "all"), (1, "<=16"),
    }  # fmt: skip
    assert [(check["name"], check["bound"]) for check in checks] == [
        ("reference_vs_batched_einsum", "<=1.5"), ("int8_bytes_vs_f32", "<=0.25"),
        ("int4_bytes_vs_f32", "<=0.125"), ("max_error_vs_float64", "<=1e-5"),
    ]  # fmt: skip
    assert [check["value"] for check in checks[1:3]] == [0.25, 0.125]
    assert 0 < checks[3]["value"] < 1e-6


@pytest.mark.parametrize("of", ["batched einsum", "float32"])
def test_what_does_not_fit_is_left_out_and_the_rest_is_kept(monkeypatch, of):
    """A product alone, or its whole cell where it is the one that others are compared with."""
    small, large = Cell(8, 12, 4, 4, 3), Cell(8, 16, 4, 4, 3)
    contender = products.contender

    def limited(name, run, given):
        if name == of and given[1][0].shape[-1] == large.F:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return contender(name, run, given)

    monkeypatch.setattr(products, "contender", limited)
    notes = []
    rows, _ = kernels.run(1, [small, large], notes.append)
    found = {row["matrix"]: 0 for row in rows} | {"8x16": 0}
    for row in rows:
        found[row["matrix"]] += "us" in row
    is_whole = of == "float32"
    assert (found["8x12"], found["8x16"]) == (6, 0 if is_whole else 5)
    assert sum("does not fit the device's memory" in note for note in notes) == 1


@pytest.mark.parametrize("of", ["forward", "dx", "dw"])
def test_predictions_of_a_tpu_are_those_that_choose_tilings(of):
    cell = Cell(1024, 4096, 32, 32, 64)
    suffix = "" if of == "forward" else f" {of}"
    with described_tpu("TPU v5 lite"):
        seconds = kernels._predicted_s(cell, Contender("bfloat16" + suffix, None, of=of))
        assert kernels._predicted_s(cell, Contender("ragged_dot bfloat16", None)) is None
    # The weights of 32 experts at 819 GB/s take 328 us.
    assert 3e-4 < seconds < 2e-3


@pytest.mark.parametrize(("kind", "bytes_per_s"), [("H200", 4.5e12), ("H100", 2.95e12)])
def test_predictions_of_hopper_are_of_its_copy_rate(monkeypatch, kind, bytes_per_s):
    device = types.SimpleNamespace(
        platform="gpu", compute_capability="9.0", kind=f"NVIDIA {kind}"
    )
    monkeypatch.setattr(kernels, "current_device", lambda: device)
    cell = Cell(4096, 14336, 32, 32, 8)
    seconds = kernels._predicted_s(cell, Contender("bfloat16", None))
    # Of as much memory: beside it, what a launch takes.
    memory_s = 32 * 4096 * 14336 * 2 / bytes_per_s
    assert memory_s + 5e-6 < seconds < memory_s + 2e-5
    # Of large tiles and gradients there is no loop in the table.
    many = Cell(1024, 4096, 32, 32, 512)
    assert kernels._predicted_s(many, Contender("bfloat16 dw", None, of="dw")) is None


def hopper_cell(tokens, active=32, **times):
    contenders = {
        name.replace("_of_", " "): Contender(name, None, weight_bytes=1000, times_s=[time_s])
        for name, time_s in times.items()
    }
    return Cell(1024, 4096, active, 32, tokens), contenders


def test_checks_of_hopper_are_the_worst_cells():
    ragged = "ragged_dot_of_bfloat16"
    measured = [
        hopper_cell(1, bfloat16=4.0, int8=2.0, int4=1.0, **{ragged: 8.0}),
        hopper_cell(16, bfloat16=5.0, int8=4.0, int4=2.0, **{ragged: 6.0}),
        hopper_cell(16, active=8, bfloat16=9.0, int8=9.0, int4=9.0, **{ragged: 8.1}),
        hopper_cell(
            512, bfloat16=10.0, int8=9.0, int4=9.0, dense_of_bfloat16=9.0, **{ragged: 90.0}
        ),
    ]
    checks = kernels.checks_of_hopper(measured, copied_bytes_per_s=250.0)
    assert {check["name"]: check["value"] for check in checks} == {
        "int8_vs_bf16_32": 1.25,  # of 2 and 1.25; 8 active experts are another matter
        "int4_vs_bf16_32": 2.5,
        "bf16_vs_cublas": 0.9,
        "bf16_vs_copy_bandwidth": 0.8,  # 1000 bytes in 5 s of 250 a second
        "bf16_vs_ragged_dot": pytest.approx(0.9),
    }
    names = [check["name"] for check in kernels.checks_of_hopper(measured[2:3], 1.0)]
    assert names == ["bf16_vs_ragged_dot"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_is_no_check(place):
    names = ["bfloat16", "int8", "int4"]
    found = {name: Contender(name, lambda: None, error=1e-7) for name in names}
    found[names[place]].error = float("nan")
    with pytest.raises(RuntimeError, match="max_error_vs_float64 is NaN"):
        kernels.checks([(None, found)])


def test_the_best_of_every_product_is_written(tilings_file):
    notes = []
    rows = tune.run(1, [CELL], notes.append)
    assert [row["weights"] for row in rows] == ["float32", "int8", "int4"]
    assert all(row["measured"] > 1 and row["did_not_compile"] == 0 for row in rows)
    assert len(notes) == 3
    entries = read(tilings_file)
    assert {(key.op, key.bits, key.implementation) for key in entries} == {
        ("grouped_matmul", None, "reference"),
        ("quantized_grouped_matmul", 8, "reference"),
        ("quantized_grouped_matmul", 4, "reference"),
    }


@pytest.fixture
def candidates(monkeypatch):
    """Three of `reference`, the second of which does not fit."""
    tilings = [Tiling(3, 8), Tiling(3, 5), Tiling(3, 4)]
    monkeypatch.setattr(tune, "candidates", lambda *options: tilings)
    return tilings


def times(monkeypatch, **seconds):
    def take_turns(contenders, rounds):
        for each in contenders:
            each.times_s = [seconds[each.name.partition("weight_rows=")[2][0]]] * rounds

    monkeypatch.setattr(tune, "take_turns", take_turns)


@pytest.mark.parametrize(
    ("time_s", "best"), [(1.0, Tiling(3, 4)), (1.99, Tiling(3, 8)), (3.0, Tiling(3, 8))]
)
def test_the_quickest_wins_by_more_than_noise(candidates, monkeypatch, time_s, best):
    times(monkeypatch, **{"8": 2.0, "4": time_s})
    key, tiling, row = tune.tune_one(CELL, None, 1, {})
    assert tiling == best
    assert (row["measured"], row["did_not_compile"]) == (2, 1)
    assert row["speedup"] == pytest.approx(2.0 if time_s == 1.0 else 1.0)
    assert (key.rows, key.D, key.F, key.E) == (16, 8, 12, 4)


def test_one_that_was_lucky_is_measured_again(candidates, monkeypatch):
    rounds_of = []

    def take_turns(contenders, rounds):
        rounds_of.append(rounds)
        for each in contenders:
            is_lucky = "weight_rows=4" in each.name and len(rounds_of) == 1
            each.times_s += [1.0 if is_lucky else 2.0] * rounds

    monkeypatch.setattr(tune, "take_turns", take_turns)
    _, tiling, row = tune.tune_one(CELL, None, 3, {})
    assert (tiling, row["speedup"], rounds_of) == (Tiling(3, 8), 1.0, [3, 6])


def test_a_wrong_result_is_never_tuned_for(candidates, monkeypatch):
    def wrong(x_RD, w_EDF, sizes_E, *, tiling):
        y_RF = reference.forward(x_RD, w_EDF, sizes_E, tiling=tiling)
        return y_RF * 1.1 if tiling.weight_rows == 4 else y_RF

    monkeypatch.setattr(tune, "grouped_matmul", wrong)
    with pytest.raises(RuntimeError, match="weight_rows=4. has a relative error of 0.1"):
        tune.tune_one(CELL, None, 1, {})


def test_a_default_that_does_not_compile_is_a_bug(candidates, monkeypatch):
    monkeypatch.setattr(tune, "candidates", lambda *options: [Tiling(3, 5), Tiling(3, 4)])
    with pytest.raises(RuntimeError, match="default tiling .* does not compile.*divisor of 8"):
        tune.tune_one(CELL, None, 1, {})


def test_back_ends_are_asked_with_what_they_depend_on():
    asked = []

    def of(R, D, F, E, bits, dtype):
        asked.append((R, D, F, E, bits, dtype))
        return ["first"]

    backend = types.SimpleNamespace(candidates=of)
    assert tune.candidates(backend, (1, 2, 3, 4), "bfloat16", 8) == ["first"]
    assert asked == [(1, 2, 3, 4, 8, "bfloat16")]


@pytest.mark.parametrize(("value", "status"), [(1.0, 0), (1.1, 1)])
def test_rows_and_checks_are_printed_and_one_that_does_not_hold_fails(
    monkeypatch, capsys, value, status
):
    row = {"matrix": "64x128", "us": 12.3456}
    check = {"name": "error", "value": value, "bound": "<=1"}
    fast = {"name": "fast", "value": 2.0, "bound": ">=2"}

    def bench(rounds, note):
        assert rounds == 3
        note("measuring")
        return [row], [check, fast]

    monkeypatch.setattr(kernels, "run", bench)
    assert command.main(["bench", "--rounds=3", "--json"]) == status
    out, err = capsys.readouterr()
    judged = [check | {"holds": not status}, fast | {"holds": True}]
    assert json.loads(out) == {"command": "bench", "results": [row], "checks": judged}
    assert err == "measuring\n"
    assert command.main(["bench", "--rounds=3"]) == status
    assert capsys.readouterr().out.splitlines()[0] == "matrix=64x128  us=12.35"


def test_it_says_where_tilings_are_written(monkeypatch, capsys, tilings_file):
    monkeypatch.setattr(tune, "run", lambda rounds, note: [{"rounds": rounds}])
    assert command.main(["tune"]) == 0
    out, err = capsys.readouterr()
    assert out == "rounds=7\n" and err == f"written to {tilings_file}\n"


def test_no_rounds_are_refused(capsys):
    for rounds in ("0", "many"):
        with pytest.raises(SystemExit, match="2"):
            command.main(["tune", f"--rounds={rounds}"])
        assert f"{rounds} is no number of turns; use 1 or more" in capsys.readouterr().err
