# SPDX-License-Identifier: Apache-2.0
"""switchx: sparse Mixture-of-Experts Transformers in JAX."""

import importlib
import importlib.metadata

# Where they are; imported when first used: `switchx --help` does not wait for JAX.
_HOMES = {
    "Model": "switchx.api",
    "load": "switchx.api",
    "job_from_gin": "switchx.gin_config.building",
    "train": "switchx.jobs",
    "evaluate": "switchx.model_evaluation",
    "evaluate_checkpoints": "switchx.model_evaluation",
}
__all__ = [*_HOMES]


def __getattr__(name: str):
    if name == "__version__":
        return importlib.metadata.version("switchx")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'switchx' has no attribute {name!r}")


def __dir__():
    return [*globals(), *__all__]
