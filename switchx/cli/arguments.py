# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands share, spelt as T5X spells them."""

import argparse
import math
import os
import pathlib
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from switchx.fields import options
from switchx.gin_config.files import close_match, configuration_of, did_you_mean
from switchx.object_store import is_address
from switchx.own_code import import_from_working_directory
from switchx.shipped import folder_of

GIN_PREFIX = "--gin."
DEVICES_FLAG = "--xla_force_host_platform_device_count"


class UsageError(ValueError):
    """A command line that cannot be parsed; `prog` is the command that it was given to."""

    def __init__(self, prog: str, message: str):
        super().__init__(message)
        self.prog = prog


class CommandParser(argparse.ArgumentParser):
    """Shows texts as they are written, takes no abbreviations, raises instead of exiting."""

    def __init__(self, prog: str, **settings):
        super().__init__(
            prog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **settings,
        )

    def error(self, message: str):
        """Raises UsageError with one paragraph: what is wrong, and what was meant."""
        if choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            name, choices = choice[1], re.findall(r"[\w.-]+", choice[2])
            message = (
                f"there is no {name!r}{did_you_mean(name, choices)}; use {', '.join(choices)}"
            )
        message = message.replace("the following arguments are required", "give")
        raise UsageError(self.prog, f"{message} (`{self.prog} --help` explains)")

    def unknown(self, argument: str):
        """Raises UsageError for an argument that means nothing here."""
        if not argument.startswith("-"):
            self.error(f"unexpected {argument!r}; options are written --NAME=VALUE")
        name = argument.partition("=")[0]
        # Compared without dashes, which would make all flags look alike.
        flags = self._option_string_actions
        stems = {flag.strip("-").replace("-", "_"): flag for flag in flags}
        close = close_match(name.strip("-").replace("-", "_"), stems)
        hint = f" (did you mean {stems[close]}?)" if close else ""
        self.error(f"unknown option {name}{hint}")


def add_command(commands, name: str, run, help_text: str, description: str) -> CommandParser:
    """A subcommand whose help shows `description` as it is written."""
    parser = commands.add_parser(
        name, prog=f"switchx {name}", help=help_text, description=description
    )
    parser.add_argument(
        "--traceback", action="store_true", help="show an error's traceback, for a bug report"
    )
    parser.set_defaults(run=run, command=name, parser=parser)
    return parser


def add_gin_arguments(parser: CommandParser, default: str | None = None) -> None:
    """`--gin_file`, `--gin.NAME=VALUE`, `--gin_search_paths`.

    Args:
        default: description of the default configuration, for the help text; None requires a
            file.
    """
    parser.add_argument(
        "--gin_file",
        action="append",
        required=default is None,
        type=not_empty,
        metavar="FILE",
        help="gin file: a path, or a name below configs/ such as runs/pretrain_tiny.gin; "
        "several files are read in order, later ones win"
        + (f"; default: {default}" if default else ""),
    )
    parser.add_argument(
        "--gin_search_paths",
        default="",
        metavar="DIRS",
        help="further folders to search for gin files, separated by commas",
    )
    parser.add_argument_group(
        "configuration",
        f"{GIN_PREFIX}NAME=VALUE sets a macro or a parameter of the gin files, such as\n"
        f"{GIN_PREFIX}TRAIN_STEPS=100 or {GIN_PREFIX}SwitchConfig.capacity_factor=1.0; it "
        "overrides\nall files. Values are Python literals; strings need no quotes of their "
        "own.",
    )


def add_model_dir(parser: CommandParser, help_text: str, kind=None, required=True) -> None:
    kind = kind or model_folder
    parser.add_argument(
        "--model_dir", required=required, type=kind, metavar="DIR", help=help_text
    )
    add_trust(parser)


def model_folder(text: str) -> str:
    """The folder of a model: a path, or the name of one that ships."""
    return str(folder_of(not_empty(text)))


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust_code",
        action="store_true",
        help="also import what the folder's files name from the working directory",
    )


def add_json(parser: argparse.ArgumentParser, help_text: str = "print one JSON object") -> None:
    parser.add_argument("--json", action="store_true", help=help_text)


def add_output(parser: CommandParser, help_text: str, metavar="FILE", required=False) -> None:
    """`--output`, a path on this machine."""
    parser.add_argument(
        "--output",
        required=required,
        type=_new_file if metavar == "FILE" else _no_address,
        metavar=metavar,
        help=help_text,
    )


def add_step(parser: argparse.ArgumentParser, help_text: str) -> None:
    parser.add_argument(
        "--step",
        type=_step,
        metavar="N|best",
        help=f"{help_text}: the one after N steps, or the best of those evaluated in training; "
        "default: the newest",
    )


