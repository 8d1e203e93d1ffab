# SPDX-License-Identifier: Apache-2.0
"""`switchx serve`: a trained model over HTTP."""

import argparse
import importlib.util
import os
import pathlib
import sys
import threading
import time
from collections.abc import Sequence

from switchx.cli import arguments as shared
from switchx.cli import expert_slots as slots
from switchx.serving.limits import Limits

DESCRIPTION = """\
Answers requests over HTTP until it is stopped:

  switchx serve --model_dir=runs/tiny
  curl --json '{"inputs": ["a red house"]}' http://127.0.0.1:8000/v1/generate

POST /v1/generate takes inputs (a text, or a list of texts or of lists of token ids), stream,
and the options of `switchx generate` from max_new_tokens to length_penalty. An answer is what
that command gives: it does not depend on the requests that it is batched with.
GET / is a page to try it in, /healthz says whether it is ready, /metrics is for Prometheus.

It listens on this machine alone unless --host says otherwise. A token, from --token_file or
the environment's SWITCHX_TOKEN, is then asked for as `Authorization: Bearer TOKEN`.

SIGTERM or Ctrl-C: new requests get 503, those that run are answered, and the exit status is
0; a second one does not wait.
"""
EXTRA = ("starlette", "uvicorn", "prometheus_client")
TOKEN_VARIABLE = "SWITCHX_TOKEN"
LEAST_TOKEN_LENGTH = 16
# For the threads to look up from what they compile.
STOPPING_S = 5.0


def add_command(commands) -> None:
    parser = shared.add_command(commands, "serve", run, "serve a model over HTTP", DESCRIPTION)
    shared.add_model_dir(parser, "run folder of `switchx train`, or of `switchx quantize`")
    shared.add_step(parser, "checkpoint of a run folder")
    slots.add_expert_slots(parser)
    shared.add_task(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="0 takes a free one (default: 8000)"
    )
    parser.add_argument(
        "--token_file", metavar="FILE", help="its first line is the token that clients send"
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
    with TerminalReporter() as reporter:
        reporter.note("loading JAX and the model")
        from switchx.training.compilation_cache import compiled_programs_kept

        with compiled_programs_kept(None, reporter.note):
            return _serve(arguments, token, reporter)


def _serve(arguments: argparse.Namespace, token: str | None, reporter) -> int:
    from switchx import api
    from switchx.serving.scheduler import Service
    from switchx.serving.server import Server, is_loopback, open_socket

    limits = Limits(**shared.options_of(arguments, Limits))
    asked = slots.expert_slots(arguments)
    model = api.load(
        arguments.model_dir, arguments.step, expert_slots=asked, task=arguments.task
    )
    switch = model.config.switch
    if switch is not None and switch.router.kind == "expert_choice":
        reporter.note("experts choose their tokens: an answer depends on those in its batch")
    # Before it compiles: an address that is taken is said at once.
    with open_socket(arguments.host, arguments.port) as listener:
        host, port = listener.getsockname()[:2]
        if token is None and not is_loopback(arguments.host):
            reporter.note(
                f"warning: {host} can be reached from other machines, and no token is asked "
                f"for; give --token_file, or set {TOKEN_VARIABLE}"
            )
        address = f"[{host}]" if ":" in host else host
        reporter.note(f"listening on http://{address}:{port}")
        service = Service(model, limits)
        is_all_answered = Server(service, token).run_until_stopped(listener)
    return _leave([service.worker, service.worker.compiler], 0 if is_all_answered else 1)


def _leave(threads: Sequence[threading.Thread], status: int) -> int:
    """Waits for threads; the status, or the end of the process where one does not end.

    The interpreter cannot end around a thread that is in the compiler: it would abort.
    """
    until_s = time.monotonic() + STOPPING_S
    for each in threads:
        each.join(max(0.0, until_s - time.monotonic()))
    if any(each.is_alive() for each in threads):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def read_token(file: str | None) -> str | None:
    """The token of a file or the environment, or None.

    Raises:
        ValueError: it is short, or nothing that a header can hold.
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
