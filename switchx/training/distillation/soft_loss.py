# SPDX-License-Identifier: Apache-2.0
"""Distillation: a student learns from the text and from a teacher's probabilities.

Fedus et al. 2021 (Switch Transformers, arXiv:2101.03961), section 4.2, Table 6; Hinton et al.
2015 (arXiv:1503.02531), section 2, for the temperature. With s the soft weight and T the
temperature, a target token costs

    (1 - s) hard + s T^2 KL(softmax(teacher / T) || softmax(student / T))

where `hard` is the cross-entropy of training (`losses.py`). The KL divergence is the
cross-entropy with the teacher's probabilities minus their entropy, which is constant: the
gradient is the same, and a student equal to its teacher costs 0. T^2 keeps the gradient's size.
Dims: B batch, L length, V vocabulary of the student, W of the teacher, E experts
"""

import dataclasses
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp

from switchx import tree
from switchx.axes import dims_of
from switchx.fields import require, require_above_zero
from switchx.models.config import ModelConfig, require_one_task
from switchx.models.params import forward
from switchx.models.unroll import scanned_blocks, unrolled
from switchx.moe.replay import without_choices
from switchx.training.losses import (
    LossConfig,
    LossDenominators,
    TokenSums,
    cross_entropy,
    loss_terms,
    with_whole_load,
)
from switchx.training.microbatches import summed_gradients
from switchx.training.step import Seam


