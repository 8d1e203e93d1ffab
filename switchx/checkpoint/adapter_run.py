# SPDX-License-Identifier: Apache-2.0
"""`adapter.json`: the base model of an adapter run, identified by its checkpoint's fingerprint.

Such a run's checkpoints hold only the adapters (`models/adapters.py`); `restore_params` reads
the base, too, and merges the adapters into it.
"""

import dataclasses
import json

from switchx.checkpoint.run_folder import RunFolder
from switchx.fields import require
from switchx.files import write_atomically
from switchx.models.adapters import LoRASpec
from switchx.object_store import read_json_object


@dataclasses.dataclass(frozen=True)
class AdapterRecord:
    """The base and the adapters of a run.

    Attributes:
        spec: the adapters, with the base's folder and step.
        fingerprint: `checkpoint_fingerprint` of the base.
    """

    spec: LoRASpec
    fingerprint: str

    def write(self, run: RunFolder) -> None:
        content = dataclasses.asdict(self.spec) | {"fingerprint": self.fingerprint}
        content["base"] = str(self.spec.base)
        write_atomically(run.adapter, (json.dumps(content, indent=2) + "\n").encode())

    @classmethod
    def read(cls, run: RunFolder) -> "AdapterRecord | None":
        """Reads the record of an adapter run; None for any other run.

        Raises:
            ValueError: the file cannot be read.
        """
        if not run.adapter.is_file():
            return None
        try:
            content = read_json_object(run.adapter)
            fingerprint = content.pop("fingerprint")
            spec = LoRASpec(**content)
            own = (spec.base, str), (spec.step, int), (spec.rank, int), (fingerprint, str)
            for value, kind in own:
                require(type(value) is kind, f"{value!r:.80} is no {kind.__name__}")
            return cls(spec, fingerprint)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{run.adapter} cannot be read ({error!r:.200}); copy the run again"
            ) from error


def require_merged(run: RunFolder, name: str) -> None:
    """Checks that a run has a whole model.

    Args:
        name: name of the setting that gave the folder, for messages.

    Raises:
        ValueError: it has only adapters.
    """
    require(
        not run.adapter.is_file(),
        f"{name}={str(run.path)!r} has adapters alone, and a whole model is read here; merge "
        f"them first: switchx reshape --merge_adapter --model_dir={run.path} --output=DIR",
    )
