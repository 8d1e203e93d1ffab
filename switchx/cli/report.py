# SPDX-License-Identifier: Apache-2.0
"""`switchx report`: how a run's tokens were routed, as one page to look at."""

import argparse
import pathlib

from switchx.cli import arguments as shared

DESCRIPTION = """\
Writes one HTML page, which needs no other file and no network, about the routing of a run:
load, drops, entropy and gate of every Switch layer over training, dead experts, where tokens
go from layer to layer, which tokens an expert gets, how early the routing became the final
one.

  switchx report --model_dir=DIR                   writes DIR/report.html
  switchx report --model_dir=DIR --output=FILE

It reads what training recorded, DIR/metrics.jsonl and DIR/routing/, and may be run while
training goes on. Nothing is computed with the model.
"""


def add_command(commands) -> None:
    parser = shared.add_command(commands, "report", run, "plot a run's routing", DESCRIPTION)
    shared.add_model_dir(parser, "run folder of `switchx train`")
    shared.add_output(parser, "page to write; default: report.html of the run folder")


def run(arguments: argparse.Namespace) -> int:
    from switchx.analysis.report import all_sections, page, read_run
    from switchx.checkpoint.run_folder import RunFolder, read_model_config
    from switchx.data.data_dir import write_atomically
    from switchx.data.tokenizers import token_classes
    from switchx.data.vocabularies import load_vocabulary

    folder = RunFolder(arguments.model_dir)
    model = read_model_config(folder)
    if model.switch is None:
        raise ValueError(
            f"{folder.root} is the run of a dense model, which routes nothing; give the "
            "model_dir of a run with Switch layers"
        )
    vocabulary = load_vocabulary(folder.root)
    classes = token_classes(vocabulary)
    routing = read_run(
        folder.root, classes.names, classes.class_V, lambda token: vocabulary.piece(token).text
    )
    sizes = [f"{len(stack.token_T):,} {_stack(stack)}" for stack in routing.final.stacks]
    facts = {
        "run folder": str(folder.root),
        "experts": f"{model.switch.num_experts} in each of {model.num_sparse_layers} layers",
        "steps": f"{routing.history.steps[-1]}",
        "sample": f"{' and '.join(sizes)} tokens of the validation data, "
        f"{len(routing.snapshots)} evaluations, the last one at step {routing.final.step}",
    }
    output = folder.root / "report.html"
    if arguments.output:
        output = pathlib.Path(arguments.output).expanduser()
    title = f"Routing of {folder.root.name}"
    write_atomically(output, page(title, facts, all_sections(routing)).encode())
    print(output)
    return 0


def _stack(stack) -> str:
    return stack.layers[0].split()[0]
