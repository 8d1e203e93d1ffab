# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands share, spelt as T5X spells them."""

import argparse

from switchx.cli import gin_edge
from switchx.training.job import TrainingJob


def add_command(commands, name: str, run, help_text: str, description: str):
    """A subcommand whose help shows `description` as it is written."""
    parser = commands.add_parser(
        name,
        help=help_text,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--traceback", action="store_true", help="show where an error comes from, for a report"
    )
    parser.set_defaults(run=run, command=name)
    return parser


def add_gin_arguments(parser) -> None:
    """`--gin_file`, `--gin.NAME=VALUE`, `--gin_search_paths`."""
    parser.add_argument(
        "--gin_file",
        action="append",
        required=True,
        metavar="FILE",
        help="gin file: a path, or a name below configs/ such as runs/pretrain_tiny.gin; "
        "several are read in order",
    )
    parser.add_argument(
        "--gin_search_paths",
        default="",
        metavar="DIRS",
        help="folders to look for gin files in, separated by commas",
    )
    parser.add_argument_group(
        "configuration",
        "--gin.NAME=VALUE sets a macro or a parameter of the gin files, as "
        "--gin.TRAIN_STEPS=100 or --gin.SwitchConfig.capacity_factor=1.0",
    )


def add_model_dir(parser, help_text: str) -> None:
    parser.add_argument("--model_dir", required=True, metavar="DIR", help=help_text)


def parse_job(arguments) -> TrainingJob:
    """The job that the command line describes.

    Raises:
        ConfigurationError: it describes none; the message says what to change.
    """
    search_paths = [path for path in arguments.gin_search_paths.split(",") if path]
    gin_edge.parse_files(arguments.gin_file, arguments.gin_bindings, search_paths)
    return gin_edge.build("JOB", TrainingJob)
