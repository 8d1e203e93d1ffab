# SPDX-License-Identifier: Apache-2.0
"""PyTorch's side of `switchx bench train`: one training step for each line it is sent.

Run by `torch_peer.py` in a process of its own; nothing imports it. Same shapes, capacity
factor and optimizer as ours.
"""

import json
import sys

import torch
import transformers


def main(settings: dict) -> None:
    """Trains transformers' Switch Transformer, printing `done` after each step."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    config = transformers.SwitchTransformersConfig(**settings["config"])
    model = transformers.SwitchTransformersForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    inputs = torch.randint(3, config.vocab_size, (settings["batch"], settings["inputs"]))
    labels = torch.randint(3, config.vocab_size, (settings["batch"], settings["targets"]))
    for _ in sys.stdin:
        optimizer.zero_grad()
        model(input_ids=inputs, labels=labels, output_router_logits=True).loss.backward()
        optimizer.step()
        print("done", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
