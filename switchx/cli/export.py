# SPDX-License-Identifier: Apache-2.0
"""`switchx export`: a trained model as programs for a platform that run without switchx."""

import argparse
import dataclasses
import shlex
from typing import Any

from switchx.cli import arguments as shared
from switchx.cli import devices
from switchx.fields import json_text, options
from switchx.inference.config import DecodingConfig
from switchx.whole_folders import git_commit, require_free

DESCRIPTION = """\
Writes a model as two programs of fixed shapes (jax.export), one that reads a batch of inputs
and one that takes a decoding step, for one or more platforms, with the weights beside them:

  switchx export --model_dir=runs/tiny --output=exports/tiny --platform=cpu --beam_size=4
  echo "[69, 70, 258, 1]" | python exports/tiny/run.py

The folder holds the programs, weights.safetensors, the vocabulary, export.json (shapes,
versions, a SHA-256 of every file, how to make it again), and run.py, which needs only JAX,
NumPy and safetensors.

With --ring_slots=K experts stay in host memory and stream to the device in each call; K - 2
layers of each stack are always there.

This machine need not have the platform or the mesh: programs are lowered for them, with their
kernels, and compiled where they run. Running them checks platform, devices and JAX's version.
"""
PLATFORMS = ("cpu", "tpu", "cuda")


KIND = {
    "--device_kind=NAME": "device whose kernels are used, as JAX names it; default: TPU v5 "
    "lite, NVIDIA H200. Only with a single platform"
}
SHAPES = {
    "--ring_slots=K": "layers of each stack whose experts are on the device at once; the "
    "others stay in host memory and stream through two of these slots; default: all are on the "
    "device",
    "--batch_size=N": (int, "inputs processed at once"),
    "--input_length=N": (int, "maximum number of tokens of an input"),
}


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "export", run, "make programs of a model, to run without switchx", DESCRIPTION
    )
    shared.add_model_dir(parser, "run folder of `switchx train`, or of `switchx quantize`")
    shared.add_output(parser, "folder to write; must be new or empty", "DIR", required=True)
    parser.add_argument(
        "--platform",
        required=True,
        type=_platforms,
        metavar="NAME,..",
        help=f"platforms to export for, some of {', '.join(PLATFORMS)}",
    )
    shared.add_flags(parser, KIND)
    devices.add_mesh(parser, "one device; data is 1 unless given")
    devices.add_xla(parser)
    shared.add_step(parser, "checkpoint of a run folder")
    shared.add_task(parser)
    shared.add_flags(parser, SHAPES, batch_size=8, input_length=64)
    # Pruning makes a batch smaller, which takes another program, and there are no texts.
    names = options(DecodingConfig).keys() - {"pruning", "stop"}
    shared.add_options(parser, DecodingConfig, names)
    shared.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from switchx import api
    from switchx.inference.export import Shapes, Target, export_model

    if arguments.device_kind and len(arguments.platform) > 1:
        raise ValueError(
            f"--device_kind={arguments.device_kind} with --platform="
            f"{','.join(arguments.platform)}; export for one platform at a time"
        )
    output = require_free(arguments.output)
    shapes = Shapes(arguments.batch_size, arguments.input_length)
    where = devices.mesh_spec(arguments), devices.compiler_options(arguments)
    model = api.load(arguments.model_dir, arguments.step, task=arguments.task)
    # An export has no texts, so a model's own stop texts do not apply.
    decoding = model.decoding_config(stop=(), **shared.options_of(arguments, DecodingConfig))
    content, num_bytes = export_model(
        output,
        model.config,
        model.params,
        decoding,
        shapes,
        [Target(name, arguments.device_kind, *where) for name in arguments.platform],
        _provenance(arguments, model),
        model.save_vocabulary,
        ring_slots=arguments.ring_slots,
    )
    report = {
        "command": "export",
        "output": str(output),
        "about": content["about"],
        "platforms": {
            name: {key: program[key] for key in ("device_kind", "needs_same_jax")}
            for name, program in content["programs"].items()
        },
        "mesh": content["mesh"],
        "bytes_of_files": num_bytes,
        "ring": None if arguments.ring_slots is None else _ring(content, model.config),
    }
    print(json_text(report) if arguments.json else _text(report))
    return 0


def _ring(content: dict[str, Any], config) -> dict[str, Any]:
    from switchx.inference.offload.ring_decode import ring_advice

    ring = content["ring"]
    return ring | {"advice": ring_advice(config, ring["slots"]) or None}


def _provenance(arguments: argparse.Namespace, model) -> dict[str, Any]:
    """Where the export comes from, how to make it again, and its text format."""
    from switchx.inference.artifact import is_artifact

    names = (
        "model_dir",
        "output",
        "task",
        "device_kind",
        "ring_slots",
        "batch_size",
        "input_length",
    )
    given = {name: getattr(arguments, name) for name in names}
    given |= shared.options_of(arguments, DecodingConfig)
    if not is_artifact(arguments.model_dir):
        given["step"] = model.step
    given["platform"] = ",".join(arguments.platform)
    if arguments.mesh:
        given["mesh"] = ",".join(f"{axis}={size}" for axis, size in arguments.mesh.items())
    xla = [f"--xla={option}" for option in arguments.xla]
    xla += ["--trust_code"] * arguments.trust_code
    return {
        "rebuild": shlex.join(["switchx", "export", *shared.option_words(given), *xla]),
        "fingerprint": model.fingerprint,
        "step": model.step,
        "switchx": git_commit(),
        "text_format": dataclasses.asdict(model.text_format),
    }


def _text(report: dict[str, Any]) -> str:
    lines = []
    for name, program in report["platforms"].items():
        axes = " x ".join(f"{axis}={n}" for axis, n in report["mesh"].items() if n > 1)
        same = ", to be run by this version of JAX" if program["needs_same_jax"] else ""
        where = f"mesh {axes}" if axes else "one device"
        lines.append(f"{name}: {program['device_kind']}, {where}{same}")
    if ring := report["ring"]:
        lines.append(
            f"experts: a ring of {ring['slots']} layers, {ring['host_bytes']:,} bytes in host "
            "memory" + (f"; {ring['advice']}" if ring["advice"] else "")
        )
    size = f"{report['bytes_of_files']:,} bytes of files"
    return "\n".join([*lines, f"{report['output']}: {size}; run it: python run.py there"])


def _platforms(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PLATFORMS or names.count(name) > 1:
            raise argparse.ArgumentTypeError(
                f"{name!r} is no platform; use {', '.join(PLATFORMS)}, each once at most"
            )
    return names
