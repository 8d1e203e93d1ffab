# SPDX-License-Identifier: Apache-2.0
"""What docs/own_code.md shows: a corpus, a vocabulary, an objective, and more of one's own."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from switchx.data.corpora.corpus import CorpusSource, fingerprint_of, require_split
from switchx.data.features import Example
from switchx.data.objectives import RecordObjective
from switchx.data.text_metrics import MetricResult
from switchx.data.tokenizers import Vocabulary
from switchx.layers.dense import weight
from switchx.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Words:
    """A corpus: a file of words, every tenth of them held out for validation."""

    path: str
    name: str = "words"

    def open(self, split, data_dir):
        require_split(self.name, split, ("train", "validation"))
        words = pathlib.Path(self.path).read_text().split()
        held_out = words[::10]
        chosen = [word for word in words if (word in held_out) == (split == "validation")]
        records = [{"inputs": word, "targets": word[::-1]} for word in chosen]
        return CorpusSource(
            f"words/{split}", fingerprint_of(chosen), ("inputs", "targets"), records
        )


@dataclasses.dataclass(frozen=True)
class Letters(Vocabulary):
    """A vocabulary: a token for each of `letters`, after padding, end and unknown."""

    letters: str = "abcdefghijklmnopqrstuvwxyz -"
    num_sentinels = 0

    @property
    def size(self):
        return 3 + len(self.letters)

    def encode(self, text):
        return [self.letters.find(c) + 3 if c in self.letters else self.unk_id for c in text]

    def decode(self, ids):
        return "".join(self.letters[i - 3] if i >= 3 else "?" * (i == self.unk_id) for i in ids)


@dataclasses.dataclass(frozen=True)
class Spelled(RecordObjective):
    """An objective: the inputs letter by letter, `w-o-r-d`, with a mark between them."""

    mark: str = "-"
    is_prefix_bidirectional: bool = True

    def example(self, record, vocabulary):
        def encode(text):
            return np.array([*vocabulary.encode(text), vocabulary.eos_id], np.int32)

        return Example(encode(self.mark.join(record["inputs"])), encode(record["targets"]))


@dataclasses.dataclass(frozen=True)
class SameLength:
    """A metric: how many percent of the texts are as long as their targets."""

    names = ("same_length",)

    def results(self, predictions, targets, num_bootstrap=0):
        pairs = zip(predictions, targets, strict=True)
        score = 100 * np.mean([len(a) == len(b) for a, b in pairs])
        return [MetricResult(*self.names, float(score), "letters")]


def signed_momentum(learning_rate, decay=0.9):
    """An optimizer: steps of the sign of an average of the gradients."""
    return optax.chain(
        optax.trace(decay), optax.scale_by_sign(), optax.scale_by_learning_rate(learning_rate)
    )


def append_losses(step, metrics):
    """A writer of metrics: what TensorBoard gets, as `train/loss` and `validation/accuracy`."""
    if "train/loss" in metrics:
        with open("losses.txt", "a") as file:
            file.write(f"{step} {metrics['train/loss']}\n")


@dataclasses.dataclass(frozen=True)
class WindowConfig(ModelConfig):
    """A model: an FFN of the last `window` tokens, without attention."""

    window: int = 3

    def build(self, key):
        return Window(self, key)


class Window(nnx.Module):
    """A parameter's name ends in its dimensions, `w_in_DF`: by them a mesh splits it."""

    def __init__(self, config, key):
        key_in, key_out, key_table = jax.random.split(key, 3)
        V, D, F = config.vocab_size, config.d_model, config.d_ff
        self.window = config.window
        self.embedding_VD = nnx.Param(jax.random.normal(key_table, (V, D)) * 0.02)
        self.w_in_DF = weight(config, key_in, (D, F), fan_in=D)
        self.w_out_FD = weight(config, key_out, (F, D), fan_in=F)

    def __call__(self, batch, *, is_training, key=None):
        """Logits [B, L, V], and None: there are no Switch layers to have statistics of."""
        x_BLD = self.embedding_VD[...][batch["decoder_input_tokens"]]
        # Positions count from 0 in each example, also where several share a row.
        position_BL1 = batch["decoder_positions"][..., None]
        seen_BLD = sum(
            jnp.where(position_BL1 >= k, jnp.roll(x_BLD, k, axis=1), 0.0) / 2**k
            for k in range(self.window)
        )
        y_BLD = jax.nn.relu(seen_BLD @ self.w_in_DF[...]) @ self.w_out_FD[...]
        return y_BLD @ self.embedding_VD[...].T, None
