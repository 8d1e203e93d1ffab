# SPDX-License-Identifier: Apache-2.0
"""What `switchx generate` and `switchx score` share: lines in, a model, lines out.

All lines are read and checked before anything is computed. They are then computed in shards,
in any order within a shard, and written in their original order.
"""

import argparse
import codecs
import contextlib
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from switchx.cli import arguments as shared
from switchx.cli import expert_arguments

STANDARD_INPUT = "-"
# More faults than these are counted, not listed.
MOST_LISTED = 10
# A shard has several batches, so that each has inputs of about one length.
BATCHES_PER_SHARD = 8


FLAGS = {
    "--batch_size=N": (int, "lines processed at once"),
    "--max_input_tokens=N": "maximum number of tokens of a line, longer ones are an error; "
    "attention's memory grows with its square",
    "--record=FILE": "also write where every token was routed, a Parquet file "
    "(docs/records.md)",
    "--capacity=dropless|trained": "capacity of experts: dropless drops no token, and a line's "
    "result depends on that line alone; trained drops as evaluation does, and results depend "
    "on the other lines of the batch",
}


def add_arguments(parser: shared.CommandParser, input_help: str) -> None:
    """Adds the model, the input, the output, and how inputs are batched."""
    shared.add_model_dir(parser, "run folder of `switchx train`, or of `switchx quantize`")
    expert_arguments.add_loading(parser)
    parser.add_argument(
        "--input",
        default=STANDARD_INPUT,
        metavar="FILE",
        help=f"{input_help}; default: -, standard input",
    )
    shared.add_output(parser, "file to write or continue; default: standard output")
    shared.add_flags(parser, FLAGS, batch_size=32, max_input_tokens=2048, capacity="dropless")


def run(arguments: argparse.Namespace, answer: Callable[..., None]) -> int:
    """Reads the lines, loads the model and calls `answer(arguments, lines, model, reporter,
    record)`; returns the exit status."""
    from switchx.progress import TerminalReporter

    with contextlib.ExitStack() as stack:
        reporter = stack.enter_context(TerminalReporter(unit="line"))
        if arguments.input == STANDARD_INPUT:
            reporter.note("reading standard input until its end")
        elif arguments.output and _is_same_file(arguments.input, arguments.output):
            raise ValueError(f"--output={arguments.output} is the input; give another file")
        lines = read_lines(arguments.input)
        reporter.note("loading JAX and the model")
        from switchx.training.compilation_cache import compiled_programs_kept

        stack.enter_context(compiled_programs_kept(None, reporter.note))
        model = load_model(arguments, reporter)
        with recording(arguments, model, reporter) as record:
            answer(arguments, lines, model, reporter, record)
        if model.experts is not None:
            for line in expert_arguments.traffic_lines(arguments, model.experts):
                reporter.note(line)
    return 0


def load_model(arguments: argparse.Namespace, reporter):
    """The `switchx.api.Model`; notes when results depend on more than a line itself.

    Raises:
        ValueError: there is no such model, or it has no vocabulary.
    """
    from switchx import api

    model = api.load(arguments.model_dir, **expert_arguments.loading(arguments))
    if model.vocabulary is None:
        raise ValueError(
            f"{arguments.model_dir} has no vocabulary, so it cannot read lines of text; give "
            "token ids to switchx.load(...) in Python"
        )
    switch = model.config.switch
    if switch is not None and (
        arguments.capacity == "trained" or switch.router.has_choosing_experts
    ):
        reporter.note("experts have a capacity: a result depends on the lines of its batch")
    return model


@contextlib.contextmanager
def recording(arguments: argparse.Namespace, model, reporter):
    """The writer of `--record`, or None; at the end writes the file and reports its size.

    Raises:
        ValueError: the model has no Switch layers, or the file cannot be written.
    """
    if not arguments.record:
        yield None
        return
    from switchx.routing_record import RecordWriter

    with RecordWriter(
        arguments.record, model.record_info(arguments.command, arguments.capacity == "dropless")
    ) as writer:
        yield writer
    reporter.note(writer.summary())


