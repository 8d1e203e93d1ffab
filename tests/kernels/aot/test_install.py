# SPDX-License-Identifier: Apache-2.0
import importlib.metadata
import subprocess

import pytest

from pallas_kernels.aot import install


def test_versions_are_those_of_the_installed_jax():
    version = importlib.metadata.version("jax")
    gpu = install.requirements("gpu")
    assert gpu[:2] == [f"jax-cuda13-plugin=={version}", f"jax-cuda13-pjrt=={version}"]
    assert "nvidia-cuda-nvdisasm>=13,<14" in gpu
    [tpu] = install.requirements("tpu")
    assert tpu.startswith("libtpu==")


def test_libtpu_is_found_among_what_jax_requires():
    of_jax = [
        "numpy>=2.0",
        'jaxlib<=0.10.2,>=0.10.2; extra == "tpu"',
        'libtpu==0.0.42.*; extra == "tpu"',
        'libtpu==9; extra == "other"',
    ]
    assert install.libtpu_requirement(of_jax) == "libtpu==0.0.42.*"


def test_unknown_back_end_raises():
    with pytest.raises(ValueError, match="back_end='rocm' is not one of tpu, gpu"):
        install.requirements("rocm")


def test_installs_once_apart_from_the_environment(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, check: commands.append(command) or check
    )
    assert install.install("gpu", tmp_path)
    assert not install.install("gpu", tmp_path)
    [command] = commands
    assert command[command.index("--target") + 1] == str(tmp_path)
    assert "--no-deps" in command
    # Another JAX asks for others.
    monkeypatch.setattr(install, "requirements", lambda back_end: ["libtpu==1"])
    assert install.install("gpu", tmp_path)
    assert commands[1][-1] == "libtpu==1"
