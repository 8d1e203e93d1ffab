# SPDX-License-Identifier: Apache-2.0
"""Programs that a test compiles again and again, compiled once."""

import contextlib
import pathlib
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def compiled_once(folder: pathlib.Path) -> Iterator[None]:
    """Keeps whatever is compiled in this process in `folder`, however quickly it was."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(folder), 0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
