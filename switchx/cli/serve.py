# SPDX-License-Identifier: Apache-2.0
"""`switchx serve`: a trained model over HTTP."""

import argparse
import contextlib
import importlib.util
import logging
import logging.handlers
import os
import pathlib
import re
import sys
import threading
import time
from collections.abc import Sequence

from switchx.cli import arguments as shared
from switchx.cli import expert_arguments
from switchx.fields import require
from switchx.serving.limits import Limits

DESCRIPTION = """\
Answers requests over HTTP until it is stopped:

  switchx serve --model_dir=runs/tiny
  curl --json '{"inputs": ["a red house"]}' http://127.0.0.1:8000/v1/generate

POST /v1/generate takes inputs (a text, or a list of texts or of lists of token ids), stream,
and the options of `switchx generate`, from max_new_tokens on. An answer is what
that command gives: it does not depend on the requests that it is batched with.
POST /v1/completions and GET /v1/models are for OpenAI clients.
GET / is a page to try it in, /healthz/ready says whether it is ready, /metrics is for
Prometheus.

It listens on this machine only, unless --host says otherwise. If --token_file or the variable
SWITCHX_TOKEN gives a token, requests need `Authorization: Bearer TOKEN`. Without a token, and
listening on this machine only, it answers only requests to this machine's names.

To serve several models, each under a name that requests give as `model`:

  switchx serve --model=small=runs/small --model=base=runs/base

On SIGTERM or Ctrl-C new requests get 503, running ones are answered, and the exit status is
0; a second signal does not wait. SIGHUP loads the newest checkpoint of each model's folder
beside the running one, which answers until then, and finishes what it has begun.
"""
EXTRA = ("starlette", "uvicorn", "prometheus_client", "jinja2")
TOKEN_VARIABLE = "SWITCHX_TOKEN"
LEAST_TOKEN_LENGTH = 16
# Time for threads to finish compiling. With a second for connections to close, and another on
# a busy machine, a server ends within three seconds of the end of its drain.
STOPPING_S = 1.0
# The name appears in addresses, labels of metrics and logs.
_NAME = re.compile(r"[\w.:@+-]{1,100}", re.ASCII)
# A name, or an IPv4 or IPv6 address.
_HOST = re.compile(r"[\w.-]+|[\da-f.]*(:[\da-f.]*){2,}", re.ASCII)


def _host_names(text: str) -> list[str]:
    names = [name.strip() for name in text.lower().split(",") if name.strip()]
    for name in names:
        if not _HOST.fullmatch(name):
            raise argparse.ArgumentTypeError(
                f"{name!r} is no name of a host; leave out scheme and port, as in gpu.example"
            )
    return names


FLAGS = {
    "--host=HOST": (shared.not_empty, "address to listen on"),
    "--port=N": (int, "port to listen on; 0 takes a free one"),
    "--token_file=FILE": "file whose first line is the token that clients send",
    "--allowed_hosts=NAME,NAME": (
        _host_names,
        "names accepted in `Host`, besides localhost, if no token is required",
    ),
    "--access_log=FILE": "file for one line of JSON per request; - is standard output "
    "(default: none)",
}


def add_command(commands) -> None:
    parser = shared.add_command(commands, "serve", run, "serve a model over HTTP", DESCRIPTION)
    folders = parser.add_mutually_exclusive_group(required=True)
    folders.add_argument(
        "--model_dir",
        type=shared.not_empty,
        metavar="DIR",
        help="run folder of `switchx train`, or of `switchx quantize`",
    )
    folders.add_argument(
        "--model",
        action="append",
        type=_named_folder,
        metavar="NAME=DIR",
        help="such a folder, and the name clients use for it; may be given several times",
    )
    shared.add_trust(parser)
    expert_arguments.add_loading(parser)
    shared.add_flags(parser, FLAGS, host="127.0.0.1", port=8000)
    parser.set_defaults(allowed_hosts=[])
    parser.add_argument(
        "--served_model_name",
        type=_model_name,
        metavar="NAME",
        help="name that clients use for the model of --model_dir (default: its folder's)",
    )
    shared.add_options(parser, Limits)


def run(arguments: argparse.Namespace) -> int:
    from switchx.progress import TerminalReporter

    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"needs {', '.join(missing)}: pip install 'switchx[serve]'")
    if not 0 <= arguments.port < 1 << 16:
        raise ValueError(f"--port={arguments.port}; use 0 to 65535")
    token = read_token(arguments.token_file)
    with access_log(arguments.access_log), TerminalReporter() as reporter:
        reporter.note("loading JAX and the model")
        from switchx.training.compilation_cache import compiled_programs_kept

        with compiled_programs_kept(None, reporter.note):
            return _serve(arguments, token, reporter)


