# SPDX-License-Identifier: Apache-2.0
"""PyTorch's side of throughput.py: `generate` over all sentences for each line it is sent.

Run by `TorchPeer` in a process of its own; nothing imports it. A line is `BATCH BEAMS`; what
was generated is written beside the weights, for the other side to compare.
"""

import json
import pathlib
import sys

import torch
import transformers


def main(settings: dict) -> None:
    transformers.logging.set_verbosity_error()
    folder = pathlib.Path(settings["folder"])
    model = transformers.SwitchTransformersForConditionalGeneration.from_pretrained(folder)
    model = model.eval()
    pad, eos = model.config.pad_token_id, model.config.eos_token_id
    sentences = json.loads((folder / "sentences.json").read_text())
    for line in sys.stdin:
        batch, beams = map(int, line.split())
        answers = []
        for first in range(0, len(sentences), batch):
            texts = sentences[first : first + batch]
            longest = max(map(len, texts))
            input_BM = torch.tensor([text + [pad] * (longest - len(text)) for text in texts])
            with torch.no_grad():
                token_BT = model.generate(
                    input_ids=input_BM,
                    attention_mask=(input_BM != pad).long(),
                    num_beams=beams,
                    do_sample=False,
                    max_new_tokens=settings["max_new_tokens"],
                )
            for row in token_BT[:, 1:].tolist():  # what is first is the start token
                answers.append(row[: row.index(eos)] if eos in row else row)
        (folder / "said.json").write_text(json.dumps(answers))
        print("done", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
