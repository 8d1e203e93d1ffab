# SPDX-License-Identifier: Apache-2.0
"""What is seen first: the README's picture and terminal, and the notebooks with outputs.

    make picture      docs/picture.svg, docs/terminal.svg
    make notebooks    experiments/first_steps/*.ipynb

Both run the model and the texts that ship, in a folder that is deleted.
"""

import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from rich import terminal_theme
from rich.console import Console
from rich.text import Text

from experiments.pages import ROOT

PICTURE, TERMINAL = ROOT / "docs/picture.svg", ROOT / "docs/terminal.svg"
NOTEBOOKS = sorted((ROOT / "experiments/first_steps").glob("*.ipynb"))
COMMANDS = (
    "switchx --version",
    "switchx atlas tiny --output=atlas",
    "switchx drops atlas/record_tiny.parquet --factors=1,1.5,2 --group_sizes=512",
)
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def picture() -> None:
    """Runs the commands; writes the atlas' picture, and what the terminal said."""
    console = Console(record=True, width=100, file=io.StringIO(), highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            console.print(Text(f"$ {command}", style="bold"))
            program = f'switchx() {{ "{sys.executable}" -m switchx "$@"; }}; {command}'
            output = subprocess.check_output(
                ["bash", "-c", program], cwd=folder, env=os.environ | ENVIRONMENT, text=True
            )
            console.print(Text.from_ansi(output.replace(f"{folder}/", "")))
        shutil.copy(pathlib.Path(folder) / "atlas/picture.svg", PICTURE)
    svg = console.export_svg(
        title="switchx", theme=terminal_theme.DEFAULT_TERMINAL_THEME, unique_id="switchx"
    )
    # Without the fonts that it would fetch.
    TERMINAL.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))


def notebooks() -> None:
    """Executes the notebooks, and writes them with their outputs."""
    import nbclient
    import nbformat

    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        client = nbclient.NotebookClient(
            notebook, timeout=1200, kernel_name="python3", record_timing=False
        )
        with tempfile.TemporaryDirectory() as folder:
            cache = {"XDG_CACHE_HOME": f"{folder}/cache"}
            client.execute(cwd=folder, env=os.environ | ENVIRONMENT | cache)
            text = nbformat.writes(notebook).replace(f"{folder}/", "")
        path.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    {"picture": picture, "notebooks": notebooks}[sys.argv[1]]()
