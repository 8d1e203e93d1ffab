# SPDX-License-Identifier: Apache-2.0
"""`switchx reshape`: the same model with fewer experts, with experts, or without any."""

import argparse
from typing import Any

from switchx.cli import arguments as shared

DESCRIPTION = """\
Writes a model with another number of experts, as a folder to load, train on and export:

  switchx reshape --model_dir=runs/tiny --output=fewer --experts=4      of 8
  switchx reshape --model_dir=runs/tiny --output=dense --experts=0      one FFN a layer
  switchx reshape --model_dir=runs/dense --output=sparse --experts=8    copies of its FFNs

With fewer experts, like ones are merged (--reduce=merge) or those of the lowest --score are
dropped (--reduce=drop), by what the layers read of the run's validation text. With none, each
Switch layer becomes the mean of its experts (merge) or the most used one (drop). A dense model
gets experts in the last of every --every blocks, all equal to its FFN, and a new router.

It prints parameters, bytes and validation loss (nats per token, nothing dropped) before and
after. To train on:

  switchx train --gin_file=configs/runs/finetune.gin --gin.INIT_FROM=fewer --model_dir=DIR
"""


# Names of `models/reshape.SCORES`: help does not wait for it.
SCORES = ("frequency", "ean", "reap", "mean_norm", "aimer", "brute_force")


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "reshape", run, "a model with fewer, new or no experts", DESCRIPTION
    )
    shared.add_model_dir(parser, "run folder of `switchx train`; nothing is written there")
    shared.add_output(parser, "folder to write; nothing may be there", "DIR", required=True)
    shared.add_gin_arguments(parser, default="those of the run, for its validation text")
    shared.add_step(parser, "checkpoint to reshape")
    parser.add_argument(
        "--experts",
        type=int,
        metavar="N",
        required=True,
        help="of each Switch layer: a divisor of those there are, 0 for a dense model, or of "
        "a dense model at least 2",
    )
    parser.add_argument(
        "--reduce",
        choices=("merge", "drop"),
        help="of a sparse model: merge experts that compute alike, or drop the least used ones "
        "(default: merge)",
    )
    parser.add_argument(
        "--score",
        choices=SCORES,
        help="experts of high scores stay: frequency, tokens that chose one; ean, sum of its "
        "outputs' norms; mean_norm, their mean; reap, mean of gate times norm "
        "(arXiv:2510.13999); aimer, of weights alone (arXiv:2603.18492); brute_force, the loss "
        "without it, measured for each (default: frequency)",
    )
    parser.add_argument(
        "--num_selected",
        type=shared.positive,
        metavar="K",
        help="of a dense model: experts that a token chooses; above 1 the model stays the "
        "same (default: 2)",
    )
    parser.add_argument(
        "--every",
        type=shared.positive,
        metavar="N",
        help="of a dense model: the last of every N blocks gets experts (default: 2)",
    )
    shared.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from switchx.manifest import require_free
    from switchx.progress import TerminalReporter
    from switchx.results import Report

    require_free(arguments.output)
    with TerminalReporter() as reporter:
        rows, how = _reshape(arguments, reporter)
    Report("reshape", rows, []).print(arguments.json)
    if not arguments.json:
        print(f"{arguments.output}: {how}; open it with switchx.load")
    return 0


