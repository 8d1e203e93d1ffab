# SPDX-License-Identifier: Apache-2.0
"""`switchx quantize` and `switchx export`: a trained model, made ready to be used."""

import argparse
import dataclasses
import functools
import json
import shlex
from typing import Any

from switchx.cli import arguments as shared
from switchx.fields import options
from switchx.inference.config import DecodingConfig

QUANTIZE = """\
Writes a model whose experts' matrices are int8 or int4, one scale for each output feature of
each expert, and everything else as it was or in another dtype:

  switchx quantize --model_dir=runs/tiny --output=runs/tiny_int4 --bits=4 --rest=bfloat16

The folder holds the weights (safetensors), the vocabulary, and artifact.json: what the model
is, where it comes from, and a SHA-256 of every file, which loading compares. `switchx
generate`, `switchx score` and `switchx.load` read it as they read a run folder.

It prints the share of the experts' bytes that is quantized, bytes before and after, and the
error of every matrix: the root of its mean squared error over that of its mean square.
"""
EXPORT = """\
Writes a model as two programs of fixed shapes (jax.export), one that reads a batch of inputs
and one that takes a step, for one or several platforms, with the weights beside them:

  switchx export --model_dir=runs/tiny --output=exports/tiny --platform=cpu --beam_size=4
  echo "[69, 70, 258, 1]" | python exports/tiny/run.py

The folder holds the programs, weights.safetensors, the vocabulary, export.json (shapes,
versions, a SHA-256 of every file, how to make it again), and run.py, which needs JAX, NumPy
and safetensors alone.

The platform and the mesh need not be here: programs are lowered for them, with their kernels,
and compiled where they run. What runs them checks platform, devices and JAX's version.
"""
METHODS = ("absmax", "ft", "mse")
PLATFORMS = ("cpu", "tpu", "cuda")


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "quantize", run_quantize, "make a model's experts int8 or int4", QUANTIZE
    )
    shared.add_model_dir(parser, "run folder of `switchx train`; nothing is written there")
    shared.add_new_folder(parser, "folder to write; nothing may be there")
    parser.add_argument("--bits", type=int, choices=(4, 8), required=True, help="of a weight")
    parser.add_argument(
        "--method",
        choices=METHODS,
        help="of choosing a scale: the largest weight (absmax), FasterTransformer's (ft), or "
        "least squared error (mse); default: mse with 4 bits, absmax with 8",
    )
    parser.add_argument(
        "--group_size",
        type=int,
        metavar="N",
        help="inputs of an expert that share a scale; default: all",
    )
    parser.add_argument(
        "--rest",
        choices=("bfloat16", "float32"),
        help="dtype of all other parameters, routers apart; default: as they are",
    )
    shared.add_step(parser, "checkpoint to quantize")
    shared.add_json(parser)
    parser = shared.add_command(
        commands,
        "export",
        run_export,
        "make programs of a model, to run without switchx",
        EXPORT,
    )
    shared.add_model_dir(parser, "run folder of `switchx train`, or of `switchx quantize`")
    shared.add_new_folder(parser, "folder to write; nothing may be there")
    parser.add_argument(
        "--platform",
        required=True,
        type=_platforms,
        metavar="NAME,..",
        help=f"what to export for, of {', '.join(PLATFORMS)}",
    )
    parser.add_argument(
        "--device_kind",
        metavar="NAME",
        help="device whose kernels are taken, as JAX names it; default: TPU v5 lite, NVIDIA "
        "H200. One platform alone",
    )
    shared.add_mesh(parser, "one device; data is 1 unless given")
    shared.add_step(parser, "checkpoint of a run folder")
    number = functools.partial(parser.add_argument, metavar="N")
    number("--batch_size", type=int, default=8, help="inputs at once (default: %(default)s)")
    number("--input_length", type=int, default=64, help="most tokens of an input (default: 64)")
    # What makes a batch smaller makes another program of it.
    shared.add_options(parser, DecodingConfig, options(DecodingConfig).keys() - {"pruning"})
    shared.add_json(parser)


