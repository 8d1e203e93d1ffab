# SPDX-License-Identifier: Apache-2.0
"""`switchx drift`: where two models, or one run in two ways, route tokens differently."""

import argparse
import json
import pathlib
import tempfile

from switchx.cli import arguments as shared
from switchx.cli import generate
from switchx.fields import require

DESCRIPTION = """\
Compares two routings of the same tokens, layer by layer: tokens whose sets of experts differ,
experts in common, the margins at which choices flip, and the divergence of the routers.

  switchx drift A.parquet B.parquet                   two records of the same inputs
  switchx drift MODEL_A MODEL_B --input=pairs.tsv     two models, scored and recorded here
  switchx drift DIR DIR --steps=200,400 --input=pairs.tsv

Records are written by `switchx eval --record=FILE`, for two checkpoints (--step), precisions
or dispatchers (--gin.), or by `score` and `generate`. Models are run folders or quantized ones;
lines are `input<TAB>target` as for `switchx score`, and the losses of both are printed, too.
"""
QUANTILES = (0.1, 0.5, 0.9)
WIDTH = 100  # of the table, unless the terminal is wider

FLAGS = {
    "--input=FILE": "lines `input<TAB>target` that both models score",
    "--steps=N,N": "with --input: checkpoints of A and of B; default: the newest",
    "--batch_size=N": "lines scored at once",
}


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "drift", run, "compare the routing of two models", DESCRIPTION
    )
    parser.add_argument("a", metavar="A", help="a record, or with --input a model's folder")
    parser.add_argument("b", metavar="B", help="the record or folder to compare with A")
    shared.add_flags(parser, FLAGS, batch_size=32)
    shared.add_trust(parser)
    shared.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from switchx.analysis.drift import drift, loss_drift
    from switchx.results import Report
    from switchx.routing_record import open_record

    losses, steps = None, arguments.steps
    require(
        steps is None or (len(steps) == 2 and arguments.input is not None),
        f"--steps={steps}; give two, of A and of B, with --input",
    )
    if arguments.input is None:
        found = drift(open_record(arguments.a), open_record(arguments.b))
    else:
        with tempfile.TemporaryDirectory() as folder:
            records, logprobs = _scored(arguments, pathlib.Path(folder))
            found = drift(*map(open_record, records))
            losses = loss_drift(*logprobs)
    rows = [{"layer": name} | _row(each) for name, each in found.items()]
    if losses is not None:
        rows.append(losses)
    if arguments.json:
        Report("drift", rows, []).print(as_json=True)
    else:
        _print(found, losses)
    return 0


def _row(each) -> dict:
    """Units: shares of tokens, margins and changes of probabilities, nats."""
    row = {
        "tokens": each.tokens,
        "differing_share": each.differing_share,
        "overlap": each.overlap,
        "kl_at_least_nats": None if each.kl is None else each.kl / max(each.tokens, 1),
        "largest_change": each.largest_change,
        "largest_flipped_margin": each.largest_flipped_margin,
    }
    for quantile in QUANTILES:
        row[f"margin_q{quantile:g}"] = each.margin(quantile)
        row[f"flipped_margin_q{quantile:g}"] = each.margin(quantile, flipped=True)
    return row


def _scored(arguments: argparse.Namespace, folder: pathlib.Path):
    """The records of both models, and the log-probabilities of tokens, by `switchx score`."""
    import numpy as np

    parser = shared.CommandParser("switchx")
    generate.add_command(parser.add_subparsers())
    records, logprobs = [], []
    for i, model in enumerate((arguments.a, arguments.b)):
        name = "ab"[i]
        records.append(folder / f"{name}.parquet")
        scores = folder / f"{name}.jsonl"
        words = [f"--model_dir={model}", f"--input={arguments.input}", f"--output={scores}"]
        words += [f"--record={records[-1]}", f"--batch_size={arguments.batch_size}"]
        words += ["--json", "--logprobs=1", *["--trust_code"] * arguments.trust_code]
        words += [f"--step={arguments.steps[i]}"] if arguments.steps else []
        generate.run_score(parser.parse_args(["score", *words]))
        lines = scores.read_text(encoding="utf-8").splitlines()
        values = (value for line in lines for value in json.loads(line)["token_logprobs"])
        # A first token with nothing before it has no log-probability.
        logprobs.append(np.array([value for value in values if value is not None]))
    return records, logprobs


def _print(found, losses) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    names = ("layer", "other sets", "overlap", "KL >=", "margins 10%", "50%")
    for name in (*names, "of flips 50%", "90%", "largest"):
        table.add_column(name, justify="left" if name == "layer" else "right", no_wrap=True)

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.1e}"

    for layer, each in found.items():
        flipped = [each.margin(quantile, flipped=True) for quantile in QUANTILES[1:]]
        margins = [*map(each.margin, QUANTILES[:2]), *flipped]
        table.add_row(
            layer,
            f"{each.differing_share:.3%}",
            f"{each.overlap:.4f}",
            number(_row(each)["kl_at_least_nats"]),
            *map(number, margins),
            number(each.largest_flipped_margin if each.differing else None),
        )
    console = Console(
        markup=False, highlight=False, soft_wrap=True, width=max(WIDTH, Console().width)
    )
    console.print(table)
    tokens = sum(each.tokens for each in found.values())
    differing = sum(each.differing for each in found.values())
    console.print(
        f"{differing / max(tokens, 1):.3%} of {tokens:,} (token, layer) choose other experts. "
        "Margins, in A: the last choice's score over the next expert's"
    )
    if losses is not None:
        console.print(
            "Loss a token: {loss_a:.5f} and {loss_b:.5f} nats; mean |d| {mean_change:.3g}, k3 "
            "{k3:.3g}, {far_share:.3%} of tokens with |d| > ln 2, where d is the "
            "log-probability in A less that in B".format(**losses)
        )
