# SPDX-License-Identifier: Apache-2.0
"""`switchx generate` and `switchx score`: a model's answers to lines of text, and how likely it
finds given answers.

Both read and check all lines before they compute anything (`text/lines.py`).
"""

import argparse
import dataclasses
import functools
import json
import math
import re

from switchx.cli import arguments as shared
from switchx.cli.text import lines as text
from switchx.fields import json_text
from switchx.inference.config import DecodingConfig

GENERATE = """\
Writes what a model answers to each line of a file or of standard input, in their order:

  switchx generate --model_dir=DIR --input=questions.txt --output=answers.txt --beam_size=4
  echo "a red house" | switchx generate --model_dir=DIR

Lines are encoded as texts were in training: eos ends a line if the training tasks did so, and
<extra_id_0> is sentinel 0 if they had sentinels. A task's prefix, such as "translate English
to German: ", has to be part of the line. Line breaks in an output become spaces; --json keeps
them. With --num_return_sequences above 1, the outputs of an input go on one line, separated
by tabs, or with --json into a list, `outputs`. --logprobs needs --json, which writes them.

With --output, the same command goes on where a killed one left off, also after lines were
added to the input: FILE.progress.json says which inputs and settings the lines belong to.
All lines are read and checked before anything is generated: lines that are not UTF-8, are too
long or have no token are errors. An empty line has a token if eos ends texts or if the
vocabulary has a start token.
"""
SCORE = """\
Scores each line `input<TAB>target` of a file or of standard input: the natural logarithm of
the target's probability given the input, and the target's number of tokens, end included.

  switchx score --model_dir=DIR --input=pairs.tsv
  switchx score --model_dir=DIR --input=pairs.tsv --output=scores.tsv

It writes one line `log likelihood<TAB>tokens` per input, in the order of the input, and at the
end the totals, on standard error. A decoder-only model also scores a line without a tab, as a
text from its beginning. Targets follow the tokens of --forced_prefix, which are not scored. As
with `switchx generate`, texts are encoded as in training, --output goes on where a killed
command left it, and wrong lines are errors before anything is scored.
"""


def add_command(commands) -> None:
    generate = shared.add_command(
        commands, "generate", run_generate, "let a model answer each line of a text", GENERATE
    )
    text.add_arguments(generate, "text file, one input per line")
    shared.add_options(generate, DecodingConfig)
    shared.add_json(
        generate,
        "write one JSON object per line: output, tokens, score, is_finished; with --logprobs "
        "token_logprobs and top_logprobs",
    )
    score = shared.add_command(
        commands, "score", run_score, "log-likelihoods of targets given inputs", SCORE
    )
    text.add_arguments(score, "file of lines `input<TAB>target`")
    shared.add_options(score, DecodingConfig, ("forced_prefix", "logprobs"))
    shared.add_json(
        score,
        "write one JSON object per line: log_likelihood, num_tokens; with --logprobs "
        "token_logprobs and top_logprobs",
    )


def run_generate(arguments: argparse.Namespace) -> int:
    _require_json(arguments)
    return text.run(arguments, _generate)


def run_score(arguments: argparse.Namespace) -> int:
    _require_json(arguments)
    return text.run(arguments, _score)


def _generate(arguments: argparse.Namespace, lines: list[str], model, reporter, record) -> None:
    from switchx.inference.generate import text_of

    generator = model.generator(
        batch_size=arguments.batch_size,
        dropless=arguments.capacity == "dropless",
        record=record,
        **shared.options_of(arguments, DecodingConfig),
    )
    encode = functools.partial(model.text_format.inputs, model.vocabulary)

    def prompt(line):
        tokens = model.prompt(text.encoded(arguments, encode, line))
        if fault := generator.fault(tokens):
            raise ValueError(fault)
        return tokens

    num_outputs = generator.decoding.num_return_sequences

    def written(hypotheses):
        outputs = [text_of(each, model.vocabulary, generator.stops) for each in hypotheses]
        if not arguments.json:
            breaks = r"[\r\n]+" if num_outputs == 1 else r"[\t\r\n]+"
            return "\t".join(re.sub(breaks, " ", output) for output in outputs)
        values = [
            {"output": output} | each.as_dict()
            for output, each in zip(outputs, hypotheses, strict=True)
        ]
        values = values[0] if num_outputs == 1 else {"outputs": values}
        return json_text(values, ensure_ascii=False)

    def compute(shard, first):
        for number, hypotheses in generator(list(map(prompt, shard)), first_number=first):
            yield number, written(hypotheses[:num_outputs])

    text.check(arguments.input, lines, prompt)
    settings = dataclasses.asdict(generator.decoding)
    if arguments.capacity == "dropless":
        del settings["pruning"]  # outputs are the same with and without it
    text.write(arguments, model, lines, settings, compute, reporter)


def _score(arguments: argparse.Namespace, lines: list[str], model, reporter, record) -> None:
    asked = shared.options_of(arguments, DecodingConfig)
    dropless, size = arguments.capacity == "dropless", arguments.batch_size
    scorer = model.scorer(batch_size=size, dropless=dropless, record=record, **asked)
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
            values = {name: x for name, x in vars(score).items() if x is not None}
            plain = f"{score.log_likelihood:.6f}\t{score.num_tokens}"
            yield number, json_text(values) if arguments.json else plain

    text.check(arguments.input, lines, pair)
    scores = []
    for line in text.write(arguments, model, lines, asked, compute, reporter):
        values = list(json.loads(line).values()) if arguments.json else line.split("\t")
        scores.append([math.nan if value is None else float(value) for value in values[:2]])
    log_likelihood, num_tokens = map(sum, zip(*scores, strict=True))
    reporter.note(
        f"{len(scores):,} lines, {num_tokens:,.0f} target tokens: log-likelihood "
        f"{log_likelihood:,.4f}, {log_likelihood / num_tokens:.4f} a token"
    )


def _require_json(arguments: argparse.Namespace) -> None:
    logprobs = getattr(arguments, "logprobs", None)
    if logprobs is not None and not arguments.json:
        raise ValueError(f"--logprobs={logprobs} without --json, which writes them; give both")
