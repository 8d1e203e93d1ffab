# SPDX-License-Identifier: Apache-2.0
"""`switchx generate`: what a model writes to each line of a text."""

import argparse
import dataclasses
import functools
import json
import re

from switchx.cli import arguments as shared
from switchx.cli.text import lines as text
from switchx.inference.config import DecodingConfig

DESCRIPTION = """\
Writes what a model answers to each line of a file or of standard input, in their order:

  switchx generate --model_dir=DIR --input=questions.txt --output=answers.txt --beam_size=4
  echo "a red house" | switchx generate --model_dir=DIR

A line becomes what training made of a text: eos ends it where the tasks of training did so,
and <extra_id_0> is sentinel 0 where they had sentinels. A task's prefix, such as "translate
English to German: ", stands in the line. Line breaks in an output become spaces; --json
keeps them.

With --output, the same command goes on where a killed one left off, and also when lines were
added to the input: FILE.progress.json says of which inputs and settings the lines are.
All lines are read and checked before anything is generated: empty ones, those that are not
UTF-8, and those that are too long are errors.
"""


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "generate", run, "let a model write to each line of a text", DESCRIPTION
    )
    text.add_arguments(parser, "text file, an input a line")
    shared.add_options(parser, DecodingConfig)
    shared.add_json(parser, "write a JSON object a line: output, tokens, score, is_finished")


def run(arguments: argparse.Namespace) -> int:
    return text.run(arguments, _generate)


def _generate(arguments: argparse.Namespace, lines: list[str], model, reporter) -> None:
    generator = model.generator(
        batch_size=arguments.batch_size,
        dropless=arguments.capacity == "dropless",
        **shared.options_of(arguments, DecodingConfig),
    )
    encode = functools.partial(model.text_format.inputs, model.vocabulary)

    def prompt(line):
        tokens = model.prompt(text.encoded(arguments, encode, line))
        if fault := generator.fault(tokens):
            raise ValueError(fault)
        return tokens

    def compute(shard, first):
        for number, (best, *_) in generator(list(map(prompt, shard)), first_number=first):
            yield number, _line(model.vocabulary.decode(best.tokens), best, arguments.json)

    text.check(arguments.input, lines, prompt)
    settings = {"command": "generate", "model": model.fingerprint, "json": arguments.json}
    settings |= dataclasses.asdict(generator.decoding)
    if arguments.capacity == "dropless":
        del settings["pruning"]  # the same outputs with it and without
    text.write(arguments, lines, settings, compute, reporter)


def _line(output: str, hypothesis, is_json: bool) -> str:
    if not is_json:
        return re.sub(r"[\r\n]+", " ", output)
    values = {"output": output} | dataclasses.asdict(hypothesis)
    return json.dumps(values, ensure_ascii=False)
