# SPDX-License-Identifier: Apache-2.0
"""switchx: sparse Mixture-of-Experts Transformers in JAX."""

__all__ = ["load"]


def __getattr__(name: str):
    # Imported when it is first used: `switchx --help` does not wait for JAX.
    if name == "load":
        from switchx.api import load

        return load
    raise AttributeError(f"module 'switchx' has no attribute {name!r}")
