# SPDX-License-Identifier: Apache-2.0
"""PyTorch's side of `switchx bench decode`: `generate` once for each line it is sent.

Run by `torch_peer.py` in a process of its own; nothing imports it. It draws the weights and
saves them, so that both sides decode the same model. A line is `BATCH BEAMS`; what was
generated is written beside the model, for the other side to compare.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers


def main(settings: dict) -> None:
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    folder, new_tokens = pathlib.Path(settings["folder"]), settings["new_tokens"]
    config = transformers.SwitchTransformersConfig(**settings["config"])
    model = transformers.SwitchTransformersForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    input_BM = torch.tensor(settings["inputs"])
    for line in sys.stdin:
        batch, beams = map(int, line.split())
        with torch.no_grad():
            token_BT = model.generate(
                input_ids=input_BM[:batch],
                num_beams=beams,
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )
        np.save(folder / f"tokens_{batch}_{beams}.npy", token_BT[:, 1:].numpy())
        print("done", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
