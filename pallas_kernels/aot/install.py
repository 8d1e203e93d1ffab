# SPDX-License-Identifier: Apache-2.0
"""Installs the compilers of other machines' kernels, each into a folder of its own.

    python -m pallas_kernels.aot.install tpu .venv/aot_tpu
    python -m pallas_kernels.aot.install gpu .venv/aot_gpu

Never into the environment itself: a JAX that finds libtpu or a CUDA plugin takes the machine
for one with TPUs or GPUs. The versions are those of the JAX that is installed, which its
metadata names; `--no-deps`, as JAX itself is there already.
"""

import importlib.metadata
import pathlib
import re
import subprocess
import sys

# Beside JAX's own plugin: the assembler, its libraries, and a disassembler to read SASS.
CUDA_TOOLS = (
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
    "nvidia-cuda-runtime",
    "nvidia-cuda-nvdisasm",
)
STAMP = "installed.txt"


def requirements(back_end: str) -> list[str]:
    """The requirements that pip installs.

    Raises:
        ValueError: a back end that is neither `tpu` nor `gpu`.
    """
    if back_end == "tpu":
        return [libtpu_requirement(importlib.metadata.requires("jax"))]
    if back_end == "gpu":
        version = importlib.metadata.version("jax")
        plugins = [f"jax-cuda13-{part}=={version}" for part in ("plugin", "pjrt")]
        return plugins + [f"{tool}>=13,<14" for tool in CUDA_TOOLS]
    raise ValueError(f"back_end={back_end!r} is not one of tpu, gpu")


def libtpu_requirement(of_jax: list[str]) -> str:
    """`libtpu==...`, out of what JAX's extra `tpu` requires."""
    pattern = re.compile(r"""(libtpu[^;\s]*)\s*;\s*extra\s*==\s*["']tpu["']""")
    [found] = filter(None, map(pattern.match, of_jax))
    return found.group(1)


def install(back_end: str, folder: pathlib.Path) -> bool:
    """Installs, unless the folder holds just that; returns whether there was anything to do."""
    wanted = requirements(back_end)
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text().splitlines() == wanted:
        return False
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), *wanted], check=True)
    stamp.write_text("\n".join(wanted) + "\n")
    return True


def main() -> None:
    back_end, folder = sys.argv[1:]
    if install(back_end, pathlib.Path(folder)):
        print(f"Installed {', '.join(requirements(back_end))} into {folder}")


if __name__ == "__main__":
    main()
