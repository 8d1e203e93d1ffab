# SPDX-License-Identifier: Apache-2.0
"""Weights of transformers' models that a comparison can trust."""


def randomize(model, seed=0):
    """Weights large enough that every part matters; the norms' scales are not all ones."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            scale = weight.shape[-1] ** -0.5 if weight.ndim == 2 else 0.5
            noise = torch.randn(weight.shape, generator=generator) * scale
            weight.copy_(noise + (weight.ndim == 1))
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(torch.randn(bias.shape, generator=generator) * 0.5)
    return model.eval()
