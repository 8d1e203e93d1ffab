# SPDX-License-Identifier: Apache-2.0
"""XLA's options of a job's compiled steps, by platform.

They travel with each program that is compiled, so that nothing in the environment has to be
set before JAX starts, and XLA refuses a name that it does not know. What they do:
configs/xla/overlap.gin.
"""

import dataclasses
import re

_OPTION = re.compile(r"xla_\w+=\S+")


@dataclasses.dataclass(frozen=True)
class CompilerOptions:
    """Options as `xla_name=value`; those of other platforms than the mesh's are not used.

    Attributes:
        gpu, tpu: of the platform. Truth values are `True` and `False`.
    """

    gpu: tuple[str, ...] = ()
    tpu: tuple[str, ...] = ()

    def __post_init__(self):
        for field in dataclasses.fields(self):
            options = getattr(self, field.name)
            for option in options:
                if not _OPTION.fullmatch(option):
                    raise ValueError(
                        f"CompilerOptions.{field.name} has {option!r}; write xla_name=value, "
                        "without dashes, as xla_gpu_enable_latency_hiding_scheduler=True"
                    )
            names = [option.partition("=")[0] for option in options]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(
                    f"CompilerOptions.{field.name} sets {', '.join(twice)} twice; keep one"
                )

    def of(self, platform: str) -> dict[str, str]:
        """What `jax.jit(compiler_options=...)` takes on a platform; nothing on others."""
        platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
        options = {"gpu": self.gpu, "tpu": self.tpu}.get(platform, ())
        return {name: value for name, _, value in (each.partition("=") for each in options)}