def run_quantize(arguments: argparse.Namespace) -> int:
    import jax
    import safetensors

    from switchx import api
    from switchx.inference.artifact import is_artifact, write_artifact
    from switchx.inference.quantize import quantize_experts
    from switchx.manifest import require_free
    from switchx.provenance import git_commit

    output = require_free(arguments.output)
    if is_artifact(arguments.model_dir):
        raise ValueError(
            f"{arguments.model_dir} is quantized already; give the run folder it was made from"
        )
    model = api.load(arguments.model_dir, arguments.step)
    settings = {name: getattr(arguments, name) for name in ("bits", "group_size", "rest")}
    config, params, matrices, sizes = quantize_experts(
        model.config, model.params, method=arguments.method, **settings
    )
    about = {
        "source": arguments.model_dir,
        "source_fingerprint": model.fingerprint,
        "step": model.step,
        "method": arguments.method or ("mse" if arguments.bits == 4 else "absmax"),
        **settings,
        "text_format": dataclasses.asdict(model.text_format),
        "versions": {
            "switchx": git_commit(),
            "jax": jax.__version__,
            "safetensors": safetensors.__version__,
        },
    }
    num_bytes = write_artifact(output, config, params, about, model.save_vocabulary)
    report = {
        "command": "quantize",
        "output": str(output),
        "about": about,
        "share_of_expert_bytes_quantized": sizes.quantized / sizes.experts,
        "share_of_bytes_in_experts": sizes.experts / sizes.before,
        "bytes_before": sizes.before,
        "bytes_after": sizes.after,
        "bytes_of_files": num_bytes,
        "matrices": [dataclasses.asdict(each) for each in matrices],
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        _print_quantized(report)
    return 0


def _print_quantized(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("matrix", "error", "of the worst expert", box=None, pad_edge=False)
    for each in report["matrices"]:
        table.add_row(each["name"], f"{each['error']:.4f}", f"{each['worst_error']:.4f}")
    before, after = report["bytes_before"], report["bytes_after"]
    # Longer than any table: a path is not broken.
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"{report['share_of_expert_bytes_quantized']:.1%} of the experts' bytes are quantized; "
        f"experts are {report['share_of_bytes_in_experts']:.1%} of the model"
    )
    console.print(f"{before:,} bytes before, {after:,} after: {before / after:.2f} times less")
    console.print(f"{report['output']}: {report['bytes_of_files']:,} bytes of files")


def run_export(arguments: argparse.Namespace) -> int:
    from switchx import api
    from switchx.inference.export import Shapes, Target, export_model
    from switchx.manifest import require_free

    if arguments.device_kind and len(arguments.platform) > 1:
        raise ValueError(
            f"--device_kind={arguments.device_kind} with --platform="
            f"{','.join(arguments.platform)}; export for one platform at a time"
        )
    output = require_free(arguments.output)
    shapes = Shapes(arguments.batch_size, arguments.input_length)
    mesh = shared.mesh_spec(arguments)
    model = api.load(arguments.model_dir, arguments.step)
    decoding = DecodingConfig(
        is_prompt_bidirectional=model.text_format.is_prompt_bidirectional,
        **shared.options_of(arguments, DecodingConfig),
    )

    content, num_bytes = export_model(
        output,
        model.config,
        model.params,
        decoding,
        shapes,
        [Target(name, arguments.device_kind, mesh) for name in arguments.platform],
        _provenance(arguments, model),
        model.save_vocabulary,
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
    }
    print(json.dumps(report) if arguments.json else _text(report))
    return 0


def _provenance(arguments: argparse.Namespace, model) -> dict[str, Any]:
    """Where the export comes from, how to make it again, and what texts become for it."""
    from switchx.inference.artifact import is_artifact
    from switchx.provenance import git_commit

    names = ("model_dir", "output", "device_kind", "batch_size", "input_length")
    given = {name: getattr(arguments, name) for name in names}
    given |= shared.options_of(arguments, DecodingConfig)
    if not is_artifact(arguments.model_dir):
        given["step"] = model.step
    given["platform"] = ",".join(arguments.platform)
    if arguments.mesh:
        given["mesh"] = ",".join(f"{axis}={size}" for axis, size in arguments.mesh.items())
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return {
        "rebuild": shlex.join(["switchx", "export", *words]),
        "fingerprint": model.fingerprint,
        "step": model.step,
        "switchx": git_commit(),
        "text_format": dataclasses.asdict(model.text_format),
    }


def _text(report: dict[str, Any]) -> str:
    lines = []
    for name, program in report["platforms"].items():
        devices = " x ".join(f"{axis}={n}" for axis, n in report["mesh"].items() if n > 1)
        same = ", to be run by this version of JAX" if program["needs_same_jax"] else ""
        where = f"mesh {devices}" if devices else "one device"
        lines.append(f"{name}: {program['device_kind']}, {where}{same}")
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
