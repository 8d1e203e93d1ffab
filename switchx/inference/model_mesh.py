# SPDX-License-Identifier: Apache-2.0
"""Models in use on a device mesh: where their arrays are, how their programs are compiled.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 3.1, Table 2: decoding with the experts
split over devices. Parameters follow the same sharding rules as in training.

Dims: B batch
"""

import contextlib
import dataclasses
import functools
import math

import jax
from jax.experimental import multihost_utils

from switchx.inference.program_cache import PROGRAMS, Options
from switchx.inference.quantize import is_quantized
from switchx.models.config import ModelConfig
from switchx.partitioning.compiler_options import CompilerOptions
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec, batch_parts
from switchx.partitioning.rules import Rules, param_shardings


@dataclasses.dataclass(frozen=True)
class ModelMesh:
    """The devices of a model in use.

    Attributes:
        mesh: the mesh; None means the default device alone.
        rules: sharding rules: which dimension is split over which axis of the mesh.
        compiler: XLA's options for all programs.
    """

    mesh: jax.sharding.Mesh | None = None
    rules: Rules = Rules()
    compiler: CompilerOptions = CompilerOptions()

    @classmethod
    def of(cls, spec: MeshSpec | None, compiler=CompilerOptions()) -> "ModelMesh":
        """Raises ValueError where the mesh does not use exactly the devices that exist, or XLA
        refuses an option."""
        built = (None, Rules()) if spec is None else (spec.build(), spec.rules)
        devices = cls(*built, compiler)
        if options := dict(devices.options):
            try:
                jax.jit(lambda: 0, compiler_options=options).lower().compile()
            except jax.errors.JaxRuntimeError as error:
                way_out = "use names and values that this version of XLA knows"
                wrong = f"the compiler refuses {options}: {error}; {way_out}"
                raise ValueError(wrong) from error
        return devices

    @functools.cached_property
    def options(self) -> Options:
        """The options of `compiler` for these devices."""
        device = jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]
        options = self.compiler.for_decoding(device.platform, device.device_kind)
        return tuple(sorted(options.items()))

    def use(self):
        """A context in which programs are traced for these devices and run on them."""
        if self.mesh is None:
            return contextlib.nullcontext()
        return use_mesh(self.mesh, self.rules)

    def run(self, function, settings: tuple, shape: tuple, **arrays):
        """Runs a function, compiled for these devices, and returns its result. Programs of
        all threads begin in the same order on all devices; see `Programs.run`."""
        how = {"is_on_mesh": self.mesh is not None, "options": self.options}
        with self.use():
            return PROGRAMS.run(function, settings, shape, **how, **arrays)

    def check(self, config: ModelConfig, params: dict) -> None:
        """Raises ValueError where experts have a capacity and are quantized, on a mesh."""
        leaves = jax.tree.leaves(params, is_leaf=is_quantized)
        if self.mesh is not None and has_capacity(config) and any(map(is_quantized, leaves)):
            raise ValueError(
                "quantized experts with a capacity do not run on a mesh: decode without "
                "(dropless=True, --capacity=dropless), on one device, or not quantized"
            )

    def abstract(self, params: dict) -> dict:
        """Shape structs of parameters, with the shardings that they are to have.

        Raises:
            ValueError: a parameter does not divide over the mesh.
        """
        if self.mesh is None:
            return params
        return jax.tree.map(
            lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
            params,
            param_shardings(self.rules, self.mesh, params),
        )

    def place(self, params: dict) -> dict:
        """Places the parameters, each device getting its part; raises as `abstract` does."""
        if self.mesh is None:
            return params
        return jax.device_put(params, param_shardings(self.rules, self.mesh, params))

    def fetch(self, arrays):
        """Whole arrays of a pytree on the host, even where each process has only a part."""
        leaves = [leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array)]
        if all(leaf.is_fully_addressable for leaf in leaves):
            return jax.device_get(arrays)
        return multihost_utils.process_allgather(arrays, tiled=True)

    def batches(self, config: ModelConfig, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Rounds batch sizes up to ones whose rows divide over the devices.

        Where experts have a capacity the sizes stay as they are: a larger batch would be
        grouped differently.
        """
        if self.mesh is None or has_capacity(config):
            return sizes
        parts = batch_parts(self.mesh, self.rules)
        return tuple(sorted({math.ceil(size / parts) * parts for size in sizes}))


ONE_DEVICE = ModelMesh()


def has_capacity(config: ModelConfig) -> bool:
    """Whether a token's result depends on the others in its group."""
    if config.switch is None:
        return False
    router = config.switch.router
    return router.overflow != "dropless" or router.has_choosing_experts
