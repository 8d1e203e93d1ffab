# SPDX-License-Identifier: Apache-2.0
"""Which blocks are sparse: Hugging Face's steps as our patterns, and back."""

from typing import Any

from switchx.models.config import ModelConfig


def sparse_blocks(num_layers: int, num_sparse: int) -> tuple[int, ...]:
    """Numbers of the sparse blocks that transformers makes of its two counts.

    Its step is `num_layers // num_sparse`, and block 1 and every step-th after it are sparse:
    1, 5, 9 of 12 with 3. A step of 1 makes all sparse. With none asked for the step is
    `num_layers`, and block 1 is sparse all the same.
    """
    step = num_layers // num_sparse if num_sparse else num_layers
    if step == 0:
        return ()
    return tuple(i for i in range(num_layers) if step == 1 or i % step == 1)


def num_sparse(num_layers: int, blocks: tuple[int, ...]) -> int | None:
    """A count from which transformers makes these sparse blocks, or None where none does."""
    counts = [len(blocks), *range(num_layers + 2)]  # above num_layers, none is sparse
    return next((n for n in counts if sparse_blocks(num_layers, n) == blocks), None)


def switch_layers(
    config: ModelConfig, encoder: tuple[int, ...], decoder: tuple[int, ...]
) -> dict[str, Any]:
    """Fields of a SwitchConfig for these sparse blocks: `every` where they are a pattern."""
    counts = (config.num_encoder_layers, config.num_decoder_layers)
    for every in range(1, min(counts) + 1):
        patterns = [tuple(range(every - 1, count, every)) for count in counts]
        if any(count % every for count in counts) or encoder != patterns[0]:
            continue
        if decoder in (patterns[1], ()):
            return {"every": every, "stacks": "all" if decoder else "encoder"}
    return {"encoder_layers": encoder, "decoder_layers": decoder}
