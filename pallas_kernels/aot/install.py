# SPDX-License-Identifier: Apache-2.0
"""Installs the compilers of other machines' kernels, each into a folder of its own.

    python -m pallas_kernels.aot.install tpu .venv/aot_tpu
    python -m pallas_kernels.aot.install gpu .venv/aot_gpu
    python -m pallas_kernels.aot.install jax-0.11 .venv/aot_jax/0.11

They never go into the environment itself: a JAX that finds libtpu or a CUDA plugin takes the
machine for one with TPUs or GPUs. The versions are those that the metadata of the installed JAX
names; with `--no-deps`, since JAX itself is already there.

`jax-0.11` is an environment with a newer Python and JAX, as on machines with cards, with the
CUDA compiler of that JAX beside it. Gin, Grain and TFDS are not in it.
"""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys

# Beside JAX's own plugin: the assembler, its libraries, and a disassembler to read SASS.
CUDA_TOOLS = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-nvdisasm")
ROOT = pathlib.Path(__file__).parents[2]
STAMP = "installed.txt"
# Besides a newer JAX: what `switchx check accelerator` and the kernels' tests need.
PACKAGES = (
    *("flax>=0.12.8", "optax", "orbax-checkpoint", "tensorstore", "safetensors", "flatbuffers"),
    *("sentencepiece", "rich", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis"),
)
# JAX 0.11 and later need this Python; the variable names one if none is found.
NEWER_PYTHON, PYTHON_VARIABLE = (3, 12), "NEWER_PYTHON"


def requirements(back_end: str) -> list[str]:
    """The requirements that pip installs.

    Raises:
        ValueError: the back end is none of `tpu`, `gpu` and `jax-X.Y`.
    """
    if newer := re.fullmatch(r"jax-(0\.\d+)", back_end):
        return [f"jax=={newer[1]}.*", *PACKAGES]
    if back_end == "tpu":
        return [libtpu_requirement(importlib.metadata.requires("jax"))]
    if back_end == "gpu":
        version = importlib.metadata.version("jax")
        plugins = [f"jax-cuda13-{part}=={version}" for part in ("plugin", "pjrt")]
        return plugins + [f"{tool}>=13,<14" for tool in CUDA_TOOLS]
    raise ValueError(f"back_end={back_end!r} is not one of tpu, gpu, jax-X.Y")


def libtpu_requirement(of_jax: list[str]) -> str:
    """`libtpu==...`, out of what JAX's extra `tpu` requires."""
    pattern = re.compile(r"""(libtpu[^;\s]*)\s*;\s*extra\s*==\s*["']tpu["']""")
    [found] = filter(None, map(pattern.match, of_jax))
    return found.group(1)


def install(back_end: str, folder: pathlib.Path) -> bool:
    """Installs, unless the folder already holds this; returns whether anything was done."""
    wanted = requirements(back_end)
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text().splitlines() == wanted:
        return False
    pip = ["-m", "pip", "install", "--quiet"]
    if back_end.startswith("jax-"):
        subprocess.run([newer_python(), "-m", "venv", str(folder / "env")], check=True)
        python = str(folder / "env" / "bin" / "python")
        subprocess.run([python, *pip, *wanted], check=True)
        # The compiler is installed by this file, run under that JAX.
        compiler = [python, "-m", "pallas_kernels.aot.install", "gpu", str(folder / "gpu")]
        subprocess.run(compiler, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    else:
        target = ["--upgrade", "--no-deps", "--target", str(folder)]
        subprocess.run([sys.executable, *pip, *target, *wanted], check=True)
    stamp.write_text("\n".join(wanted) + "\n")
    return True


def newer_python() -> str:
    """A Python that newer JAX versions run on: the variable's, one on the path, or pyenv's.

    Raises:
        FileNotFoundError: there is none.
    """
    named = [each for each in [os.environ.get(PYTHON_VARIABLE)] if each]
    versions = [f"{NEWER_PYTHON[0]}.{minor}" for minor in range(14, NEWER_PYTHON[1] - 1, -1)]
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    found = [str(each) for v in versions for each in pyenv.glob(f"versions/{v}.*/bin/python3")]
    on_path = [path for v in versions if (path := shutil.which(f"python{v}"))]
    for python in named or [*on_path, *found]:
        is_newer = f"import sys; sys.exit(sys.version_info < {NEWER_PYTHON})"
        # pyenv's own commands exist even for versions that are not in use.
        if subprocess.run([python, "-c", is_newer], capture_output=True).returncode == 0:
            return python
    raise FileNotFoundError(
        f"no Python {'.'.join(map(str, NEWER_PYTHON))} or newer among {named or versions}; "
        f"name one: make test-aot {PYTHON_VARIABLE}=/path/to/python3.12"
    )


def main() -> None:
    back_end, folder = sys.argv[1:]
    if install(back_end, pathlib.Path(folder)):
        print(f"Installed {', '.join(requirements(back_end))} into {folder}")


if __name__ == "__main__":
    main()
