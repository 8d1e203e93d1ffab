# SPDX-License-Identifier: Apache-2.0
"""The card that `check accelerator` measures, and why another one is refused."""

import dataclasses
import importlib.metadata
import re
import shutil
import subprocess

REHEARSAL = "rehearsal"  # in place of a card's name
LEAST_CAPABILITY = 8.0
# The oldest NVIDIA drivers that run a toolkit's programs, by major version of CUDA.
LEAST_DRIVER = {12: 525, 13: 580}


@dataclasses.dataclass(frozen=True)
class Card:
    """The measured card: an NVIDIA GPU, or none in a rehearsal.

    Attributes:
        driver: its version; None in a rehearsal.
    """

    name: str
    driver: str | None = None

    @property
    def is_rehearsal(self) -> bool:
        return self.name == REHEARSAL


def find_card() -> Card:
    """The first NVIDIA card of this machine.

    Raises:
        ValueError: there is no card, or it or its driver is too old.
    """
    way_out = "run with --rehearsal to go through all parts on a CPU"
    if (smi := shutil.which("nvidia-smi")) is None:
        raise ValueError(f"no accelerator here: there is no nvidia-smi; {way_out}")
    query = "--query-gpu=name,driver_version,compute_cap"
    words = [smi, query, "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode or not done.stdout.strip():
        output = (done.stdout + done.stderr).strip()
        raise ValueError(f"no accelerator here: nvidia-smi says {output!r:.200}; {way_out}")
    line = done.stdout.strip().splitlines()[0]
    if not (found := re.fullmatch(r"(.+), *(\d[\d.]*), *(\d+\.\d+)", line)):
        raise ValueError(f"nvidia-smi names no card, driver and capability: {line!r:.200}")
    name, driver, capability = found.groups()
    if float(capability) < LEAST_CAPABILITY:
        raise ValueError(
            f"{name} has compute capability {capability}; the kernels need {LEAST_CAPABILITY} "
            f"(Ampere) or later; {way_out}"
        )
    check_driver(driver, toolkit())
    return Card(name, driver)


def toolkit() -> int:
    """The major version of CUDA that the installed JAX brings.

    Raises:
        ValueError: JAX has no plug-in for NVIDIA's cards.
    """
    for major in sorted(LEAST_DRIVER, reverse=True):
        try:
            importlib.metadata.version(f"jax-cuda{major}-plugin")
        except importlib.metadata.PackageNotFoundError:
            continue
        return major
    raise ValueError(
        "JAX has no plug-in for NVIDIA's cards here; pip install -e '.[gpu]' (or '.[gpu12]')"
    )


def check_driver(driver: str, cuda: int) -> None:
    """Raises ValueError if the driver is too old for the toolkit."""
    least = LEAST_DRIVER[cuda]
    if int(driver.partition(".")[0]) < least:
        raise ValueError(
            f"the driver is {driver}, and JAX here brings CUDA {cuda}, which needs {least} or "
            "later; update the driver, or install JAX for an older CUDA ('.[gpu12]')"
        )