def _serve(arguments: argparse.Namespace, token: str | None, reporter) -> int:
    from switchx.serving.app import is_loopback
    from switchx.serving.asked_shapes import keep_asked
    from switchx.serving.metrics import Metrics
    from switchx.serving.models import Models, Reloader
    from switchx.serving.server import Server, open_socket

    limits = Limits(**shared.options_of(arguments, Limits))
    folders = model_folders(arguments)
    loaded = {name: _loaded(name, folder, reporter) for name, folder in folders.items()}
    # Before it compiles, so that an address that is in use is reported at once.
    with open_socket(arguments.host, arguments.port) as listener:
        host, port = listener.getsockname()[:2]
        is_here_alone = is_loopback(arguments.host)
        if token is None and not is_here_alone:
            reporter.note(
                f"warning: {host} can be reached from other machines, and no token is asked "
                f"for; give --token_file, or set {TOKEN_VARIABLE}"
            )
        address = f"[{host}]" if ":" in host else host
        reporter.note(f"listening on http://{address}:{port}")
        metrics = Metrics()
        # `loaded` keeps no reference, so that a model that is replaced is freed.
        models = Models([_service(loaded.pop(name), limits, name, metrics) for name in folders])
        reloader = Reloader(models, folders)
        hosts = arguments.allowed_hosts
        hosts = None if token or not (is_here_alone or hosts) else hosts
        is_all_answered = Server(models, token, hosts, reloader).run_until_stopped(listener)
    services = models.services.values()
    keep_asked((each.model.fingerprint, each.worker.asked) for each in services)
    threads = [part for each in models.all for part in (each.worker, each.worker.compiler)]
    return _leave([*threads, reloader], 0 if is_all_answered else 1)


def _service(model, *settings):
    """A service that first compiles the shapes that the model's last service was asked for."""
    from switchx.serving.asked_shapes import history_of, read_shapes
    from switchx.serving.requests import fault_of_experts
    from switchx.serving.service import Service

    asked_before = read_shapes(history_of(model.fingerprint), settings[0])
    if fault_of_experts(model) is not None:  # as on a mesh, unlike the last service
        asked_before = [shape for shape in asked_before if not shape.is_recorded]
    return Service(model, *settings, asked_before=asked_before)


def _loaded(name: str, folder, reporter):
    model = folder.load()
    switch = model.config.switch
    if switch is not None and switch.router.has_choosing_experts:
        reporter.note(
            f"{name}: experts choose their tokens: an answer depends on those in its batch"
        )
    return model


def model_folders(arguments: argparse.Namespace) -> dict:
    """The `ModelFolder`s to be served, by the names of their models.

    Raises:
        ValueError: two models have one name, or a name is given twice.
    """
    from switchx.serving.models import ModelFolder

    if arguments.model is None:
        folder = pathlib.Path(arguments.model_dir).expanduser().absolute()
        named = [(arguments.served_model_name or folder.name, arguments.model_dir)]
    else:
        named = arguments.model
        require(
            arguments.served_model_name is None,
            f"--served_model_name={arguments.served_model_name} is for --model_dir; --model "
            "has names of its own",
        )
    names = [name for name, _ in named]
    twins = sorted({name for name in names if names.count(name) > 1})
    require(
        not twins,
        f"--model: {len(named)} models, of which several are called {', '.join(twins)}; give "
        "each a name of its own",
    )
    settings = expert_arguments.loading(arguments)
    return {name: ModelFolder(folder, **settings) for name, folder in named}


def _named_folder(text: str) -> tuple[str, str]:
    name, separator, folder = text.partition("=")
    if not separator or not folder:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no model; write NAME=DIR, as small=runs/small"
        )
    return _model_name(name), folder


def _model_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name of a model; use letters, digits and . _ : @ + -, at most 100"
        )
    return text


def _leave(threads: Sequence[threading.Thread], status: int) -> int:
    """Waits for threads and returns the status; ends the process if a thread does not end.

    The interpreter cannot exit while a thread is in the compiler: it would abort.
    """
    from switchx.serving.models import READER

    until_s = time.monotonic() + STOPPING_S
    # Also threads of the scoring pool, for which the interpreter would wait; idle ones
    # have ended. Threads of the caller of this function are not waited for.
    readers = [each for each in threading.enumerate() if each.name.startswith(READER)]
    waited = [*threads, *readers]
    for each in waited:
        each.join(max(0.0, until_s - time.monotonic()))
    if any(each.is_alive() for each in waited):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


@contextlib.contextmanager
def access_log(file: str | None):
    """Sends lines on requests to a file, which may be moved away (logrotate), or to `-`.

    Raises:
        ValueError: the file cannot be written.
    """
    log = logging.getLogger("switchx.access")
    level, handler = log.level, logging.NullHandler()
    try:
        if file == "-":
            handler = logging.StreamHandler(sys.stdout)
        elif file is not None:
            handler = logging.handlers.WatchedFileHandler(file)
    except OSError as error:
        raise ValueError(f"--access_log={file} cannot be written: {error}") from error
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.propagate = False  # keeps it out of the command's own messages
    log.setLevel(logging.WARNING if file is None else logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = True
        log.setLevel(level)
        handler.close()


def read_token(file: str | None) -> str | None:
    """The token of a file or the environment, or None.

    Raises:
        ValueError: the token is too short, or a header cannot hold it.
    """
    token, source = os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE
    if file is not None:
        path = pathlib.Path(file).expanduser()
        try:
            token = path.read_text(encoding="utf-8").partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--token_file={file} cannot be read: {error}") from error
        source = f"--token_file={file}"
    if token is None:
        return None
    if len(token) < LEAST_TOKEN_LENGTH or not token.isascii() or not token.isprintable():
        raise ValueError(
            f"{source} holds a token of {len(token)} characters; use at least "
            f"{LEAST_TOKEN_LENGTH}, of ASCII, such as `openssl rand -hex 32` gives"
        )
    return token
