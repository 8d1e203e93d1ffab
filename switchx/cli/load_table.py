# SPDX-License-Identifier: Apache-2.0
"""Load per expert and Switch layer, as a table for a person."""

from rich.console import Group
from rich.table import Table

from switchx.models.config import ModelConfig

# More experts than fit a line are shown by their extremes.
MAX_COLUMNS = 16


def load_table(model: ModelConfig, load: list[list[float]]) -> Group:
    """A row a Switch layer, named by its stack and block.

    Args:
        load: choices by expert over the layer's tokens, so k in sum; the encoder's layers
            first.
    """
    num_experts = model.switch.num_experts
    table = Table(box=None, pad_edge=False)
    is_short = num_experts <= MAX_COLUMNS
    table.add_column("layer")
    for column in map(str, range(num_experts)) if is_short else ("least", "median", "most"):
        table.add_column(column, justify="right")
    for name, shares in zip(model.sparse_layer_names, load, strict=True):
        even_share = sum(shares) / num_experts or 1.0
        even = sorted(share / even_share for share in shares)
        shown = [even[0], even[num_experts // 2], even[-1]]
        if is_short:
            shown = [share / even_share for share in shares]
        table.add_row(name, *(f"{value:.2f}" for value in shown))
    # Not the table's title, which would be broken to the table's width.
    return Group("load per expert (1.00 is an even share)", table)
