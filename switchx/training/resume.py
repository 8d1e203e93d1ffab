# SPDX-License-Identifier: Apache-2.0
"""A job's description in its run folder, and whether a job may continue there."""

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable
from typing import Any

import jax

from switchx.checkpoint.run_folder import RunFolder, read_config
from switchx.data.mixtures import as_mixture, evaluated_tasks, with_evaluated
from switchx.data.tasks import Task, TextFormat
from switchx.data.vocabularies import load_vocabulary, save_vocabulary
from switchx.fields import describe, differences, require
from switchx.files import write_atomically
from switchx.training.job import TrainingJob

logger = logging.getLogger(__name__)


def flat_description(job: TrainingJob) -> dict[str, Any]:
    """A job's settings by dotted name (`model.switch.num_experts`): numbers and texts."""
    description = describe(job, "job")
    leaves = jax.tree.leaves_with_path(description, is_leaf=lambda leaf: leaf is None)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves
    }


def write_run_config(run: RunFolder, job: TrainingJob) -> None:
    """Writes the vocabulary and then `config.json` into a new run folder, each whole.

    Raises:
        ValueError: something in the job cannot be written and read again; names it.
    """
    description = json.dumps(describe(job, "job"), indent=2) + "\n"
    save_vocabulary(job.vocabulary, run.root)
    write_atomically(run.config, description.encode())


def require_vocabulary_of(run: RunFolder, job: TrainingJob, name: str) -> None:
    """Checks that a model in a run folder reads the token ids of a job.

    Args:
        name: name of the setting that gave the folder, for messages.

    Raises:
        ValueError: `run` is no run folder, or has another vocabulary.
    """
    require(
        run.config.is_file(),
        f"{name}={str(run.path)!r} has no {run.config.name}: it is no run folder; give the "
        "model_dir of a run or of `switchx convert` (of a quantized or exported model, the run "
        "that it was made from)",
    )
    saved, here = load_vocabulary(run.root), job.vocabulary
    require(
        saved.fingerprint() == here.fingerprint(),
        f"{name}={str(run.path)!r} was trained with another vocabulary than this job's: "
        f"{saved.size} ids there, {here.size} here, or other pieces; its token ids mean other "
        "things. Use the copy in that folder: leave out what names another one "
        f"(VOCABULARY_FILE in the shipped configurations), or give VOCABULARY_FILE={run.path}",
    )


def check_same_run(run: RunFolder, job: TrainingJob) -> TrainingJob:
    """Checks that a folder that already holds a run holds this one.

    Returns:
        The job, whose tasks read the folder's own copy of the vocabulary.

    Raises:
        ValueError: fields differ that are not declared `at_resume` (all are listed), or the
            vocabulary is another one.
    """
    saved = read_config(run)
    if different := list(differences(saved, job, "resume")):
        raise ValueError(
            f"model_dir={str(run.path)!r} belongs to another configuration "
            f"({'; '.join(different)}); give another model_dir, or the configuration it was "
            "made with. What changes no mathematics may be other: how long, how often, the "
            "mesh, the dispatcher, microbatches, remat, scan_layers, data_dir"
        )
    _warn_of_other_groups(saved["step"].get("num_microbatches", 1), job)
    return with_vocabulary_of(run, job)


def _warn_of_other_groups(num_before: int, job: TrainingJob) -> None:
    """Microbatches change nothing, except if a routing group is larger than one of them."""
    num_now = job.step.num_microbatches
    numbers = {num_before, num_now}
    if len(numbers) > 1 and not all(map(job.keeps_groups, numbers)):
        logger.warning(
            "SwitchConfig.group_size=%d with %d microbatches of %d rows, %d before: routing "
            "groups are smaller or other ones than before, and so are capacity, dropped tokens "
            "and the balance loss",
            job.model.switch.group_size,
            num_now,
            job.batch_size // num_now,
            num_before,
        )


def check_same_model(run: RunFolder, job: TrainingJob) -> TrainingJob:
    """Checks that a run's parameters and token ids mean to a job what they meant in training.

    Returns:
        The job, whose tasks read the folder's own copy of the vocabulary.

    Raises:
        ValueError: fields of the model differ that are not declared `at_evaluation` (all are
            listed), or the vocabulary does.
    """
    saved = read_config(run)["model"]
    if different := list(differences(saved, job.model, "evaluation", "model")):
        raise ValueError(
            f"model_dir={str(run.path)!r} holds another model ({'; '.join(different)}); use "
            "the configuration that it was trained with. Capacity, dropout, exploration, "
            "precision, the dispatcher and all that is not of the model may be other"
        )
    return with_vocabulary_of(run, job)


