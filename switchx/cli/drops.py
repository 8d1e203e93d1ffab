# SPDX-License-Identifier: Apache-2.0
"""`switchx drops`: what a routing record says about other capacities, groups and orders."""

import argparse
import itertools
from typing import Any

from switchx.cli import arguments as shared

DROPS = """\
Computes which choices a recorded model would drop at other capacity factors, group sizes,
numbers of choices, orders and rounds of rerouting, and the smallest capacity for a wanted share
of drops. The model itself is not run.

  switchx eval --model_dir=DIR --record=eval.parquet
  switchx drops eval.parquet
  switchx drops eval.parquet --factors=1,1.25,2 --group_sizes=256,1024,4096 --target=0.01
  switchx drops eval.parquet --num_selected=1 --rounds=1,4 --priority=gate
  switchx drops eval.parquet --rule=megatron --ranks=8 --microbatches=2 --json
  switchx drops eval.parquet --measured=eval_at_factor_2.parquet

Exact for the first Switch layer of an encoder or of a decoder-only model; for later layers a
first-order estimate, since dropped tokens change what these layers read (docs/drops.md). The
exit status is 1 if the record's own drops do not follow from it, or if the first layer's
drops are not those of --measured.
"""
FLAGS = {
    "--factors=X,X": "capacity factors; default: 1, 1.25, 1.5, 2 and the model's own",
    "--group_sizes=N,N": "places routed together; default: the recorded size, and 4 and 16 "
    "times it",
    "--num_selected=N,N": "experts that a token chooses; default: as recorded",
    "--priority=position|gate": "order in which choices get slots; default: as recorded; gate "
    "for megatron",
    "--rounds=N,N": "experts that a token without a slot tries; 1 does not reroute; default: "
    "as recorded",
    "--rule=switchx|flaxformer|megatron": "library whose rule cuts batches into groups",
    "--ranks=N": "devices that a batch's rows are split over, by the other libraries' rules",
    "--microbatches=N": "parts of a batch that are routed one after another",
    "--target=X": "share of drops for which the smallest capacity is computed",
    "--measured=FILE": "record of the same model and data at another capacity: RECORD's "
    "predictions are compared with it, by layer, and nothing else is computed",
    "--model_dir=DIR": (
        shared.model_folder,
        "run folder of the model, for FLOPs and bytes; default: the one that holds RECORD",
    ),
}
FACTORS = [1.0, 1.25, 1.5, 2.0]
WIDTH = 4096


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "drops", run_drops, "predict drops at other capacities and groups", DROPS
    )
    parser.add_argument("record", metavar="RECORD", help="Parquet file written by --record")
    shared.add_flags(parser, FLAGS, rule="switchx", ranks=1, microbatches=1, target=0.01)
    shared.add_json(parser)


def run_drops(arguments: argparse.Namespace) -> int:
    from switchx.analysis.drops import prediction_errors
    from switchx.results import Check, Report
    from switchx.routing_record import open_record

    record = open_record(arguments.record)
    if arguments.measured is not None:
        return _compare(record, open_record(arguments.measured), arguments.json)
    model = _model(arguments, record)
    factors = arguments.factors or _own_factors(record.info.switch)
    found = _computed(arguments, record)
    errors = prediction_errors(record, record).values()
    check = Check("choices_unlike_recorded", sum(each.differing for each in errors), "==0")
    if arguments.json:
        rows = [
            row
            for drops in found
            for factor in (*factors, drops.smallest_factor(arguments.target))
            for row in _rows(drops, factor, model)
        ]
        Report("drops", rows, [check]).print(as_json=True)
        return 0 if check.holds else 1
    total = sum(each.choices for each in errors)
    info = record.info
    recorded = sum(each.measured for each in errors) / max(total, 1)
    print(
        f"{record.path}: {record.num_places:,} places, {len(info.all_layers)} Switch layers of "
        f"{info.switch.num_experts} experts, recorded by {info.source} at step {info.step}; "
        f"{recorded:.2%} of {total:,} choices were dropped then"
    )
    _print(record, found, factors, arguments.target, model)
    if not check.holds:
        print(
            f"{check.value:,} recorded drops do not follow from the record: it was changed, "
            "or another version wrote it; record again"
        )
    return 0 if check.holds else 1


