# SPDX-License-Identifier: Apache-2.0
"""Arguments of commands that use a model: its devices, and its programs' compiler options."""

import argparse

from switchx.cli import arguments as shared

# The axes of a MeshSpec, whose module imports JAX; not `pipe`, which is for training.
MESH_AXES = ("data", "fsdp", "node", "expert", "model")


def add_mesh(parser: shared.CommandParser, default: str) -> None:
    """Adds `--mesh=expert=4,model=2`; `mesh_spec` turns it into a MeshSpec."""
    parser.add_argument(
        "--mesh",
        type=_mesh_sizes,
        metavar="AXIS=N,..",
        help=f"devices along the axes {', '.join(MESH_AXES)} that the model and its batches "
        f"are split over, as expert=4,model=2; data takes the rest; default: {default}",
    )


def mesh_spec(arguments: argparse.Namespace):
    """The MeshSpec of `--mesh`, or None without it."""
    from switchx.partitioning.mesh import MeshSpec

    return None if arguments.mesh is None else MeshSpec(**arguments.mesh)


def add_xla(parser: shared.CommandParser) -> None:
    """Adds the repeatable `--xla=NAME=VALUE`, which `compiler_options` reads."""
    parser.add_argument(
        "--xla",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="compiler option for the model's programs, such as xla_gpu_autotune_level=2 "
        "(docs/inference.md); may be given several times",
    )


def compiler_options(arguments: argparse.Namespace):
    """The CompilerOptions of `--xla`, for any platform; raises ValueError as they do."""
    from switchx.partitioning.compiler_options import CompilerOptions

    return CompilerOptions(*[tuple(arguments.xla)] * 3)


def _mesh_sizes(text: str) -> dict[str, int]:
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in MESH_AXES or not size.isdecimal() or not int(size) or axis in sizes:
            raise argparse.ArgumentTypeError(
                f"{part!r} is no axis of a mesh; write AXIS=N with N of at least 1, each of "
                f"{', '.join(MESH_AXES)} once at most, as expert=4,model=2"
            )
        sizes[axis] = int(size)
    return sizes
