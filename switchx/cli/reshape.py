# SPDX-License-Identifier: Apache-2.0
"""`switchx reshape`: the same model with fewer experts, more experts, none, or with its
adapters merged."""

import argparse
from typing import Any

from switchx.cli import arguments as shared

DESCRIPTION = """\
Writes a model with a different number of experts, as a folder to load, train on and export:

  switchx reshape --model_dir=runs/tiny --output=fewer --experts=4      of 8
  switchx reshape --model_dir=runs/tiny --output=more --experts=16      two copies of each
  switchx reshape --model_dir=runs/tiny --output=dense --experts=0      one FFN a layer
  switchx reshape --model_dir=runs/dense --output=sparse --experts=8    copies of its FFNs
  switchx reshape --model_dir=runs/lora --output=whole --merge_adapter  base and adapters

With fewer experts, similar ones are merged (--reduce=merge) or those of the lowest --score are
dropped (--reduce=drop) or become vectors (--novice), judged by what the layers read of the
run's validation text. With none, each Switch layer becomes the mean of its experts (merge) or
its most used one (drop). A dense model gets experts in the last of every --every blocks, made
from its FFN as --upcycle says, and a new router; a sparse one gets copies of its experts.

It prints parameters, bytes and validation loss (nats per token, nothing dropped) before and
after. The optimizer's state is converted, too, if the run has one. To train on:

  switchx train --gin_file=configs/runs/finetune.gin --gin.INIT_FROM=fewer --model_dir=DIR
"""


# Names of `models/reshape.SCORES` and of `models/upcycle`'s ways: help does not wait for them.
SCORES = ("frequency", "ean", "reap", "mean_norm", "aimer", "brute_force")
WAYS = ("copies", "virtual_groups", "drop", "counts_merged", "exclusive", "more_choices")