def with_vocabulary_of(run: RunFolder, job: TrainingJob) -> TrainingJob:
    """The job with the vocabulary in a run folder in place of its tasks' own.

    The vocabulary that a task names (a file, the folder that fine-tuning started from) may have
    been deleted since.

    Raises:
        ValueError: the vocabulary that a task names can be read and is another one.
    """
    saved, mixture = load_vocabulary(run.root), as_mixture(job.source)
    evaluated = mixture.evaluation or ()
    unlike = []  # not a set: vocabularies may have lists, and are then not hashable
    for task in (*mixture.tasks, *evaluated):
        unlike += [task.vocabulary] * (task.vocabulary not in unlike)
    for here in unlike:
        try:
            fingerprint = here.fingerprint()
        except (OSError, ValueError) as error:
            logger.info("the vocabulary in %s is read (of the job's: %s)", run.root, error)
            continue
        if fingerprint != saved.fingerprint():
            raise ValueError(
                f"model_dir={str(run.path)!r} was trained with another vocabulary: "
                f"{saved.size} ids there, {here.size} here, or other pieces, as of one that is "
                "trained on texts that have changed; the same ids would mean other things. Use "
                f"its own, --gin.VOCABULARY_FILE={str(run.path)!r}, or give another model_dir"
            )
    tasks, evaluated = (
        tuple(dataclasses.replace(task, vocabulary=saved) for task in each)
        for each in (mixture.tasks, evaluated)
    )
    is_task = mixture is not job.source
    source = dataclasses.replace(mixture, tasks=tasks, evaluation=evaluated or None)
    source = tasks[0] if is_task else source
    return dataclasses.replace(job, source=source)


def read_as_prompts(
    run: RunFolder, job: TrainingJob, note: Callable[[str], None]
) -> TrainingJob:
    """The job with evaluated inputs that are read as a folder's model reads prompts.

    If generation reads prompts causally, inputs do not see themselves whole. `note` is told so,
    and also if inputs end with eos and prompts do not.

    Raises:
        ValueError: a user's own objective has no field to say so.
    """
    if job.model.is_encoder_decoder:
        return job
    whole, ended = read_otherwise(evaluated_tasks(job.source), run)
    if whole:
        note(
            f"{run.where} reads prompts causally, and so inputs of {task_names(whole)}, "
            "without is_prefix_bidirectional"
        )
        job = dataclasses.replace(job, source=with_evaluated(job.source, _causal))
    if ended:
        note(
            f"inputs of {task_names(ended)} end with the id of eos, {job.vocabulary.eos_id}, "
            f"which `switchx generate` puts behind no prompt of {run.where}"
        )
    return job


def read_otherwise(tasks: Iterable[Task], run: RunFolder) -> tuple[list[Task], list[Task]]:
    """The tasks whose inputs a folder's decoder-only model reads differently as prompts.

    Returns:
        Those whose inputs see themselves whole, if the model reads prompts causally, and
        those whose inputs end with eos, if it puts none after prompts.
    """
    read = TextFormat.of_training(read_config(run).get("source"), is_encoder_decoder=False)
    whole = [each for each in tasks if each.objective.is_prefix_bidirectional]
    ended = [each for each in tasks if each.objective.ends_inputs_with_eos]
    is_causal, ends = not read.is_prompt_bidirectional, read.inputs_end_with_eos
    return whole if is_causal else [], [] if ends else ended


def task_names(tasks: Iterable[Task]) -> str:
    """Names for a message, each once."""
    return ", ".join(dict.fromkeys(task.name for task in tasks))


def _causal(task: Task) -> Task:
    """The task, with inputs of which each token attends only to those before it."""
    objective = task.objective
    if not objective.is_prefix_bidirectional:
        return task
    require(
        any(each.name == "is_prefix_bidirectional" for each in dataclasses.fields(objective)),
        f"task {task.name!r}: {type(objective).__name__}.is_prefix_bidirectional is True, and "
        "the model reads prompts causally; expected a field: declare it, or make it False",
    )
    objective = dataclasses.replace(objective, is_prefix_bidirectional=False)
    return dataclasses.replace(task, objective=objective)
