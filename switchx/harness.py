# SPDX-License-Identifier: Apache-2.0
"""A model for lm-evaluation-harness: likelihoods of continuations, and generated texts.

Gao et al. 2024, lm_eval. `switchx eval --harness=TASKS` calls the harness itself. The harness's
own flags are taken by `python -m switchx.harness run --model switchx --model_args
model_dir=runs/tiny`. `lm_eval --model switchx` is unknown to 0.4.13, which reads no entry
points; our entry point is for versions that do.

A decoder-only model reads its start token, where its vocabulary has one, before every context
(like `add_bos_token=True` of the harness's own `hf`), and its end of text in place of an empty
context. Contexts that are too long lose tokens on the left, as in the harness's other models; a
warning says how many do.
"""

import logging
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from datasets.exceptions import DatasetsError
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from switchx.api import Model, load
from switchx.fields import require
from switchx.gin_config.files import did_you_mean
from switchx.inference.generate import Generated
from switchx.inference.texts import token_lists
from switchx.training.compilation_cache import compiled_programs_kept

logger = logging.getLogger(__name__)

Pair = tuple[list[int], list[int]]
MAX_LENGTH = 2048  # for models without a limit; the harness's own default
# Generation settings, by their names here; `do_sample` and `until` are also read.
_SETTINGS = {
    **dict.fromkeys(
        ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"),
        "max_new_tokens",
    ),
    **{name: name for name in ("temperature", "top_k", "top_p", "repetition_penalty")},
    "num_beams": "beam_size",
}
# Settings only for sampling, and their values that leave all tokens to draw from.
_OF_SAMPLES = {"top_k": 0, "top_p": 1}