def add_flags(
    parser: argparse.ArgumentParser, flags: Mapping[str, Any], required: str = "", **defaults
) -> None:
    """Adds flags from a table: each as users write it, and its help text.

    `--name` is a switch, and `--name=a|b` takes one of these words. A metavar in capitals gives
    the type of the value (`_TYPES`); all other values are strings.

    Args:
        flags: help text by flag, or a pair of the flag's own type and its help text.
        required: name of the flag that must be given.
        defaults: default values by name; each is appended to its help text.
    """
    for flag, described in flags.items():
        option, _, metavar = flag.partition("=")
        name = option.removeprefix("--")
        kind, text = described if isinstance(described, tuple) else (None, described)
        settings = {"type": kind or _TYPES.get(metavar, str), "metavar": metavar}
        if not metavar:
            settings = {"action": "store_true"}
        elif metavar == metavar.lower():
            settings = {"type": kind, "choices": list(map(kind or str, metavar.split("|")))}
        if name in defaults:
            settings["default"] = defaults[name]
            text = f"{text} (default: %(default)s)"
        if name == required:
            settings["required"] = True
        parser.add_argument(option, help=text, **settings)


def add_options(
    parser: CommandParser, config: type, names: Iterable[str] | None = None, **defaults
) -> None:
    """Adds a flag for each option of a configuration class (`switchx.fields.option`).

    A flag that is not given leaves no attribute in the arguments, so that a model's own default
    holds.

    Args:
        names: names of the options to add; None adds all.
        defaults: defaults that differ from the class' own.
    """
    for name, each in options(config).items():
        if names is not None and name not in names:
            continue
        shown = defaults.get(name, each.default)
        more = "" if shown is None or each.is_list else f" (default: {shown})"
        how: dict[str, Any] = {"type": each.type, "choices": each.choices}
        if each.is_list and each.type is str:
            more = "; may be given several times"
            how = {"action": "append", "metavar": "TEXT"}
        elif each.is_list:
            how = {"type": numbers, "metavar": "N,N"}
        elif not each.choices:
            how["metavar"] = "NAMES" if each.type is str else "N"
        how["default"] = defaults.get(name, argparse.SUPPRESS)
        parser.add_argument(f"--{name}", help=f"{each.help}{more}".replace("%", "%%"), **how)


def options_of(arguments: argparse.Namespace, config: type) -> dict[str, Any]:
    """Values of those options of a configuration class that the command has as flags."""
    given = vars(arguments)
    return {name: given[name] for name in options(config) if name in given}


def option_words(values: dict[str, Any]) -> list[str]:
    """`--NAME=VALUE` for each value that is given; lists are joined with commas."""
    given = {name: x for name, x in values.items() if x not in (None, [])}
    texts = {n: ",".join(map(str, x)) if isinstance(x, list) else x for n, x in given.items()}
    return [f"--{name}={text}" for name, text in texts.items()]


def add_task(parser: CommandParser) -> None:
    parser.add_argument(
        "--task",
        type=not_empty,
        metavar="NAME",
        help="task whose experts are loaded, if the model's experts are divided among tasks",
    )


# Types of arguments.


def not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty; is a shell variable not set?")
    return text


def _no_address(text: str) -> str:
    if is_address(not_empty(text)):
        raise argparse.ArgumentTypeError(
            f"{text} is in a store; give a path on this machine, and copy what is written"
        )
    return text


def _new_file(text: str) -> str:
    """The path; refused before a command spends minutes on a result it could not write."""
    path = pathlib.Path(_no_address(text)).expanduser().absolute()
    nearest = next(each for each in (path, *path.parents) if each.exists())
    if nearest.is_dir() == (nearest == path) or not os.access(nearest, os.W_OK):
        reason = "it is a folder" if path.is_dir() else f"nothing can be made in {nearest}"
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {reason}; give another")
    return text


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        what = f"{text!r} are no whole numbers; write them with commas, as 256042,17"
        raise argparse.ArgumentTypeError(what) from None