def read_lines(name: str) -> list[str]:
    """The lines of a UTF-8 file, or of standard input until its end (`-`).

    Line feeds end lines; a carriage return before one belongs to it, and the end of the file
    ends the last line. A byte order mark is not part of the text.

    Raises:
        ValueError: there is no such file, it has no lines, or some are not UTF-8.
    """
    try:
        if name == STANDARD_INPUT:
            data = sys.stdin.buffer.read()
        else:
            data = pathlib.Path(name).expanduser().read_bytes()
        lines = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise ValueError(
            f"--input={name} cannot be read ({error.strerror}); name a text file, or - for "
            "standard input"
        ) from error
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise ValueError(f"{_shown(name)} has no lines; write one input a line")

    def decoded(line: bytes) -> str:
        try:
            return line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            fault = f"is not UTF-8: byte {error.start + 1} is 0x{byte:02x}"
            raise ValueError(fault) from error

    return check(name, lines, decoded)


def encoded(
    arguments: argparse.Namespace, encode: Callable[[str], list[int]], text: str, at: str = ""
) -> list[int]:
    """Token ids of a text.

    Args:
        at: beginning of an error's text, which is shown after a line's number.

    Raises:
        ValueError: the text cannot be encoded or is too long.
    """
    try:
        tokens = encode(text)
    except ValueError as error:
        raise ValueError(f"{at}cannot be read ({error})") from None
    if len(tokens) > (most := arguments.max_input_tokens):
        raise ValueError(f"{at}has {len(tokens)} tokens, more than --max_input_tokens={most}")
    return tokens


def check(name: str, lines: Sequence, read_line: Callable[[Any], Any]) -> list:
    """Reads each line by `read_line` and returns the results.

    Raises:
        ValueError: `read_line` refuses some lines; the message has their numbers and why.
    """
    read, faults = [], []
    for number, line in enumerate(lines, 1):
        try:
            read.append(read_line(line))
        except ValueError as error:
            faults.append(f"line {number} {error}")
    if faults:
        more = len(faults) - MOST_LISTED
        rest = f"; and {more} more lines" if more > 0 else ""
        raise ValueError(
            f"{_shown(name)}: {'; '.join(faults[:MOST_LISTED])}{rest}. Nothing was done; "
            "correct or remove what is wrong"
        )
    return read


def write(
    arguments: argparse.Namespace,
    model,
    lines: Sequence[str],
    settings: dict[str, Any],
    compute: Callable[[Sequence[str], int], Iterable[tuple[int, str]]],
    reporter,
) -> Iterator[str]:
    """Computes and writes an output line for each line, going on where the output ends.

    Args:
        settings: the command's own settings that decide what is written.
        compute: see `run_in_shards`.

    Returns:
        All lines of the output, including the lines that were there before.
    """
    from switchx.cli.text.resumable_output import ResumableOutput, StandardOutput

    settings = settings | {
        "command": arguments.command,
        "model": model.fingerprint,
        "json": arguments.json,
        "capacity": arguments.capacity,
    }
    if arguments.capacity == "trained":
        settings["batch_size"] = arguments.batch_size
    output = StandardOutput()
    if arguments.output:
        output = ResumableOutput(arguments.output, lines, settings)
    with output:
        if arguments.record and output.num_lines:
            raise ValueError(
                f"--record={arguments.record}, and {output.num_lines:,} lines of "
                f"{arguments.output} are there already, whose routing is not known; give "
                "another --output, or leave --record out"
            )
        run_in_shards(lines, output, compute, reporter, batch_size=arguments.batch_size)
    return output.lines()


def run_in_shards(
    inputs: Sequence[Any],
    output,
    compute: Callable[[Sequence[Any], int], Iterable[tuple[int, str]]],
    reporter,
    *,
    batch_size: int,
) -> None:
    """Writes a line for each input from `output.num_lines` on, a shard at a time.

    Args:
        compute: yields each input's number and output line, given a shard and its first number.
    """
    done, total = output.num_lines, len(inputs)
    if done:
        reporter.note(f"{done:,} of {total:,} lines are there already")
    reporter.begin(done, total)
    while done < total:
        shard = inputs[done : done + BATCHES_PER_SHARD * batch_size]
        written = {}
        for number, line in compute(shard, done):
            written[number] = line
            reporter.counted(done + len(written))
        output.append([written[done + i] for i in range(len(shard))])
        done += len(shard)


def _is_same_file(one: str, other: str) -> bool:
    paths = [pathlib.Path(name).expanduser() for name in (one, other)]
    return all(path.exists() for path in paths) and paths[0].samefile(paths[1])


def _shown(name: str) -> str:
    return "standard input" if name == STANDARD_INPUT else name
