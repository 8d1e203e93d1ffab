# SPDX-License-Identifier: Apache-2.0
"""Banks of experts on the devices of a mesh: filled from the host, gradients taken back.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 2.2: each process stores its own devices'
experts. The mesh's rules split the experts of a layer into P parts, over the axes of E; a
process has the experts of those parts that its devices hold. It has them whole: where the
rules split an expert's matrices too (D over `fsdp`, F over `model`), a device gets its slices,
and gradients are gathered before they leave the devices. So if an axis that does not split
the experts (`data`, `fsdp`, `model`) crosses processes, each of these has its own copy of an
expert; their gradients are equal, to the bit, and so are the copies.

Rows of experts that a step uses are moved: T of each part, as many as the part with the most of
them has, rounded up to a power of two or to all, so that only few programs are compiled.
Which experts are used is known to all processes, so all of them run the same programs.

Dims: D model, F ffn, E experts, P parts of them, T rows of a part, X = P T rows of all parts
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from switchx.partitioning.rules import Rules, param_sharding
from switchx.training.offload.disk_periods import Bank

PADDING = -1


class DeviceBanks:
    """Moves a layer's experts to the devices of a mesh, and their gradients back.

    Attributes:
        is_own_E: experts that this process stores.
        is_saved_E: experts that this process stores and no process before it does: over all
            processes, each expert once.
        sharding: sharding of arrays `[E, ...]` or `[X, ...]`: their first dimension is split by
            parts, the others are whole.
    """

    def __init__(
        self,
        mesh: Mesh,
        rules: Rules,
        num_experts: int,
        params: Mapping[str, jax.ShapeDtypeStruct],
    ):
        """Compiles nothing yet.

        Args:
            params: shapes `[E, ...]` by path of the expert parameters of one or several layers.

        Raises:
            ValueError: the mesh does not divide the experts, or their matrices.
        """
        # Shardings of banks and of rows alike: P divides the number of either.
        self._shardings = {
            name: param_sharding(rules, mesh, name, leaf) for name, leaf in params.items()
        }
        self._mesh, self._E = mesh, num_experts
        axes = rules.axes("E", mesh, table="expert_params")
        self.sharding = NamedSharding(mesh, PartitionSpec(axes or None))
        index_of = self.sharding.devices_indices_map((num_experts,))
        begin_of = {
            device: index[0].indices(num_experts)[0] for device, index in index_of.items()
        }
        self._P = len(set(begin_of.values()))
        part_of = {device: begin * self._P // num_experts for device, begin in begin_of.items()}
        here = jax.process_index()
        own = {part for device, part in part_of.items() if device.process_index == here}
        first = {
            part: min(d.process_index for d, other in part_of.items() if other == part)
            for part in own
        }
        part_E = np.arange(num_experts) * self._P // num_experts
        self.is_own_E = np.isin(part_E, sorted(own))
        self.is_saved_E = np.isin(part_E, [part for part in own if first[part] == here])
        self._fill = jax.jit(self._fill_bank)
        self._take = jax.jit(self._take_rows, static_argnums=0, out_shardings=self.sharding)

    def rows(self, used_E: np.ndarray) -> np.ndarray:
        """`expert_X`: the expert that each row belongs to, PADDING for rows of none.

        Within a part, experts are in order.
        """
        used_PE = used_E.reshape(self._P, -1)
        most, size = int(np.max(np.sum(used_PE, axis=1))), used_PE.shape[1]
        T = min(1 << max(most - 1, 0).bit_length(), size)
        expert_PT = np.full((self._P, T), PADDING)
        for part, used in enumerate(used_PE):
            experts = np.flatnonzero(used)
            expert_PT[part, : len(experts)] = part * size + experts
        return expert_PT.reshape(-1)

    def own_rows(self, expert_X: np.ndarray) -> np.ndarray:
        """Numbers of the rows of experts that this process stores, in order."""
        return np.flatnonzero((expert_X != PADDING) & self.is_own_E[expert_X])

    def put(self, rows: Mapping[str, np.ndarray], expert_X: np.ndarray) -> Bank:
        """The bank with these rows, zeros for all other experts.

        Args:
            rows: parameters `[X, ...]` by path; rows of other processes' experts are not read.
                The memory must not change: on a CPU a device's array may be this one.
        """
        placed = {
            name: jax.make_array_from_callback(
                row.shape, self._shardings[name], row.__getitem__
            )
            for name, row in rows.items()
        }
        if self._is_whole(expert_X):
            return placed
        return self._fill(placed, self._places(expert_X))

    def take(self, name: str, bank: Bank, expert_X: np.ndarray) -> np.ndarray:
        """The rows of this process's experts, of one parameter of a bank, as in `own_rows`."""
        rows = bank[name]
        is_gathered = rows.sharding.is_equivalent_to(self.sharding, rows.ndim)
        if not (is_gathered and self._is_whole(expert_X)):
            rows = self._take(self._shardings[name].spec, rows, self._places(expert_X))
        return self.local(rows, self.own_rows(expert_X))

    def local(self, array: jax.Array, rows: np.ndarray) -> np.ndarray:
        """Rows of an array with `sharding`, from parts that are on this process's devices.

        They are copied, unless they are all rows of one part: on a CPU, a view keeps the
        device's whole array.

        Args:
            rows: numbers of the rows, ascending.
        """
        size = len(array) // self._P
        shards = {
            (shard.index[0].start or 0) // size: shard.data
            for shard in array.addressable_shards
        }
        if len(shards) == 1 and len(rows) == size:
            return np.asarray(*shards.values())
        found = np.empty((len(rows), *array.shape[1:]), array.dtype)
        for part, shard in shards.items():
            begin, end = np.searchsorted(rows, (part * size, (part + 1) * size))
            own = rows[begin:end] - part * size
            # With mode="raise" NumPy would copy twice.
            np.take(np.asarray(shard), own, axis=0, out=found[begin:end], mode="clip")
        return found

    def _is_whole(self, expert_X: np.ndarray) -> bool:
        """Whether the rows are all experts in order: the bank itself."""
        return np.array_equal(expert_X, np.arange(self._E))

    def _places(self, expert_X: np.ndarray) -> jax.Array:
        """The place of each row in the bank of its part; padding has none."""
        size = self._E // self._P
        place_X = np.where(expert_X == PADDING, size, expert_X % size).astype(np.int32)
        return jax.make_array_from_callback(place_X.shape, self.sharding, place_X.__getitem__)

    def _fill_bank(self, rows, place_X) -> Bank:
        specs = {name: self._shardings[name].spec for name in rows}

        def fill(rows, place_T):
            size = self._E // self._P
            return {
                name: jnp.zeros((size, *row.shape[1:]), row.dtype)
                .at[place_T]
                .set(row, mode="drop")
                for name, row in rows.items()
            }

        on_devices = functools.partial(jax.shard_map, mesh=self._mesh, out_specs=specs)
        return on_devices(fill, in_specs=(specs, self.sharding.spec))(rows, place_X)

    def _take_rows(self, spec, bank, place_X):
        on_devices = functools.partial(jax.shard_map, mesh=self._mesh, out_specs=spec)
        return on_devices(
            lambda bank, place_T: bank.at[place_T].get(mode="clip"),
            in_specs=(spec, self.sharding.spec),
        )(bank, place_X)