@register_model("switchx")
class SwitchxLM(LM):
    """A run folder or a quantized model.

    Attributes:
        model: what `switchx.load` returned.
        max_length: most tokens of a context with its continuation.
    """

    def __init__(
        self,
        model_dir: str | Model,
        step: int | str | None = None,
        batch_size: int | str = 32,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        **unused: Any,
    ):
        """Reads the model.

        Args:
            model_dir: folder, or a model that is already loaded.
            batch_size: number of texts at a time; `auto` is 32.
            max_length: see the attribute; by default the model's own, else 2048.
            max_gen_toks: tokens of an answer where a task gives no number.
            unused: the harness's settings of devices and batches, which change nothing.

        Raises:
            ValueError: the model has no vocabulary; or see `switchx.load`.
        """
        super().__init__()
        model = model_dir if isinstance(model_dir, Model) else load(model_dir, step=step)
        require(
            model.vocabulary is not None,
            f"{model_dir} has no vocabulary, and tasks are texts; convert it with its own",
        )
        self.model, self.max_gen_toks = model, int(max_gen_toks)
        self.batch_size = 32 if str(batch_size).startswith("auto") else int(batch_size)
        self.max_length = max_length or model.config.max_length or MAX_LENGTH
        self._has_encoder = model.config.is_encoder_decoder
        start = model.ids.start_id
        self._first = model.ids.eos_ids[0] if start is None or self._has_encoder else start

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False):
        """Log-likelihood of each continuation, and whether greedy decoding would write it."""
        return self._scored([self._pair(*each.args) for each in requests])

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False):
        """Log-likelihood of each whole text, in windows of `max_length` whose predicted tokens
        do not overlap; it includes a start token, as in the harness's `hf`."""
        pairs, owners = [], []
        for owner, (text,) in enumerate(each.args for each in requests):
            tokens = self.model.prompt(self.model.vocabulary.encode(text))
            windows = get_rolling_token_windows(
                tokens, self._first, self.max_length, context_len=1
            )
            found = [make_disjoint_window(window) for window in windows]
            pairs, owners = pairs + found, owners + [owner] * len(found)
        sums = [0.0] * len(requests)
        for owner, (log_likelihood, _) in zip(owners, self._scored(pairs), strict=True):
            sums[owner] += log_likelihood
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False):
        """The text that follows each context, up to the first of the texts that end it."""
        answers = [""] * len(requests)
        by_settings: dict[str, list[int]] = {}
        for index, each in enumerate(requests):
            by_settings.setdefault(repr(each.args[1]), []).append(index)
        for indices in by_settings.values():
            contexts = [requests[index].args[0] for index in indices]
            texts = self._written(contexts, requests[indices[0]].args[1])
            for index, text in zip(indices, texts, strict=True):
                answers[index] = text
        return answers

    def _pair(self, context: str, continuation: str) -> Pair:
        """Tokens of both, as the harness's own models have them. Spaces between them are the
        continuation's. A decoder reads the context's tokens, and predicts as many of the whole
        text's as are behind so many: where a token spans both, they are not the text's."""
        spaces = context[len(context.rstrip()) :]
        context = context.removesuffix(spaces)
        continuation = spaces + continuation
        encode = self.model.vocabulary.encode
        if self._has_encoder:
            return self._inputs(context), encode(continuation)
        read = encode(context) if context else []
        whole = encode(context + continuation)
        if continuation and len(whole) <= len(read):
            read = whole[:-1]
        return self._inputs(context, read), whole[len(read) :]

    def _inputs(self, context: str, tokens: list[int] | None = None) -> list[int]:
        """The tokens before the predicted ones; at least one."""
        model = self.model
        if self._has_encoder:
            form = model.config, model.vocabulary, model.text_format, model.ids
            (read,), _ = token_lists([context], "inputs", *form) if context else ([[]], None)
            return read or [self._first]
        tokens = model.vocabulary.encode(context) if tokens is None else tokens
        if tokens and model.text_format.inputs_end_with_eos:  # as in training
            tokens = [*tokens, model.ids.eos_id]
        return model.prompt(tokens) or [self._first]

    def _scored(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        # The pairs already contain a decoder's start token.
        own = {} if self._has_encoder else {"start_id": None}
        scorer = self.model.scorer(batch_size=self.batch_size, logprobs=1, **own)
        # Each place predicts the next token, so the last token is not read.
        read = self._cut([(tokens, len(wanted) - 1) for tokens, wanted in pairs])
        pairs = [(tokens, wanted) for tokens, (_, wanted) in zip(read, pairs, strict=True)]
        with compiled_programs_kept(None):
            found = sorted(scorer(pairs), key=lambda each: each[0])
        unknown = sum(math.isnan(score.log_likelihood) for _, score in found)
        require(not unknown, f"{unknown} log-likelihoods are NaN; see to the checkpoint")
        return [
            (score.log_likelihood, [next(iter(top)) for top in score.top_logprobs] == wanted)
            for (_, score), (_, wanted) in zip(found, pairs, strict=True)
        ]

    def _cut(self, asked: Sequence[tuple[list[int], int]]) -> list[list[int]]:
        """The last tokens of each context that fit before a number of further ones; an encoder
        reads all tokens."""
        if self._has_encoder:
            return [tokens for tokens, _ in asked]
        longest = max((num_further for _, num_further in asked), default=0)
        require(
            longest < self.max_length,
            f"a continuation of {longest} tokens, and max_length={self.max_length}; give a "
            "larger max_length or a smaller max_gen_toks",
        )
        found = [tokens[num_further - self.max_length :] for tokens, num_further in asked]
        num_cut = sum(
            len(left) < len(all_) for left, (all_, _) in zip(found, asked, strict=True)
        )
        if num_cut:
            logger.warning(
                "%s of %s contexts lose their first tokens: max_length=%s",
                num_cut,
                len(asked),
                self.max_length,
            )
        return found

    def _written(self, contexts: Sequence[str], asked: dict[str, Any]) -> list[str]:
        """Answers to contexts under a task's settings."""
        settings = {"max_new_tokens": self.max_gen_toks, "stop": (), "temperature": 0.0}
        asked = dict(asked)
        samples = asked.pop("do_sample", (asked.get("temperature") or 0.0) > 0)
        stop = asked.pop("until", None) or ()
        settings["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        for name, value in asked.items():
            require(
                name in _SETTINGS,
                f"a task asks for {name}={value!r} in generation; known are do_sample, until, "
                f"{', '.join(_SETTINGS)}",
            )
            settings[_SETTINGS[name]] = value
        if not samples:
            settings["temperature"] = 0.0
        require(
            not samples or settings["temperature"] > 0,
            "a task asks for do_sample=True without a temperature above 0; add one, or leave "
            "do_sample out for the likeliest tokens",
        )
        for name, all_tokens in _OF_SAMPLES.items():
            if not samples or settings.get(name) == all_tokens:
                settings.pop(name, None)
        num_new = settings["max_new_tokens"]
        prompts = self._cut([(self._inputs(context), num_new) for context in contexts])
        generator = self.model.generator(batch_size=self.batch_size, **settings)
        answers = [""] * len(prompts)
        with compiled_programs_kept(None):
            for index, (best, *_) in generator(prompts):
                answer = Generated.of(best, self.model.vocabulary, generator.stops)
                answers[index] = answer.output
        return answers


def results_of(
    tasks: Sequence[str],
    model_dir: str,
    *,
    step: int | str | None = None,
    folder: str | None = None,
    limit: int | None = None,
    batch_size: int = 32,
) -> dict[str, Any]:
    """What the harness's `simple_evaluate` returns.

    Args:
        tasks: names of tasks or groups, or patterns of them.
        folder: folder of further tasks, such as YAML files on local data.
        limit: number of examples of each task; None means all.

    Raises:
        ValueError: there is no such task, or its data is not available; or see `SwitchxLM`.
    """
    require(
        folder is None or pathlib.Path(folder).is_dir(),
        f"there is no folder {folder} of tasks; give the one of the YAML files",
    )
    # The harness's own thousands of tasks are not searched if the folder has all of them.
    manager = folder and TaskManager(include_path=folder, include_defaults=False)
    if not (manager and all(manager.match_tasks([name]) for name in tasks)):
        manager = TaskManager(include_path=folder)
    for name in tasks:
        require(
            bool(manager.match_tasks([name])),
            f"lm_eval has no task {name}{did_you_mean(name, manager.all_tasks)}; "
            "--harness_path=FOLDER adds those of YAML files",
        )
    try:
        loaded = manager.load(manager.match_tasks(list(tasks)))
    except (OSError, DatasetsError) as error:
        raise ValueError(
            f"the data of {','.join(tasks)} cannot be had: {error}; without a network, use "
            "tasks whose dataset_path is json, csv or a folder (--harness_path), or the data "
            "that a machine with one left in HF_HOME"
        ) from error
    model = SwitchxLM(model_dir, step, batch_size)
    # A group brings its members, and its means are computed where it is asked for itself.
    groups = loaded["groups"].values()
    inner = {task.task_name for group in groups for task in group.get_all_tasks()}
    inner |= {each.name for group in groups for each in group.get_all_groups()}
    found = {**loaded["groups"], **loaded["tasks"]}
    asked = [each for name, each in found.items() if name not in inner]
    return simple_evaluate(model, tasks=asked, task_manager=manager, limit=limit)


if __name__ == "__main__":
    # `python -m switchx.harness run --model switchx ...`, which needs no entry point.
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
