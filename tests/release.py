# SPDX-License-Identifier: Apache-2.0
"""`make release`: both distributions, built, installed elsewhere and used there.

python -m tests.release FOLDER

It builds an sdist and a wheel of each into FOLDER, from copies, since building leaves folders
behind. Then each wheel is installed in an empty environment outside of the checkout; there a
short main job is trained, and reported on, the tasks are listed, a server answers, the notebook
of first steps is executed, and the kernels are run.
"""

import configparser
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import venv

from tests.processes import ROOT, free_port

PACKAGES = ("switchx", "pallas_kernels")
# A relative link of a page, as Markdown writes it; of a picture, with the mark before it.
_LINK = re.compile(
    r"(?P<mark>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<path>(?!https?:|#)[^)]+)\)"
)
_NOTEBOOK = ROOT / "experiments/first_steps/first_steps.ipynb"
# No command of a new user takes longer, the notebook's neither.
MOST_S = 600


def copied(folder: pathlib.Path) -> pathlib.Path:
    """A copy of what the distribution switchx is built of, its links absolute."""
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in (*PACKAGES, "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=skip)
    for name in ("setup.cfg", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    url, version = setup["metadata"]["url"], setup["metadata"]["version"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (folder / "README.md").write_text(with_absolute_links(text, url, version), encoding="utf-8")
    return folder


def with_absolute_links(text: str, url: str, version: str) -> str:
    """A page whose links lead to the tagged files of a repository at `url`.

    Package indices show README.md away from the files that it links to.
    """

    def absolute(link: re.Match) -> str:
        kind = "raw" if link["mark"] else "blob"
        return f"{link['mark']}[{link['text']}]({url}/{kind}/v{version}/{link['path']})"

    # Twice: a picture may be the text of a link.
    return _LINK.sub(absolute, _LINK.sub(absolute, text))


def build(source: pathlib.Path, output: pathlib.Path, *formats: str) -> None:
    """Builds distributions of a folder by what is installed here.

    Raises:
        RuntimeError: with what the build said.
    """
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", output, *formats]
    done = subprocess.run([*command, source], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"building {source.name} failed: {done.stdout}{done.stderr}")


def main(output: pathlib.Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        sys.exit(f"{output} is not empty; move what is there away")
    with tempfile.TemporaryDirectory() as base:
        folder = pathlib.Path(base)
        build(copied(folder / "source"), output)
        build(folder / "source/pallas_kernels", output)
        (whole,) = output.glob("switchx-*.whl")
        (kernels,) = output.glob("moe_pallas_kernels-*.whl")
        _use(folder / "kernels", str(kernels), ["pallas-kernels", "--help"])
        (folder / "whole").mkdir()
        shutil.copy(_NOTEBOOK, folder / "whole")
        port = free_port()
        run = ["--model_dir=run"]
        files = ["--gin_file=configs/runs/pretrain_tiny.gin", "--gin.TRAIN_STEPS=20"]
        _use(
            folder / "whole",
            f"switchx[serve,client,notebooks] @ {whole.as_uri()}",
            ["switchx", "configs", "runs/pretrain_tiny.gin"],
            ["switchx", "train", *files, "--gin.CHECKPOINT_EVERY=20", *run],
            ["switchx", "report", *run],
            ["switchx", "tasks"],
            ["jupyter-execute", f"--timeout={MOST_S}", _NOTEBOOK.name],
            ["python", "-c", _SERVE_AND_ASK, "serve", *run, "--port", str(port)],
        )
    print("\n".join(sorted(str(path) for path in output.iterdir())))


def _use(folder: pathlib.Path, requirement: str, *commands: list[str]) -> None:
    """Runs commands in a new environment that has the requirement alone."""
    venv.create(folder / "venv", with_pip=True)
    # Without the checkout.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = ["python", "-m", "pip", "install", "--quiet", requirement]
    for program, *words in (install, *commands):
        print("$", program, *words, flush=True)
        command = [folder / "venv/bin" / program, *words]
        subprocess.run(command, cwd=folder, env=environment, check=True, timeout=MOST_S)


# The arguments are those of a `switchx serve` whose last one is its port.
_SERVE_AND_ASK = """
import asyncio, subprocess, sys
from switchx.client import Client

async def ask():
    async with Client(f"http://127.0.0.1:{sys.argv[-1]}", deadline_s=900) as client:
        print(await client.generate("for <extra_id_0> in range(3):"))

server = subprocess.Popen([sys.executable, "-m", "switchx", *sys.argv[1:]])
try:
    asyncio.run(ask())
finally:
    server.terminate()
    sys.exit(server.wait())
"""


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).absolute())