def factors(text: str) -> list[float]:
    """Numbers above 0, separated by commas."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [0.0]
    if not all(0 < value < math.inf for value in values):
        what = f"{text!r} are no numbers above 0; write them with commas, as 1,1.25"
        raise argparse.ArgumentTypeError(what)
    return values


def counts(text: str) -> list[int]:
    """Whole numbers of at least 1, separated by commas."""
    return [positive(part) for part in text.split(",")]


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; give more than 0, at most 1")
    return value


def _step(text: str) -> int | str:
    if text == "best":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no step; give its number, or best")
    return int(text)


_TYPES = dict.fromkeys("NKS", positive) | {"FILE": not_empty, "N,N": counts}
_TYPES |= {"X": share, "X,X": factors}


# Gin's arguments.


def accept_gin_bindings(arguments: argparse.Namespace, rest: list[str]) -> None:
    """Sets `arguments.gin_bindings` from what the parser left over.

    Raises:
        UsageError: anything else is left over, or a binding has no value.
    """
    parser = arguments.parser
    takes_bindings = hasattr(arguments, "gin_file")
    for i, argument in enumerate(rest):
        if not (argument.startswith(GIN_PREFIX) and takes_bindings):
            parser.unknown(argument)
        if "=" not in argument:
            value = rest[i + 1] if i + 1 < len(rest) else "-"
            value = "VALUE" if value.startswith("-") else value
            parser.error(f"{argument} has no value; write {argument}={value}")
    arguments.gin_bindings = [argument.removeprefix(GIN_PREFIX) for argument in rest]


def gin_of(arguments: argparse.Namespace, folder=None) -> tuple[list[str], ...]:
    """Gin files, bindings and search paths of a command, as `building.parse_job` takes them.

    A gin file that is named on the command line may import from the working directory.

    Args:
        folder: a `RunFolder`, whose configuration is read where the command line names none.

    Raises:
        ValueError: the folder is not a run folder; the message says what is there.
    """
    files = arguments.gin_file
    if files:
        import_from_working_directory()
    elif folder is not None:
        files = [configuration_of(folder)]
    paths = [path for path in arguments.gin_search_paths.split(",") if path]
    return files, arguments.gin_bindings, paths


def simulate_devices(number: int) -> None:
    """Sets the number of CPU devices, unless XLA_FLAGS does; JAX reads it at its first use."""
    flags = os.environ.get("XLA_FLAGS", "")
    if DEVICES_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {DEVICES_FLAG}={number}".strip()
    give_threads_to_simulated_devices()


def give_threads_to_simulated_devices() -> None:
    """Gives each device that XLA_FLAGS simulates four threads, unless NPROC sets their number.

    A collective on simulated devices blocks a thread of XLA's pool, which has one per device on
    a small machine. Where a device may begin two collectives that do not depend on each other,
    as pipeline stages may, all threads wait for one that no thread is left to run.
    """
    if found := re.search(rf"{DEVICES_FLAG}=(\d+)", os.environ.get("XLA_FLAGS", "")):
        os.environ.setdefault("NPROC", str(4 * int(found[1])))


# How a command ends in an error.


def explain(error: BaseException, arguments: argparse.Namespace) -> int:
    """Prints the error in one paragraph; returns the exit status.

    130 interrupted, 2 wrong input, 3 training stopped, 1 failed on the way. An error that is
    not meant for a person, one that switchx itself did not raise, is re-raised: a traceback.
    """
    if isinstance(error, KeyboardInterrupt):
        print("switchx: interrupted", file=sys.stderr)
        return 130
    from switchx.progress import is_for_a_person  # not for help

    if arguments.traceback or not is_for_a_person(error):
        raise error
    print(f"switchx {arguments.command}: error: {error}", file=sys.stderr)
    return status_of(error)


def status_of(error: BaseException) -> int:
    """The exit status that `explain` gives an error; 1 where `explain` re-raises it."""
    from switchx.progress import is_for_a_person

    status = 2 if isinstance(error, ValueError) and is_for_a_person(error) else 1
    return getattr(error, "exit_status", status)


# Command lines for a shell.


def command_line(name: str, *words: str) -> str:
    """`switchx NAME WORDS`, quoted for a shell in the same folder and environment."""
    return " ".join([*_program(), *(shlex.quote(word) for word in (name, *words))])


def configuration_words(arguments: argparse.Namespace, *without: str) -> list[str]:
    """The gin files, search paths and bindings given, in order, less the macros `without`."""
    words = [f"--gin_file={file}" for file in arguments.gin_file or ()]
    if arguments.gin_search_paths:
        words.append(f"--gin_search_paths={arguments.gin_search_paths}")
    kept = (b for b in arguments.gin_bindings if b.partition("=")[0].strip() not in without)
    return [*words, *(f"--gin.{binding}" for binding in kept)]


def _program() -> list[str]:
    """`switchx` if a shell finds this installation by that name, else how it was called."""
    called, python = pathlib.Path(sys.argv[0]), pathlib.Path(sys.executable)
    if called.name == "switchx":
        found = shutil.which("switchx")
        is_found = found is not None and os.path.samefile(found, called)
        return ["switchx" if is_found else shlex.quote(str(called))]
    # Links are not followed: a virtual environment's python may be one to the system's.
    is_default = shutil.which("python") == str(python.with_name("python"))
    return ["python" if is_default else shlex.quote(str(python)), "-m", "switchx"]