CHANGES = {
    "--merge_adapter": "from a run of adapters (configs/runs/finetune_lora.gin), make its base "
    "with the adapters merged into the weights",
    "--experts=N": (
        int,
        "experts of each Switch layer: a divisor or a multiple of the present number, 0 to "
        "make a dense model, at least 2 if the model is dense",
    ),
}
FLAGS = {
    "--reduce=merge|drop": "sparse model: merge experts that compute alike, or drop those "
    "of the lowest --score (default: merge)",
    f"--score={'|'.join(SCORES)}": "score by which experts stay: frequency, tokens that chose "
    "one; ean, sum of its outputs' norms; mean_norm, their mean; reap, mean of gate times norm "
    "(arXiv:2510.13999); aimer, from weights alone (arXiv:2603.18492); brute_force, the loss "
    "without it, measured for each (default: reap)",
    "--novice": "with --reduce=drop: the mean outputs of dropped experts stay, as vectors "
    "(arXiv:2507.00390)",
    f"--upcycle={'|'.join(WAYS)}": "dense model: copies of its FFN (default), of shards "
    "of it (virtual_groups, arXiv:2410.07524), or with a --share of hidden units drawn anew "
    "(drop, arXiv:2502.19261). Sparse model: copies that count as one (counts_merged, the "
    "default if a token chooses one expert), exclude each other (exclusive, the default "
    "otherwise), are all chosen (more_choices), or plain copies, which is another model",
    "--share=R": (float, "--upcycle=drop: share of an expert's hidden units (default: 0.5)"),
    "--num_selected=K": "dense model: experts that a token chooses; above 1 the model stays "
    "the same (default: 2)",
    "--every=N": "dense model: the last of every N blocks gets experts (default: 2)",
}


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "reshape", run, "a model with fewer, new or no experts", DESCRIPTION
    )
    shared.add_model_dir(parser, "run folder of `switchx train`; nothing is written there")
    shared.add_output(parser, "folder to write; must be new or empty", "DIR", required=True)
    shared.add_gin_arguments(parser, default="the run's own, for its validation text")
    shared.add_step(parser, "checkpoint to reshape")
    change = parser.add_mutually_exclusive_group(required=True)
    shared.add_flags(change, CHANGES)
    shared.add_flags(parser, FLAGS)
    shared.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from switchx.progress import TerminalReporter
    from switchx.results import Report
    from switchx.whole_folders import require_free

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
    from switchx.checkpoint.adapter_run import AdapterRecord
    from switchx.checkpoint.items import items_of
    from switchx.checkpoint.run_folder import RunFolder, read_model_config
    from switchx.deploy.measure import ValidationText
    from switchx.fields import require
    from switchx.gin_config import building
    from switchx.inference.artifact import is_artifact
    from switchx.training.reshaped_state import reshaped_state
    from switchx.training.resume import check_same_model, read_as_prompts

    if is_artifact(arguments.model_dir):
        raise ValueError(
            f"{arguments.model_dir} is made for inference already; give the run folder it was "
            "made from"
        )
    folder = RunFolder(arguments.model_dir)
    config = read_model_config(folder)
    record = AdapterRecord.read(folder)
    require(
        (record is None) != arguments.merge_adapter,
        f"{arguments.model_dir} has adapters; merge them first, with --merge_adapter"
        if record
        else f"{arguments.model_dir} has no adapters to merge; leave out --merge_adapter",
    )
    if record is not None:
        for name in ("reduce", "score", "novice", "upcycle", "share", "num_selected", "every"):
            value = getattr(arguments, name)
            message = f"--{name}={value} with --merge_adapter has no effect; leave it out"
            require(value is None or value is False, message)
        reporter.note(f"reading {folder.root} and its base {record.spec.base}")
        model = api.load(folder.path, arguments.step)
        _write(arguments, model, model, None)
        description = f"adapters of rank {record.spec.rank} merged into {record.spec.base}"
        return [_row("merged", model)], description
    made = _check(arguments, config)
    job = check_same_model(folder, building.parse_job(*shared.gin_of(arguments, folder)))
    job = read_as_prompts(folder, job, reporter.note)
    reporter.note(f"reading {folder.root} and its validation text")
    model = api.load(folder.path, arguments.step)
    text = ValidationText.of(job, num_prompts=0, input_length=1)
    rows = [_row("before", model, text)]
    found, description = _changed(arguments, made, model, text, reporter)
    reshaped = dataclasses.replace(model, config=found.config, params=found.params)
    rows.append(_row("after", reshaped, text))
    path = folder.checkpoints / str(model.step)
    state, note = reshaped_state(path, job.transformation, config, found)
    if "average" in items_of(path):
        note += "; the moving average of the parameters stays behind"
    _write(arguments, model, found, state)
    change = rows[1]["loss_nats"] - rows[0]["loss_nats"]
    return rows, f"{description}; loss {change:+.5f} nats per token; {note}"


def _changed(arguments: argparse.Namespace, made, model, text, reporter):
    """The reshaped model, and what was done in words."""
    from switchx.deploy.measure import sample_layers, with_harm
    from switchx.models import reshape, upcycle

    experts, is_merged = arguments.experts, arguments.reduce != "drop"
    way, of_model = arguments.upcycle, (model.config, model.params)
    if model.config.switch is None:
        share = 0.5 if arguments.share is None else arguments.share
        found = upcycle.upcycle(made, *of_model, way, share)
        layers = len(found.config.sparse_layer_names)
        return found, f"{experts} experts in {layers} layers, of the FFN ({way})"
    if experts > model.config.switch.num_experts:
        found = upcycle.multiply_experts(*of_model, experts, way)
        return found, f"{experts} experts a Switch layer, each copied ({way})"
    samples = sample_layers(model, text)
    if experts == 0:
        description = "the mean of the experts" if is_merged else "the most used expert"
        found = reshape.to_dense(*of_model, samples, is_merged=is_merged)
        return found, f"each Switch layer is {description}"
    if is_merged:
        description = f"{experts} experts a Switch layer, the others merged into them"
        return reshape.merge_experts(*of_model, samples, experts), description
    score = arguments.score or reshape.DEFAULT_SCORE
    if score == "brute_force":
        reporter.note("measuring the loss without each expert")
        samples = with_harm(model, text, samples)
        for line in reshape.agreement(*of_model, samples):
            reporter.note(line)
    change = reshape.novice_experts if arguments.novice else reshape.drop_experts
    what = "vectors" if arguments.novice else "dropped"
    found = change(*of_model, samples, experts, score)
    return found, f"{experts} experts a Switch layer, the others {what} by {score}"


