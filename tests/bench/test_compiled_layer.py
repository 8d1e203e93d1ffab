# SPDX-License-Identifier: Apache-2.0
"""Layers by a compiler's clock: what is ideal, routings, ratios to peers, bounds."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.bench import compiled_layer, compiled_peers
from switchx.bench.peers.layers import LayerShape
from switchx.cli.main import main

SHAPE = LayerShape(8, 768, 2048, 16, 512, is_gated=True, capacity_factor=1.25)


def test_the_ideal_of_a_layer_by_hand():
    weights = 32 * 1024 * 4096 * 2
    rows_D, rows_F = 8192 * 1024 * 2, 8192 * 4096 * 2
    assert compiled_layer.ideal_bytes("relu", "forward") == (
        2 * weights + 2 * rows_D + 2 * rows_F
    )
    assert compiled_layer.ideal_bytes("geglu", "backward") == (
        9 * weights + 5 * rows_D + 11 * rows_F
    )


def test_splits_use_every_row_and_zipf_is_uneven():
    splits = compiled_layer.group_sizes()
    assert {sizes_E.sum() for sizes_E in splits.values()} == {8192}
    assert splits["zipf"].max() > 4 * splits["balanced"].max()


def test_the_worst_forward_pass_is_checked_and_nothing_where_nothing_ran():
    rows = [
        {"pass": "forward", "bytes_vs_ideal": 1.1}, {"target": "h200:1", "not_run": "absent"},
        {"pass": "backward", "bytes_vs_ideal": 2.0}, {"pass": "forward", "bytes_vs_ideal": 1.2},
    ]  # fmt: skip
    [check] = compiled_layer.checks(rows)
    assert (check.name, check.value, check.holds) == ("layer_bytes_vs_ideal", 1.2, False)
    assert compiled_layer.checks(rows[1:2]) == []


def test_the_command_prints_one_json_object(tmp_path, monkeypatch, capsys):
    """Without compilers: it says why nothing ran, and checks nothing."""
    for variable in ("SWITCHX_AOT_TPU", "SWITCHX_AOT_GPU"):
        monkeypatch.setenv(variable, str(tmp_path))
    assert main(["bench", "compiled", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (printed["command"], printed["checks"]) == ("bench compiled", [])
    rows = [row for row in printed["results"] if "not_run" in row]
    assert [row["target"] for row in rows][:2] == ["v5e:2x2", "h200:1"]
    # The layers of Switch-Base, then the training step.
    assert [row["target"] for row in rows][2:] == 2 * ["v5e:2x2"] + 2 * ["v5p:2x2x1"]
    assert all("run `make test-aot`" in row["not_run"] for row in rows)
    without = [row for row in printed["results"] if "not_compared" in row]
    assert {row["layer"] for row in without} == {"flaxformer", "maxtext"}
    assert all("--peer=FOLDER" in row["not_compared"] for row in without)


def test_cycles_are_those_of_the_chips():
    """1.5 GHz and 1.75 GHz, which Google names for these chips."""
    assert compiled_layer.rates_of("v5e").cycles_per_s == pytest.approx(1.5e9, rel=0.01)
    assert compiled_layer.rates_of("v5p").cycles_per_s == pytest.approx(1.75e9, rel=0.01)


def test_the_ideal_by_hand():
    products, router = 8192 * 6 * 768 * 2048, 8192 * 2 * 768 * 8
    assert compiled_peers.ideal_flops(SHAPE, "forward", 1.25) == 1.25 * products + router
    assert compiled_peers.ideal_flops(SHAPE, "backward", None) == 3 * (products + router)


def test_a_recorded_routing_is_the_split():
    """Our own router sends the recorded rows where the split says."""
    shape = LayerShape(4, 16, 32, 16, 512, is_gated=True, capacity_factor=None)
    sizes_E = np.array([4096, 2048, 2048, 0])
    arguments = [
        jax.ShapeDtypeStruct(each, jnp.float32)
        for each in ((4, 16, 32), (16, 4), (16, 512, 16))
    ]
    nothing, w_DE, x_BLD = compiled_peers.recorded_routing(arguments, shape, sizes_E)
    assert nothing is None
    chosen_R = np.argmax(np.asarray(x_BLD).reshape(-1, 16) @ np.asarray(w_DE), axis=-1)
    np.testing.assert_array_equal(np.bincount(chosen_R, minlength=4), sizes_E)


def row(layer, seconds, factor=1.25, **changes):
    return {
        "layer": layer, "target": "v5e:2x2", "experts": 64, "pass": "forward",
        "rows_by_expert": "zipf", "capacity_factor": factor, "estimated_s": seconds,
        "flops_vs_ideal": 1.0, "bytes_vs_ideal": 1.2,
    } | changes  # fmt: skip


def test_the_default_is_held_against_the_quickest_peer_of_its_cell():
    rows = compiled_peers.with_ratios([
        row("gather", 8.0), row("gather", 3.0, 1.0, bytes_vs_ideal=1.6),
        row("dropless", 1.0, None),
        row("maxtext", 10.0, None), row("flaxformer", 16.0),
        row("flaxformer", 1.0, experts=8),  # another cell
        row("flaxformer", 2.0, 1.0, rows_by_expert="balanced"),
        {"layer": "maxtext", "target": "v5e:2x2", "not_compared": "why"},
        {"target": "v5p:2x2x1", "not_run": "absent"},
    ])  # fmt: skip
    assert [each.get("seconds_vs_best_peer") for each in rows[:3]] == [0.8, 0.3, None]
    found = {each.name: (each.value, each.holds) for each in compiled_peers.checks(rows)}
    assert found == {
        "flops_vs_ideal": (1.0, True),
        "bytes_vs_ideal": (1.6, False),
        "seconds_vs_best_peer": (0.8, True),
    }
    assert compiled_peers.checks(rows[-2:]) == []


@pytest.mark.aot
@pytest.mark.timeout(1800)
def test_layers_are_near_the_ideal_where_compilers_are():
    report = compiled_layer.run(note=lambda text: None)
    if not report.checks:
        pytest.skip(report.results[0]["not_run"])
    assert [check.name for check in report.checks if not check.holds] == []


@pytest.mark.aot
@pytest.mark.timeout(1800)
def test_layers_of_switch_base_compile_near_the_ideal():
    rows = compiled_peers.rows_of_child(compiled_peers.__name__, "v5e:2x2", "1")
    if "not_run" in rows[0]:
        pytest.skip(rows[0]["not_run"])
    assert {each["layer"] for each in rows} == set(compiled_peers.OURS)
    assert [each.name for each in compiled_peers.checks(rows) if not each.holds] == []
