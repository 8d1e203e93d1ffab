# SPDX-License-Identifier: Apache-2.0
"""A model in use on a device mesh: where its arrays are, and what carries its tokens there.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 3.1, Table 2: decoding with the experts
over devices. Parameters follow the rules that training follows. Dims: B G T E
"""

import contextlib
import dataclasses
import math

import jax

from switchx.inference.quantize import is_quantized
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec, batch_parts
from switchx.partitioning.placement import Placement
from switchx.partitioning.rules import Rules, param_shardings


@dataclasses.dataclass(frozen=True)
class ModelMesh:
    """The devices of a model in use.

    Attributes:
        mesh: None is the default device alone.
        rules: what is split over which axis of the mesh.
    """

    mesh: jax.sharding.Mesh | None = None
    rules: Rules = Rules()

    @classmethod
    def of(cls, spec: MeshSpec | None) -> "ModelMesh":
        """Raises ValueError where the mesh does not use exactly the devices there are."""
        return ONE_DEVICE if spec is None else cls(spec.build(), spec.rules)

    def use(self):
        """A context in which programs are traced for these devices, and run on them."""
        if self.mesh is None:
            return contextlib.nullcontext()
        return use_mesh(self.mesh, self.rules)

    def config(self, config: ModelConfig, params: dict) -> ModelConfig:
        """The model with the dispatcher that carries its tokens to their experts here.

        Without a capacity, groups decide nothing: each row of a batch becomes one, so that
        devices have whole groups. With one, groups stay as they are, and the compiler
        splits them.

        Raises:
            ValueError: experts have a capacity and are quantized.
        """
        switch = config.switch
        if self.mesh is None or switch is None or switch.has_attention:
            return config
        leaves = jax.tree.leaves(params, is_leaf=is_quantized)
        has_quantized = any(map(is_quantized, leaves))
        if has_capacity(switch):
            if has_quantized:
                raise ValueError(
                    "quantized experts with a capacity do not run on a mesh: decode without "
                    "(dropless=True, --capacity=dropless), on one device, or not quantized"
                )
            return dataclasses.replace(
                config, switch=dataclasses.replace(switch, dispatcher="sort")
            )
        place = Placement.on(self.mesh, self.rules)
        dispatcher = "dropless"
        if place.experts:
            is_sent = set(place.experts) <= set(place.batch)
            dispatcher = "ragged_all_to_all" if is_sent else "sliced"
        # Any `expert_capacity` makes a row a group; where nothing is dropped it is not read.
        switch = dataclasses.replace(switch, dispatcher=dispatcher, expert_capacity=1)
        return dataclasses.replace(config, switch=switch)

    def abstract(self, params: dict) -> dict:
        """Shape structs of parameters, with where they are to be.

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
        """The parameters, each device with its part; raises as `abstract` does."""
        if self.mesh is None:
            return params
        return jax.device_put(params, param_shardings(self.rules, self.mesh, params))

    def batches(self, config: ModelConfig, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Sizes of batches whose rows divide over the devices, from others.

        Where experts have a capacity they are as they were: a larger batch would be grouped
        in another way.
        """
        if self.mesh is None or (config.switch is not None and has_capacity(config.switch)):
            return sizes
        parts = batch_parts(self.mesh, self.rules)
        return tuple(sorted({math.ceil(size / parts) * parts for size in sizes}))


ONE_DEVICE = ModelMesh()


def has_capacity(switch: SwitchConfig) -> bool:
    """Whether a token's result depends on the others of its group."""
    return switch.router.overflow != "dropless" or switch.router.kind == "expert_choice"
