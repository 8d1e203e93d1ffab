# SPDX-License-Identifier: Apache-2.0
"""PyTorch's side of `switchx bench train`: one training step for each line it is sent.

Run by `torch_peer.py` in a process of its own; nothing imports it. Same shapes, capacity
factor and optimizer as ours, dropout off on both sides.
"""

import json
import sys

import torch
import transformers


def main(settings: dict[str, int]) -> None:
    """Trains transformers' Switch Transformer, printing `done` after each step."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    config = transformers.SwitchTransformersConfig(
        vocab_size=8192,
        d_model=256,
        d_kv=64,
        d_ff=1024,
        num_heads=4,
        num_layers=4,
        num_decoder_layers=4,
        num_sparse_encoder_layers=2,
        num_sparse_decoder_layers=2,
        num_experts=settings["num_experts"],
        dropout_rate=0.0,
        # Tokens of one sequence that an expert takes: a capacity factor of 1.0.
        expert_capacity=max(settings["inputs"] // settings["num_experts"], 1),
        decoder_start_token_id=0,
    )
    model = transformers.SwitchTransformersForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    inputs = torch.randint(3, 8192, (settings["batch"], settings["inputs"]))
    labels = torch.randint(3, 8192, (settings["batch"], settings["targets"]))
    for _ in sys.stdin:
        optimizer.zero_grad()
        model(input_ids=inputs, labels=labels, output_router_logits=True).loss.backward()
        optimizer.step()
        print("done", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