def _compare(record, measured, as_json: bool) -> int:
    """Compares RECORD's predictions with `--measured`; returns the exit status."""
    from switchx.analysis.drops import prediction_errors
    from switchx.results import Check, Report

    rows = [
        {
            "layer": name,
            "choices": error.choices,
            "predicted_share": error.predicted_share,
            "measured_share": error.measured_share,
            "differing": error.differing,
            "jaccard": error.jaccard,
        }
        for name, error in prediction_errors(record, measured).items()
    ]
    # A decoder that reads an encoder with Switch layers is not predicted exactly.
    check = Check("first_layer_differing_choices", rows[0]["differing"], "==0")
    Report("drops", rows, [check]).print(as_json)
    return 0 if check.holds else 1


def _own_factors(switch) -> list[float]:
    own = () if switch.router.overflow == "dropless" else (switch.eval_capacity_factor,)
    return sorted({*FACTORS, switch.capacity_factor, *own})


def _computed(arguments: argparse.Namespace, record) -> list:
    """`Drops` of all requested settings, first that of the recorded or first-given groups."""
    from switchx.analysis.drops import Drops
    from switchx.analysis.slots import setting_of

    names = ("priority", "rule", "ranks", "microbatches")
    common = {name: getattr(arguments, name) for name in names}
    varied = itertools.product(
        arguments.num_selected or [None],
        arguments.rounds or [None],
        arguments.group_sizes or _group_sizes(record, arguments.rule),
    )
    return [
        Drops(
            record,
            setting_of(
                record.info, group_size=size, num_selected=selected, rounds=rounds, **common
            ),
        )
        for selected, rounds, size in varied
    ]


def _group_sizes(record, rule: str) -> list[int | None]:
    """The recorded size, and 4 and 16 times it as far as recorded batches have such groups."""
    if rule == "megatron":
        return [None]
    firsts = {}
    for batch in record.batches():
        firsts.setdefault(batch.stack, batch)
        if len(firsts) == len(record.info.layers):
            break
    first, *_ = firsts.values()
    (_, T), whole = first.group_shape, first.token_BL.size
    # Per stack: a batch recorded in part has no group of more places than were recorded.
    parts = [x.token_BL.size for x in firsts.values() if len(x.token_BL) < x.batch_size]
    most = min([whole, *parts])
    larger = [size for size in (4 * T, 16 * T) if size <= most]
    return [None, *(larger or [most] * (most > T))]


def _model(arguments: argparse.Namespace, record):
    """The `ModelConfig` of the run that the record is of; None if no folder has it.

    Raises:
        ValueError: `--model_dir` has other Switch layers.
    """
    from switchx.checkpoint.run_folder import RunFolder, read_sparse_model_config

    folders = [arguments.model_dir]
    if arguments.model_dir is None:
        nearest = list(record.path.absolute().parents)[:2]
        folders = [each for each in nearest if (each / "config.json").is_file()]
    if not folders:
        return None
    model = read_sparse_model_config(RunFolder(folders[0]))
    try:
        record.require_model(model.sparse_layer_names, model.switch.num_experts)
    except ValueError:
        if arguments.model_dir is not None:
            raise
        return None
    return model


def _rows(drops, factor: float, model) -> list[dict[str, Any]]:
    """JSON rows for all layers together and for each layer; shares are of choices."""
    router, capacities = drops.setting.switch.router, drops.capacities(factor)
    slots = drops.slots_per_token(factor)
    setting = {
        "rule": drops.setting.rule,
        "group_sizes": list(capacities),
        "num_selected": router.num_selected,
        "priority": router.priority,
        "rounds": router.max_rounds if drops.setting.is_rerouting else 1,
        "factor": factor,
        "capacities": list(capacities.values()),
        "slots_per_token": slots,
        **(_cost(model, slots) if model else {}),
    }
    whole = {"dropped_share": drops.share(factor)}
    whole["balanced_random_share"] = drops.balanced_share(factor)
    shares = zip(drops.layers, drops.share_N(factor).tolist(), strict=True)
    return [
        {"layer": "all"} | setting | whole,
        *({"layer": name} | setting | {"dropped_share": share} for name, share in shares),
    ]


