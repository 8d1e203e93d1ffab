# SPDX-License-Identifier: Apache-2.0
"""`switchx score`: how likely a model finds each target, given its input."""

import argparse
import functools
import json

from switchx.cli import arguments as shared
from switchx.cli.text import lines as text

DESCRIPTION = """\
Scores each line `input<TAB>target` of a file or of standard input: the natural logarithm of
the target's probability given the input, and the target's tokens, its end included.

  switchx score --model_dir=DIR --input=pairs.tsv
  switchx score --model_dir=DIR --input=pairs.tsv --output=scores.tsv

It writes `log likelihood<TAB>tokens` a line, in the order of the input, and at the end what
all of them together have, on standard error. A decoder-only model also scores a line without
a tab, a text from its beginning. As with `switchx generate`, texts become what training made
of them, --output goes on where a killed command left it, and wrong lines are errors before
anything is scored.
"""


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "score", run, "log-likelihoods of texts given others", DESCRIPTION
    )
    text.add_arguments(parser, "file of lines `input<TAB>target`")
    shared.add_json(parser, "write a JSON object a line: log_likelihood, num_tokens")


def run(arguments: argparse.Namespace) -> int:
    return text.run(arguments, _score)


def _score(arguments: argparse.Namespace, lines: list[str], model, reporter) -> None:
    scorer = model.scorer(
        batch_size=arguments.batch_size, dropless=arguments.capacity == "dropless"
    )
    read_input, read_target = (
        functools.partial(encode, model.vocabulary)
        for encode in (model.text_format.inputs, model.text_format.targets)
    )

    def pair(line):
        *inputs, target = line.split("\t")
        if len(inputs) != 1 and (inputs or model.config.is_encoder_decoder):
            raise ValueError(f"has {len(inputs)} tabs, expected input<TAB>target")
        tokens = []
        for each in inputs:
            tokens = text.encoded(arguments, read_input, each, "has an input that ")
        both = (tokens, text.encoded(arguments, read_target, target, "has a target that "))
        if fault := scorer.fault(both):
            raise ValueError(fault)
        return both

    def compute(shard, first):
        for number, score in scorer(list(map(pair, shard)), first):
            yield number, _line(score, arguments.json)

    text.check(arguments.input, lines, pair)
    settings = {"command": "score", "model": model.fingerprint, "json": arguments.json}
    written = text.write(arguments, lines, settings, compute, reporter)
    log_likelihoods, counts = zip(*(_score_of(line) for line in written), strict=True)
    log_likelihood, num_tokens = sum(log_likelihoods), sum(counts)
    reporter.note(
        f"{len(counts):,} lines, {num_tokens:,} target tokens: log-likelihood "
        f"{log_likelihood:,.4f}, {log_likelihood / num_tokens:.4f} a token"
    )


def _line(score, is_json: bool) -> str:
    if is_json:
        values = {"log_likelihood": score.log_likelihood, "num_tokens": score.num_tokens}
        return json.dumps(values)
    return f"{score.log_likelihood:.6f}\t{score.num_tokens}"


def _score_of(line: str) -> tuple[float, int]:
    """What `_line` wrote."""
    if line.startswith("{"):
        values = json.loads(line)
        return values["log_likelihood"], values["num_tokens"]
    log_likelihood, num_tokens = line.split("\t")
    return float(log_likelihood), int(num_tokens)
