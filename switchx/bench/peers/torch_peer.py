# SPDX-License-Identifier: Apache-2.0
"""PyTorch's Switch Transformer on the same cores, in a process of its own.

The first half starts the process, where PyTorch is installed; nothing that `switchx` imports
needs it. The second half is the process' program, which runs this file and imports nothing of
`switchx`: it does its task once for each line that it is sent and prints `done` after each, or
`failed` and why.
Shapes, capacity factor and optimizer are those of our side.
Dims: B rows of a batch, M tokens of a source, T generated tokens
"""

import contextlib
import importlib.util
import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

PROGRAM = pathlib.Path(__file__)
# Seconds that the first run of a compiled model may take.
COMPILE_S = 300


def is_available() -> bool:
    """Whether the extra `hf` is installed."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


class TaskFailedError(RuntimeError):
    """The process goes on but could not do the task; the message says why."""


class TorchPeer:
    """The other process; `ask(line)` makes it do what the line says, and waits for its end."""

    def __init__(self, program: pathlib.Path, settings: dict[str, Any]):
        self._process = subprocess.Popen(
            [sys.executable, str(program), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> None:
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:  # it had ended before it was asked
            answer = ""
        if answer.startswith("failed "):
            raise TaskFailedError(answer.removeprefix("failed ").rstrip())
        if answer != "done\n":
            raise RuntimeError("the PyTorch peer ended; its error stands above")

    def __enter__(self) -> "TorchPeer":
        return self

    def __exit__(self, *exception) -> None:
        with contextlib.suppress(BrokenPipeError):  # closing writes what is left
            self._process.stdin.close()
        self._process.wait()


def trainer(settings: dict) -> Callable[[str], None]:
    """A training step of transformers' Switch Transformer, whatever the line says.

    With `dtype` its products have that dtype and its parameters are float32.
    """
    import torch
    import transformers

    device = settings.get("device", "cpu")
    config = transformers.SwitchTransformersConfig(**settings["config"])
    model = transformers.SwitchTransformersForConditionalGeneration(config).train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    inputs, labels = (
        torch.randint(3, config.vocab_size, (settings["batch"], settings[side]), device=device)
        for side in ("inputs", "targets")
    )
    dtype = getattr(torch, settings.get("dtype", "float32"))

    def loss_of(**options):
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            return model(input_ids=inputs, labels=labels, **options).loss

    # transformers 5.17 cannot add up the routers' losses that it has; it goes without then,
    # which is less work for it.
    router_losses = {"output_router_logits": True}
    try:
        loss_of(**router_losses)
    except ValueError:
        router_losses = {}

    def step(line: str) -> None:
        optimizer.zero_grad()
        loss = loss_of(**router_losses)
        loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def generator(settings: dict) -> Callable[[str], str | None]:
    """`generate` with the line's `BATCH BEAMS`, by `torch.compile` where `compiled` follows.

    It draws the weights, in `dtype`. With a folder it saves them there first, so that both
    sides decode the same model, and writes the generated tokens beside them, for the other
    side to compare.
    What cannot be compiled within `COMPILE_S` is not tried again.
    """
    import numpy as np
    import torch
    import transformers

    folder, new_tokens = settings.get("folder"), settings["new_tokens"]
    device = settings.get("device", "cpu")
    dtype = settings.get("dtype", "float32")
    config = transformers.SwitchTransformersConfig(**settings["config"])
    model = transformers.SwitchTransformersForConditionalGeneration(config).eval()
    if folder is not None:
        model.save_pretrained(folder)
    model = model.to(device, getattr(torch, dtype))
    input_BM, failure = torch.tensor(settings["inputs"], device=device), []
    parts = model, model.get_encoder()
    forwards = {
        False: [part.forward for part in parts],
        True: [
            torch.compile(part.forward, backend=settings.get("backend", "inductor"))
            for part in parts
        ],
    }

    def run(batch: int, beams: int) -> None:
        with torch.no_grad():
            token_BT = model.generate(
                input_ids=input_BM[:batch],
                num_beams=beams,
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )
        tokens = token_BT[:, 1:].cpu().numpy()  # waits for the device
        if folder is not None:
            np.save(pathlib.Path(folder) / f"tokens_{batch}_{beams}.npy", tokens)

    def generate(line: str) -> str | None:
        batch, beams, *options = line.split()
        is_compiled = options == ["compiled"]
        if is_compiled and failure:
            return failure[0]
        for part, forward in zip(parts, forwards[is_compiled], strict=True):
            part.forward = forward
        if not is_compiled:
            return run(int(batch), int(beams))
        try:
            with deadline(COMPILE_S):
                return run(int(batch), int(beams))
        except Exception as error:  # of any stage of the compiler
            failure.append(f"failed {type(error).__name__}: {error}".splitlines()[0])
            return failure[0]

    return generate


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in a block that takes longer."""

    def end(*_) -> None:
        raise TimeoutError(f"it took more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def main(settings: dict) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    do = {"train": trainer, "generate": generator}[settings["task"]](settings)
    for line in sys.stdin:
        print(do(line) or "done", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