def _cost(model, slots_per_token: float) -> dict[str, float]:
    """The cost of one Switch layer's slots for each token, by the planner's formulas.

    FLOPs of the experts' forward products (`models/flops.py`), and bytes of the slots' inputs,
    which an exchange sends between devices, and as many back (`planner/sparse_comm.py`).
    """
    import jax.numpy as jnp

    from switchx.models.flops import experts_per_token, flops_per_sequence

    flops = flops_per_sequence(model, 1 if model.is_encoder_decoder else 0, 1).experts
    expert_flops = flops / experts_per_token(model.switch) / model.num_sparse_layers
    row_bytes = model.d_model * jnp.dtype(model.precision.compute).itemsize
    return {
        "expert_flops_per_token": expert_flops * slots_per_token,
        "slot_bytes_per_token": row_bytes * slots_per_token,
    }


def _print(record, found, factors, target: float, model) -> None:
    """The recorded groups by layer and factor, all settings by factor, and a sentence."""
    from rich.console import Console

    from switchx.analysis.drops import sentence

    # Wider than any table: lines wider than the terminal wrap there, and nothing is cut.
    console = Console(markup=False, highlight=False, soft_wrap=True, width=WIDTH)
    first = found[0]
    if not record.info.is_whole:
        console.print("The record was full: later batches were left out of it")
    if left_out := max(drops.left_out for drops in found):
        console.print(
            f"{left_out:,} of the places are in no whole group of the largest size and are "
            "left out there: training records the first rows of batches; `switchx eval "
            "--record` records whole ones"
        )
    shown = sorted({*factors, first.smallest_factor(target)})
    console.print(_by_layer(first, shown, model))
    if len(found) > 1:
        console.print(_by_setting(found, shown, target))
    factor = record.info.switch.capacity_factor
    console.print(sentence(first, factor, found[1:], target))


def _by_layer(drops, factors, model):
    table = _table(f"Dropped choices by capacity factor, {drops.name}", "layer", factors)
    shares = [drops.share_N(factor) for factor in factors]
    for n, layer in enumerate(drops.layers):
        table.add_row(layer, *(f"{share_N[n]:.2%}" for share_N in shares))
    table.add_row("all", *(f"{drops.share(factor):.2%}" for factor in factors))
    least = [drops.balanced_share(factor) for factor in factors]
    if None not in least:
        table.add_row("balanced random router", *(f"{share:.2%}" for share in least))
    capacities = [drops.capacities(factor).values() for factor in factors]
    table.add_row("slots of an expert", *(", ".join(map(str, each)) for each in capacities))
    slots = [drops.slots_per_token(factor) for factor in factors]
    table.add_row("slots a token", *(f"{each:.3g}" for each in slots))
    if model is not None:
        costs = [_cost(model, each) for each in slots]
        flops = (f"{each['expert_flops_per_token'] / 1e6:.3g}" for each in costs)
        table.add_row("expert MFLOPs a token", *flops)
        sent = (f"{each['slot_bytes_per_token']:,.0f}" for each in costs)
        table.add_row("slot bytes a token", *sent)
    return table


def _by_setting(found, factors, target: float):
    table = _table("Dropped choices of all layers by setting", "setting", factors)
    table.add_column(f"factor for {target:g}", justify="right", no_wrap=True)
    for drops in found:
        shares = [f"{drops.share(factor):.2%}" for factor in factors]
        table.add_row(drops.name, *shares, f"{drops.smallest_factor(target):g}")
    return table


def _table(title: str, first: str, factors):
    from rich.table import Table

    table = Table(box=None, title=title, title_justify="left", pad_edge=False)
    table.add_column(first, no_wrap=True)
    for factor in factors:
        table.add_column(f"{factor:g}", justify="right", no_wrap=True)
    return table
