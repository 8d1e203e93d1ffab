# SPDX-License-Identifier: Apache-2.0
"""What `switchx generate` and `switchx score` share: lines in, a model, lines out."""

import argparse
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from switchx.cli import arguments as shared
from switchx.cli.text_lines import STANDARD_INPUT, read_lines, refuse_lines


def add_arguments(parser: shared.CommandParser, input_help: str) -> None:
    """The model, the input, the output, and how inputs are batched."""
    shared.add_model_dir(parser, "run folder of `switchx train`, or of `switchx quantize`")
    shared.add_step(parser, "checkpoint of a run folder")
    shared.add_mesh(parser, "one device")
    parser.add_argument(
        "--input",
        default=STANDARD_INPUT,
        metavar="FILE",
        help=f"{input_help}; default: -, standard input",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="file to write or to go on with; default: standard output",
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        default=32,
        metavar="N",
        help="most lines at once (default: 32)",
    )
    parser.add_argument(
        "--max_input_tokens",
        type=int,
        default=2048,
        metavar="N",
        help="longer lines are an error; attention takes the square of it in memory "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--capacity",
        choices=("dropless", "trained"),
        default="dropless",
        help="of experts: dropless drops no token, and a line's result depends on that line "
        "alone; trained drops as evaluation does, and it depends on the lines that it is "
        "batched with (default: %(default)s)",
    )


def run(arguments: argparse.Namespace, answer: Callable[..., None]) -> int:
    """Reads the lines, loads the model and has `answer(arguments, lines, model, reporter)` do
    the rest; returns the exit status.
    """
    # Imported here: help, and options that are not understood, do not wait for it.
    from switchx.cli.progress import TerminalReporter

    with TerminalReporter(unit="line") as reporter:
        lines = read(arguments, reporter)
        reporter.note("loading JAX and the model")
        answer(arguments, lines, load_model(arguments, reporter), reporter)
    return 0


def read(arguments: argparse.Namespace, reporter) -> list[str]:
    """The lines of the input; see `read_lines`.

    Raises:
        ValueError: also where the output would overwrite the input.
    """
    if arguments.output == "":
        raise ValueError("--output is empty; is a shell variable not set?")
    if arguments.max_input_tokens < 1:
        raise ValueError(f"--max_input_tokens={arguments.max_input_tokens}; use at least 1")
    if arguments.input == STANDARD_INPUT:
        reporter.note("reading standard input until its end")
    elif arguments.output and _is_same_file(arguments.input, arguments.output):
        raise ValueError(f"--output={arguments.output} is the input; give another file")
    return read_lines(arguments.input)


def load_model(arguments: argparse.Namespace, reporter):
    """The `switchx.api.Model`, which has a vocabulary; says where results are not a line's own.

    Raises:
        ValueError: there is no such model, or it has no vocabulary.
    """
    from switchx import api

    mesh = shared.mesh_spec(arguments)
    model = api.load(arguments.model_dir, arguments.step, mesh=mesh)
    if model.vocabulary is None:
        raise ValueError(
            f"{arguments.model_dir} has no vocabulary, so it cannot read lines of text; give "
            "token ids to switchx.load(...) in Python"
        )
    switch = model.config.switch
    if switch is not None and (
        arguments.capacity == "trained" or switch.router.kind == "expert_choice"
    ):
        reporter.note("experts have a capacity: a line's result depends on its batch mates")
    return model


def encoded(arguments: argparse.Namespace, encode: Callable[[str], list[int]], text: str):
    """Token ids of a text.

    Raises:
        ValueError: it is empty, cannot be encoded or is too long; to be said after its line's
            number.
    """
    if not text.strip():
        raise ValueError("is empty")
    try:
        tokens = encode(text)
    except ValueError as error:
        raise ValueError(f"cannot be read ({error})") from None
    if len(tokens) > arguments.max_input_tokens:
        raise ValueError(
            f"has {len(tokens)} tokens, more than --max_input_tokens="
            f"{arguments.max_input_tokens}"
        )
    return tokens


def check(
    arguments: argparse.Namespace, lines: Sequence[str], read_line: Callable[[str], Any]
) -> None:
    """Raises one ValueError that names all lines that `read_line` refuses, and why."""
    faults = []
    for number, line in enumerate(lines, 1):
        try:
            read_line(line)
        except ValueError as error:
            faults.append((number, str(error)))
    refuse_lines(arguments.input, faults)


def write(
    arguments: argparse.Namespace,
    lines: Sequence[str],
    settings: dict[str, Any],
    compute: Callable[[Sequence[str], int], Iterable[tuple[int, str]]],
    reporter,
) -> Iterator[str]:
    """Computes and writes a line for each line, going on where the output ends.

    Args:
        settings: whatever decides what is written, the capacity apart.
        compute: see `run_in_shards`.

    Returns:
        All lines of the output, those of before included.
    """
    from switchx.cli.resumable_output import ResumableOutput, StandardOutput
    from switchx.cli.shards import run_in_shards

    settings = settings | {"capacity": arguments.capacity}
    if arguments.capacity == "trained":
        settings["batch_size"] = arguments.batch_size
    output = StandardOutput()
    if arguments.output:
        output = ResumableOutput(arguments.output, lines, settings)
    with output:
        run_in_shards(lines, output, compute, reporter, batch_size=arguments.batch_size)
    return output.lines()


def _is_same_file(one: str, other: str) -> bool:
    paths = [pathlib.Path(name).expanduser() for name in (one, other)]
    return all(path.exists() for path in paths) and paths[0].samefile(paths[1])
