# SPDX-License-Identifier: Apache-2.0
"""XLA's options, which travel with each program that is compiled."""

import dataclasses
import re

from switchx.fields import require

_OPTION = re.compile(r"xla_\w+=\S*")
# Options of programs that gather no weights. With bfloat16 propagation a loop over blocks reads
# a copy of all their weights in the products' dtype: half of the parameters' bytes more, from
# the forward pass to the end of the backward pass. If weights are gathered, it halves the
# bytes that are sent.
DEFAULT_OPTIONS = {"tpu": {"xla_jf_bf16_propagation": "False"}}
# What XLA puts into a command buffer (a CUDA graph) by itself, and loops and branches with it.
COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
# Options of programs that decode or score. On an H200 a batch of 1 and one of 96 rows took 12%
# less with loops in command buffers, with the same tokens (experiments/accelerator).
DECODING_OPTIONS = {"gpu": {"xla_gpu_enable_command_buffer": COMMANDS}}


@dataclasses.dataclass(frozen=True)
class CompilerOptions:
    """XLA's options for a job's or a model's compiled programs, `xla_name=value`, by platform.

    They travel with each program that is compiled, so that nothing in the environment has to be
    set before JAX starts, and XLA refuses a name that it does not know. Options for platforms
    other than the mesh's are not used. configs/xla/overlap.gin says what they do.
    `DEFAULT_OPTIONS` apply if a job does not set them and no weights are gathered,
    `DECODING_OPTIONS` when a model is used.

    Attributes:
        gpu, tpu, cpu: options for the platform of that name. Truth values are `True` and
            `False`; an empty value is an empty list, as of `xla_gpu_enable_command_buffer=`.
        not_on: pairs `(device_kind, xla_name)` of options that the compiler for a kind of chip
            refuses, such as `("TPU v5 lite", "xla_tpu_enable_async_all_to_all")`.
    """

    gpu: tuple[str, ...] = ()
    tpu: tuple[str, ...] = ()
    cpu: tuple[str, ...] = ()
    not_on: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        for platform in ("gpu", "tpu", "cpu"):
            options = getattr(self, platform)
            for option in options:
                require(
                    _OPTION.fullmatch(option) is not None,
                    f"CompilerOptions.{platform} has {option!r}; write xla_name=value, "
                    "without dashes, as xla_gpu_enable_latency_hiding_scheduler=True",
                )
            names = [option.partition("=")[0] for option in options]
            twice = sorted({name for name in names if names.count(name) > 1})
            require(
                not twice, f"CompilerOptions.{platform} sets {', '.join(twice)} twice; keep one"
            )
        known = {option.partition("=")[0] for option in (*self.gpu, *self.tpu, *self.cpu)}
        known |= {
            name
            for each in (DEFAULT_OPTIONS, DECODING_OPTIONS)
            for options in each.values()
            for name in options
        }
        unknown = [name for _, name in self.not_on if name not in known]
        require(
            not unknown,
            f"CompilerOptions.not_on has {', '.join(unknown)}, which no platform sets",
        )

    def of(
        self, platform: str, device_kind="", *, gathers_weights=False, defaults=DEFAULT_OPTIONS
    ) -> dict[str, str]:
        """The options for `jax.jit(compiler_options=...)` on a platform; none on unknown ones.

        Args:
            device_kind: kind of chip, as in `jax.Device.device_kind`.
            gathers_weights: whether devices keep slices of weights (`fsdp`).
            defaults: options by platform that apply if weights are not gathered.
        """
        platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
        options = {"gpu": self.gpu, "tpu": self.tpu, "cpu": self.cpu}.get(platform, ())
        found = dict(each.partition("=")[::2] for each in options)
        if not gathers_weights:
            found = defaults.get(platform, {}) | found
        refused = [name for kind, name in self.not_on if kind == device_kind]
        return {name: value for name, value in found.items() if name not in refused}

    def for_decoding(self, platform: str, device_kind: str = "") -> dict[str, str]:
        """The options of `of` for programs that decode or score."""
        return self.of(platform, device_kind, defaults=DECODING_OPTIONS)