@dataclasses.dataclass(frozen=True)
class Distillation:
    """The teacher that a student learns from, and the weight of its soft loss.

    Attributes:
        teacher: run folder of a trained or converted model, sparse or dense, or the folder that
            `switchx teach` wrote for one.
        step: the step of the teacher's checkpoint; None is the newest complete one when the run
            begins, and the run keeps that one when it is resumed.
        soft_weight: the weight of the teacher's probabilities in the loss; the text's weight
            is `1 - soft_weight`. Switch Transformers, section 4.2: 0.25 for the teacher, 0.75
            for the text.
        temperature: the divisor of the logits of student and teacher.
        starts_from_teacher: whether the student begins with the teacher's weights in all layers
            without experts (Table 6); its other weights are drawn.
    """

    teacher: str | os.PathLike
    step: int | None = None
    soft_weight: float = 0.25
    temperature: float = 1.0
    starts_from_teacher: bool = True

    def __post_init__(self):
        require_above_zero(self, "temperature", "soft_weight")
        require(
            self.soft_weight <= 1,
            f"Distillation.soft_weight={self.soft_weight}; use a share, at most 1",
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Teacher:
    """A teacher within a step: its parameters are arguments of the program.

    Attributes:
        params: the teacher's parameters; nothing is differentiated with respect to them.
        config: the teacher's model configuration.
        settings: the job's `Distillation`: weight and temperature.
    """

    params: Any
    config: ModelConfig = dataclasses.field(metadata={"static": True})
    settings: Distillation = dataclasses.field(metadata={"static": True})

    def logits(self, batch: dict):
        """Logits `[B, L, W]` of a batch: no dropout, no jitter, the capacity of evaluation."""
        own = without_choices(batch)  # choices that are given are of the student's experts
        logits_BLW, _ = forward(self.config, self.params, own, is_training=False)
        return jax.lax.stop_gradient(logits_BLW)

    def soft_loss(self, logits_BLV, batch: dict):
        """`soft_loss` of a student's logits."""
        weights_BL, T = batch["decoder_loss_weights"], self.settings.temperature
        return soft_loss(logits_BLV, self.logits(batch), weights_BL, T)


@dataclasses.dataclass(frozen=True)
class WrittenTeacher:
    """A teacher whose most probable tokens are a part of the batch (`written_teacher.py`)."""

    settings: Distillation

    def soft_loss(self, logits_BLV, batch: dict):
        """The soft loss of a teacher whose other tokens have no probability."""
        T, token_BLK = self.settings.temperature, batch["teacher_token_ids"]
        log_p_BLK = jax.nn.log_softmax(batch["teacher_logits"] / T)
        log_q_BLV = jax.nn.log_softmax(logits_BLV.astype(jnp.float32) / T)
        log_q_BLK = jnp.take_along_axis(log_q_BLV, token_BLK, axis=-1)
        kl_BL = jnp.sum(jnp.exp(log_p_BLK) * (log_p_BLK - log_q_BLK), axis=-1)
        return T**2 * jnp.sum(kl_BL * batch["decoder_loss_weights"])


def soft_loss(logits_BLV, teacher_BLW, weights_BL, temperature: float):
    """The sum of `T^2 KL(teacher || student)` over target tokens, in nats and float32.

    Args:
        teacher_BLW: the teacher's logits; those of ids that the student does not have are not
            used.
    """
    teacher_BLV = teacher_BLW[..., : logits_BLV.shape[-1]].astype(jnp.float32)
    log_p_BLV = jax.nn.log_softmax(teacher_BLV / temperature)
    log_q_BLV = jax.nn.log_softmax(logits_BLV.astype(jnp.float32) / temperature)
    # Where p underflows to 0 its logarithm is finite, and the product 0.
    kl_BL = jnp.sum(jnp.exp(log_p_BLV) * (log_p_BLV - log_q_BLV), axis=-1)
    return temperature**2 * jnp.sum(kl_BL * weights_BL)


def distilled_sums(
    logits_BLV, batch: dict, loss: LossConfig, teacher: Teacher | WrittenTeacher
) -> TokenSums:
    """Token sums whose `loss` is the mixture, and whose `soft_loss` is the teacher's part."""
    weights_BL = batch["decoder_loss_weights"]
    sums = cross_entropy(logits_BLV, batch["decoder_target_tokens"], weights_BL, loss)
    soft, s = teacher.soft_loss(logits_BLV, batch), teacher.settings.soft_weight
    mixed = (1 - s) * sums.loss + s * soft
    return dataclasses.replace(sums, loss=mixed, soft_loss=jax.lax.stop_gradient(soft))


def distilled_batch_loss(
    config: ModelConfig,
    loss: LossConfig,
    params,
    batch,
    *,
    denominators: LossDenominators,
    key,
    teacher: Teacher | WrittenTeacher,
):
    """`losses.batch_loss` of a student; the teacher reads the same microbatch.

    So the logits of only one microbatch exist at a time.
    """
    logits_BLV, stats = forward(config, params, batch, is_training=True, key=key)
    sums = distilled_sums(logits_BLV, batch, loss, teacher)
    stats = with_whole_load(config, denominators, stats)
    value = loss_terms(loss, config, denominators, sums, stats)
    return value, (sums, None if stats is None else stats.summed)


def taught_by(teacher: Teacher | WrittenTeacher) -> Seam:
    """The seam of a student's step: with the teacher's part of the loss, its groups whole."""
    readers = (teacher.config,) if isinstance(teacher, Teacher) else ()
    return Seam(
        functools.partial(distilled_batch_loss, teacher=teacher),
        functools.partial(summed_gradients, readers=readers),
    )


def check_teacher(student: ModelConfig, teacher: ModelConfig, where: str) -> None:
    """Checks that a model can teach another one.

    Args:
        where: the teacher's folder, for messages.

    Raises:
        ValueError: the models read different inputs, the student has token ids that the teacher
            does not have, or the teacher needs to know a row's task.
    """
    require(
        student.architecture == teacher.architecture,
        f"the teacher in {where} is {teacher.architecture}, the student "
        f"{student.architecture}: they read other inputs; use a teacher of the student's "
        "architecture",
    )
    require(
        student.vocab_size <= teacher.vocab_size,
        f"vocab_size={student.vocab_size} of the student, and {teacher.vocab_size} of the "
        f"teacher in {where}, which has no probability for the ids beyond; use a vocab_size of "
        f"at most {teacher.vocab_size}",
    )
    require_one_task(teacher)


def with_weights_of(
    student: ModelConfig, params, teacher: ModelConfig, teacher_params
) -> tuple[dict, list[str]]:
    """The student's parameters, with those of layers without experts taken from the teacher.

    They are matched by name, layers unrolled: a sparse block of the teacher gives its attention
    and norms to a dense block of the student, whose FFN stays as it was drawn.

    Args:
        params, teacher_params: arrays, or tracers of them.

    Returns:
        Parameters in the student's layout, and names of those that were taken.

    Raises:
        ValueError: a parameter that both have differs in shape, or there is none that both
            have.
    """
    own = tree.named_leaves(unrolled(student, params)[1])
    theirs = tree.named_leaves(unrolled(teacher, teacher_params)[1])
    taken, different = {}, []
    for name in own.keys() & theirs.keys():
        dims = dims_of(name.rpartition("/")[2], own[name].ndim)
        if "E" in dims:
            continue
        cut = tuple(
            size if letter == "V" else None
            for letter, size in zip(dims, own[name].shape, strict=True)
        )
        array = theirs[name][tuple(map(slice, cut))]
        if array.shape == own[name].shape:
            taken[name] = array.astype(own[name].dtype)
        else:
            different.append(f"{name} {list(own[name].shape)}, {list(array.shape)} there")
    require(
        bool(taken) and not different,
        "the student cannot start from the teacher's weights: "
        f"{'; '.join(sorted(different)[:4]) or 'no parameter has the name of one there'}; use "
        "layers of the teacher's sizes, or Distillation.starts_from_teacher=False",
    )
    started = tree.nested(own | taken)
    if student.scan_layers:
        started = scanned_blocks(started, student.period, jnp.stack)
    return started, sorted(taken)