def _reshape(arguments: argparse.Namespace, reporter) -> tuple[list[dict[str, Any]], str]:
    """Writes the folder; returns the rows of the report, and what was done in words."""
    import dataclasses

    from switchx import api
    from switchx.checkpoint.run_folder import RunFolder, read_model_config
    from switchx.deploy.measure import ValidationText, sample_layers, with_harm
    from switchx.gin_config import building
    from switchx.inference.artifact import is_artifact
    from switchx.models.reshape import agreement, drop_experts, merge_experts, to_dense
    from switchx.models.upcycle import upcycle, upcycled_config
    from switchx.training.resume import check_same_model

    if is_artifact(arguments.model_dir):
        raise ValueError(
            f"{arguments.model_dir} is made for inference already; give the run folder it was "
            "made from"
        )
    folder, experts = RunFolder(arguments.model_dir), arguments.experts
    config, how = read_model_config(folder), arguments.reduce or "merge"
    _check(arguments, config)
    job = check_same_model(folder, building.parse_job(*shared.gin_of(arguments, folder)))
    reporter.note(f"reading {folder.root} and its validation text")
    model = api.load(folder.path, arguments.step)
    text = ValidationText.of(job, num_prompts=0, input_length=1)
    rows = [_row("before", model, text)]
    if config.switch is None:
        k, every = arguments.num_selected or 2, arguments.every or 2
        sparse = upcycled_config(config, experts, num_selected=k, every=every)
        params = upcycle(sparse, config, model.params)
        said = f"{experts} copies of the FFN in {len(sparse.sparse_layer_names)} layers"
        config = sparse
    elif experts == 0:
        samples = sample_layers(model, text)
        config, params = to_dense(config, model.params, samples, is_merged=how == "merge")
        said = "the mean of the experts" if how == "merge" else "the most used expert"
        said = f"each Switch layer is {said}"
    else:
        samples = sample_layers(model, text)
        if how == "merge":
            config, params = merge_experts(config, model.params, samples, experts)
            said = f"{experts} experts a Switch layer, the others merged into them"
        else:
            score = arguments.score or "frequency"
            if score == "brute_force":
                reporter.note("measuring the loss without each expert")
                samples = with_harm(model, text, samples)
                for line in agreement(model.config, model.params, samples):
                    reporter.note(line)
            config, params = drop_experts(config, model.params, samples, experts, score)
            said = f"{experts} experts a Switch layer, the others dropped by {score}"
    reshaped = dataclasses.replace(model, config=config, params=params)
    rows.append(_row("after", reshaped, text))
    _write(arguments, model, config, params)
    return rows, said


def _check(arguments: argparse.Namespace, config) -> None:
    """Refuses what cannot be made, before a parameter is read.

    Raises:
        ValueError: see `reduced_config`, `dense_config`, `upcycled_config`; or options have no
            effect.
    """
    from switchx.fields import require
    from switchx.models.config import require_one_task
    from switchx.models.reshape import dense_config, reduced_config
    from switchx.models.upcycle import upcycled_config

    experts = arguments.experts
    require_one_task(config)
    if config.switch is None:
        require(
            arguments.reduce is None,
            f"--reduce={arguments.reduce} of a dense model, which has no experts to reduce; "
            "leave it out, and its FFNs are copied",
        )
        require(
            arguments.score is None,
            f"--score={arguments.score} of a dense model, which has no experts to drop; leave "
            "it out",
        )
        k, every = arguments.num_selected or 2, arguments.every or 2
        upcycled_config(config, experts, num_selected=k, every=every)
        return
    for name in ("num_selected", "every"):
        value = getattr(arguments, name)
        require(
            value is None,
            f"--{name}={value} of a sparse model, which keeps its own; leave it out",
        )
    require(
        arguments.score is None or (arguments.reduce == "drop" and experts > 0),
        f"--score={arguments.score} says which experts are dropped; give --reduce=drop and at "
        "least one expert with it",
    )
    E = config.switch.num_experts
    fewer = [str(n) for n in range(1, E) if E % n == 0]
    require(
        experts == 0 or str(experts) in fewer,
        f"--experts={experts} of a model with {E}: experts are merged or dropped to a divisor "
        f"of their number, so that they divide over devices as before, and none are added; use "
        f"{', '.join(fewer + ['0 for a dense model'])}",
    )
    if experts == 0:
        dense_config(config)
    else:
        reduced_config(config, experts, is_merged=arguments.reduce != "drop")


def _row(name: str, model, text) -> dict[str, Any]:
    from switchx.deploy.measure import validation_loss
    from switchx.inference.quantize import model_bytes
    from switchx.tree import num_elements

    switch = model.config.switch
    return {
        "model": name,
        "experts": 0 if switch is None else switch.num_experts,
        "parameters": num_elements(model.params),
        "bytes": model_bytes(model.params),
        "loss_nats": validation_loss(model, text),
    }


def _write(arguments: argparse.Namespace, model, config, params) -> None:
    from switchx.checkpoint.run_folder import RunFolder, read_config, write_converted
    from switchx.data.tokenizers import TokenIdVocabulary
    from switchx.gin_config.writing import model_gin
    from switchx.manifest import new_folder

    source = read_config(RunFolder(arguments.model_dir)).get("source")
    origin = f"switchx reshape: {arguments.model_dir}, checkpoint {model.step}"
    vocabulary = model.vocabulary or TokenIdVocabulary(config.vocab_size)
    with new_folder(arguments.output) as folder:
        run = RunFolder(folder)
        write_converted(run, config, params, vocabulary, origin, source, model.decoding)
        run.model_gin.write_text(model_gin(config), encoding="utf-8")
