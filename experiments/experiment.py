# SPDX-License-Identifier: Apache-2.0
"""What an experiment is asked for: its folders, its data, which is checked, and its models."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Sequence

from experiments.fingerprints import sha256
from experiments.pages import ROOT
from switchx.files import write_atomically

HASHES = ROOT / "experiments/data.json"
ENGLISH = ("openstax/*.txt.gz", "movie_reviews/*.txt.gz")
# Of the upper rungs, which would read those some five times.
MORE_ENGLISH = ("ebooks/*.txt.gz",)
# Over the bindings of a quick run: two small steps, an evaluation before and one after them.
QUICK = (
    "TRAIN_STEPS=2", "EVAL_EVERY=2", "LOG_EVERY=1", "CHECKPOINT_EVERY=2", "BATCH_SIZE=8",
    "TrainingJob.eval_batches=1",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What an experiment is asked for by.

    Attributes:
        name: its folder below `experiments/`.
        output: where runs of all experiments are.
        data: folder of the data, such as `openstax/` and `movie_reviews/`.
        is_quick: a smoke of a minute; nothing is published.
        takes_other_data: files may have other hashes than `data.json` says.
    """

    name: str
    output: pathlib.Path
    data: pathlib.Path | None
    is_quick: bool = False
    takes_other_data: bool = False

    @property
    def folder(self) -> pathlib.Path:
        return ROOT / "experiments" / self.name

    @property
    def runs(self) -> pathlib.Path:
        return self.output.absolute() / (self.name + "_quick" * self.is_quick)

    @property
    def is_published(self) -> bool:
        """Whether results go into the checkout: those of a whole run on the files that
        `data.json` knows."""
        return not (self.is_quick or self.takes_other_data)

    @property
    def quick_bindings(self) -> tuple[str, ...]:
        """Over the bindings of a run, where it is a quick one."""
        return QUICK * self.is_quick

    def again(self, name: str | None = None, **changes: str) -> str:
        """The command of this experiment, or of another one, as a user types it.

        Args:
            changes: `data` or `output`, in place of what this one has.
        """
        data = changes.get("data", self.data or "FOLDER")
        output = changes.get("output", self.output)
        quick = " QUICK=1" * self.is_quick
        other = " ARGS=--other_data" * self.takes_other_data
        return (
            f"`make experiments EXPERIMENT={name or self.name} DATA={data} "
            f"OUTPUT={output}{quick}{other}`"
        )

    def files(self, *patterns: str) -> dict[str, pathlib.Path]:
        """Data files by their names below the data folder, as sorted, each checked.

        Args:
            patterns: of names, such as `openstax/*.txt.gz`.

        Raises:
            ValueError: no folder is given, files are missing or have other hashes, or others
                than those that this experiment was begun with.
        """
        known = json.loads(HASHES.read_text())
        wanted = [
            name for name in known if any(pathlib.PurePath(name).match(p) for p in patterns)
        ]
        if not wanted:
            raise ValueError(f"{HASHES.name} knows no file {' or '.join(patterns)}")
        if self.data is None:
            raise ValueError(
                f"no data folder; give one with {', '.join(patterns)}: {self.again()}"
            )
        found = {name: self.data.absolute() / name for name in sorted(wanted)}
        missing = [name for name, path in found.items() if not path.is_file()]
        if missing:
            raise ValueError(
                f"{self.data} has no {', '.join(missing)}; get the data: {get_data(self.data)}"
            )
        hashes = {name: sha256(path) for name, path in found.items()}
        changed = [name for name, digest in hashes.items() if digest != known[name]]
        if changed and not self.takes_other_data:
            taken = dataclasses.replace(self, takes_other_data=True)
            raise ValueError(
                f"of {self.data}, {', '.join(changed)} have other hashes than experiments/"
                f"data.json: results would not be comparable; make those: "
                f"{get_data(self.data)}, or have results of your own: {taken.again()}"
            )
        self._begin_with(hashes)
        return found

    def _begin_with(self, hashes: dict[str, str]) -> None:
        """Notes what files this experiment reads; its runs are all of the same ones."""
        file = self.runs / "data.json"
        begun = json.loads(file.read_text()) if file.exists() else {}
        changed = [name for name, digest in hashes.items() if begun.get(name, digest) != digest]
        if changed:
            raise ValueError(
                f"{self.runs} was begun with other files than {self.data} has: "
                f"{', '.join(changed)}; begin anew: {self.again(output='OTHER')}"
            )
        if begun | hashes != begun:
            file.parent.mkdir(parents=True, exist_ok=True)
            # Cells beside this one read it.
            write_atomically(file, f"{json.dumps(begun | hashes, indent=1)}\n".encode())

    def placed(self, texts: Sequence[str]) -> list[str]:
        """The texts with this machine's places in them.

        `<data PATTERNS>` is the tuple of files (`files`), `<data>` their folder and
        `<run NAME>` a run of this experiment. What has been done is known by the texts
        without places, so that folders may be moved.
        """

        def place(match: re.Match) -> str:
            kind, _, name = match[1].partition(" ")
            files = self.files(*name.split()) if kind == "data" and name else {}
            folder = self.runs if kind == "run" else self.data.absolute()
            return str(tuple(map(str, files.values())) if files else folder / name)

        return [re.sub(r"<((?:data|run)[^>]*)>", place, text) for text in texts]


@dataclasses.dataclass(frozen=True)
class Contender:
    """A model, as gin bindings over the common run."""

    name: str
    bindings: tuple[str, ...] = ()


def get_data(folder: pathlib.Path) -> str:
    """The commands that make the data."""
    prepare = "python3 -m experiments.prepare_data --sources=sources"
    return f"`{prepare} --commands | sh && {prepare} --output={folder}`"


def run_name(contender: str, seed: int) -> str:
    """Folder of a contender's run of a seed."""
    return f"{contender.replace(',', '').replace(' ', '_')}_seed{seed}"