def _check(arguments: argparse.Namespace, config):
    """Refuses what cannot be made before a parameter is read, and sets how experts are added.

    Returns:
        The configuration that is made; for novices, that with fewer experts.

    Raises:
        ValueError: see `reduced_config`, `dense_config`, `upcycled_config`,
            `multiplied_config`; or an option has no effect.
    """
    from switchx.fields import require
    from switchx.models.config import require_one_task
    from switchx.models.reshape import dense_config, reduced_config
    from switchx.models.upcycle import exact_way, multiplied_config, upcycled_config

    experts = arguments.experts
    is_dense = config.switch is None
    share = arguments.share
    require_one_task(config)
    E = 0 if is_dense else config.switch.num_experts
    reducing = ("reduce", "score", "novice")
    is_dropping = arguments.reduce == "drop"
    for has_no_effect, names, why in (
        (is_dense, reducing, "of a dense model, which has no experts to reduce"),
        (not is_dense, ("num_selected", "every"), "of a sparse model, which keeps its own"),
        (experts > E, reducing, f"of {E} experts, which become more"),
        (not (is_dropping and experts), reducing[1:], "without --reduce=drop of some experts"),
        (0 <= experts <= E and not is_dense, ("upcycle",), "where none are added"),
        (arguments.upcycle != "drop", ("share",), "without --upcycle=drop"),
    ):
        for name in names:
            value = getattr(arguments, name)
            has_none = value is None or value is False or not has_no_effect
            require(has_none, f"--{name}={value} {why}, has no effect; leave it out")
    require(share is None or 0 <= share <= 1, f"--share={share} is no part; use 0 to 1")
    if experts > E and arguments.upcycle is None:
        arguments.upcycle = "copies" if is_dense else exact_way(config)
    way = arguments.upcycle
    if is_dense:
        k, every = arguments.num_selected or 2, arguments.every or 2
        return upcycled_config(config, experts, num_selected=k, every=every, way=way)
    divisors = [n for n in range(1, E) if E % n == 0]
    require(
        experts in (0, *divisors)
        or (experts > E and experts % E == 0)
        or (arguments.novice and 0 < experts < E),  # all stay, so they divide as before
        f"--experts={experts} of a model with {E}: experts are merged or dropped to a divisor "
        "of their number, so that they divide over devices as before, or all get as many "
        f"copies; use {', '.join(map(str, divisors))}, {2 * E} or another multiple, or 0 for a "
        "dense model",
    )
    if experts == 0:
        return dense_config(config)
    if experts > E:
        return multiplied_config(config, experts, way)
    return reduced_config(config, experts, is_merged=arguments.reduce != "drop")


def _row(name: str, model, text=None) -> dict[str, Any]:
    from switchx.deploy.measure import validation_loss
    from switchx.inference.quantize import model_bytes
    from switchx.tree import num_elements

    switch = model.config.switch
    return {
        "model": name,
        "experts": 0 if switch is None else switch.num_experts,
        "parameters": num_elements(model.params),
        "bytes": model_bytes(model.params),
        **({} if text is None else {"loss_nats": validation_loss(model, text)}),
    }


def _write(arguments: argparse.Namespace, model, found, train_state) -> None:
    from switchx.checkpoint.run_folder import (
        RunFolder,
        read_config,
        read_rescaled,
        write_converted,
    )
    from switchx.data.tokenizers import TokenIdVocabulary
    from switchx.gin_config.writing import model_gin
    from switchx.whole_folders import new_folder

    model_dir = RunFolder(arguments.model_dir)
    source = read_config(model_dir).get("source")
    rescaled = read_rescaled(model_dir)
    origin = f"switchx reshape: {arguments.model_dir}, checkpoint {model.step}"
    vocabulary = model.vocabulary or TokenIdVocabulary(found.config.vocab_size)
    with new_folder(arguments.output) as folder:
        run = RunFolder(folder)
        written = found.config, found.params, vocabulary, origin, source, model.decoding
        write_converted(run, *written, train_state, rescaled=rescaled)
        run.model_gin.write_text(model_gin(found.config), encoding="utf-8")
