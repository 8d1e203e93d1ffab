# SPDX-License-Identifier: Apache-2.0
"""`switchx.load` and `switchx.Model`: a model in Python, its logits, texts and scores.

The vocabulary says which ids are padding and start tokens; with T5's, both are 0.
Dims: B batch, L length, M memory, V vocabulary
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from switchx.checkpoint.adapter_run import require_merged
from switchx.checkpoint.restore import checkpoint_fingerprint, choose_step, restore_params
from switchx.checkpoint.run_folder import (
    RunFolder,
    read_config,
    read_decoding,
    read_model_config,
)
from switchx.data.tasks import TextFormat
from switchx.data.tokenizers import TokenIdVocabulary, Vocabulary
from switchx.data.vocabularies import DESCRIPTION_FILE, load_vocabulary, save_vocabulary
from switchx.fields import describe, require
from switchx.gin_config.building import job_from_gin
from switchx.inference.artifact import is_artifact, open_artifact, read_artifact
from switchx.inference.config import DecodingConfig, ExpertSlots, with_defaults
from switchx.inference.generate import (
    Generated,
    Generator,
    for_decoding,
    with_capacity,
    without_capacity,
)
from switchx.inference.model_mesh import ONE_DEVICE, ModelMesh
from switchx.inference.offload.chosen_experts import experts_of_checkpoint, slices_of
from switchx.inference.offload.expert_slots import slotted
from switchx.inference.offload.ring_or_chosen import OutsideExperts, outside_of_device
from switchx.inference.quantize import native, separate_experts
from switchx.inference.score import Score, Scorer, logits_of
from switchx.inference.texts import Texts, decoding_ids, token_array, token_lists
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params, of_task
from switchx.models.stages import without_experts
from switchx.partitioning.compiler_options import CompilerOptions
from switchx.partitioning.mesh import MeshSpec, cpu_device
from switchx.routing_record import RecordInfo, RecordWriter
from switchx.shipped import folder_of
from switchx.training.compilation_cache import compiled_programs_kept
from switchx.training.start import params_of_job
from switchx.tree import num_elements


@dataclasses.dataclass(frozen=True)
class Model:
    """A trained model.

    Attributes:
        config: configuration of the model.
        params: parameters, a nested dictionary of arrays named by their dimensions; experts of
            a quantized model are `pallas_kernels.QTensor`s.
        vocabulary: vocabulary of its token ids; None for a converted model that came without
            one.
        step: training step of the checkpoint that it was read from.
        text_format: the format of its inputs: how training made them from texts.
        fingerprint: hexadecimal digest; it differs for other parameters, another configuration
            or another vocabulary.
        devices: mesh that holds the parameters.
        experts: owner of the experts of a model that was loaded with `expert_slots`, which
            moves them to the device when they are chosen; `experts.traffic` counts the moves.
            Experts in `params` are then NumPy arrays, or shape structs with `host_bytes`.
        decoding: defaults of `DecodingConfig` fields for generation, from the folder that the
            model was converted from.
    """

    config: ModelConfig
    params: dict = dataclasses.field(repr=False)
    vocabulary: Vocabulary | None = dataclasses.field(repr=False)
    step: int
    text_format: TextFormat = dataclasses.field(repr=False)
    fingerprint: str = dataclasses.field(repr=False)
    devices: ModelMesh = dataclasses.field(default=ONE_DEVICE, repr=False)
    experts: OutsideExperts | None = dataclasses.field(default=None, repr=False)
    decoding: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def from_gin(
        cls,
        gin_files: str | os.PathLike | Sequence[str | os.PathLike],
        gin_bindings: Sequence[str] = (),
        *,
        model_dir: str | os.PathLike | None = None,
        step: int | Literal["best"] | None = None,
        mesh: MeshSpec | None = None,
    ) -> "Model":
        """The model of a job that gin files describe; `load` needs no gin file.

        Its parameters come from a checkpoint in `model_dir`. Without it, they are those that
        the job's training begins with: from the run INIT_FROM, by INIT_STEP and INIT_RULES, or
        else drawn from SEED. Texts become inputs as in the job's tasks.

        Args:
            gin_files, gin_bindings: as in `switchx.job_from_gin`: a run of configs/runs, or
                the `operative_config.gin` of a run folder.
            model_dir: run folder. The gin files' model may differ from the one trained there
                in capacity, precision or dispatcher, but not in shape.
            step: step of its checkpoint; None is the newest complete one, "best" the best
                validated.
            mesh: mesh as in `load`; the gin files' mesh is for training.

        Raises:
            ConfigurationError: the gin files describe no job (a `ValueError`).
            ValueError: the model or vocabulary is not the folder's (all fields that differ
                are named); a step without model_dir; the job starts from a teacher; or as in
                `load`.
        """
        devices = ModelMesh.of(mesh)
        job = job_from_gin(gin_files, gin_bindings)
        job, params, step, fingerprint = params_of_job(job, model_dir, step, mesh)
        text_format = TextFormat.of_training(
            describe(job.source, "job.source"), is_encoder_decoder=job.model.is_encoder_decoder
        )
        folder = job.init_from if model_dir is None else model_dir
        decoding = {} if folder is None else read_decoding(RunFolder(folder))
        parts = job.model, params, job.vocabulary, step, text_format, fingerprint, devices
        return cls(*parts, decoding=decoding)

    @property
    def num_params(self) -> int:
        """Number of parameters of the configuration; two int4 ones in a byte count as two."""
        return num_elements(abstract_params(self.config))

    def logits(
        self, encoder_tokens=None, decoder_tokens=None, *, lengths=None, dropless: bool = False
    ):
        """Logits `[B, L, V]` of every decoder position, as `switchx eval` computes them.

        A decoder-only model takes one array, `model.logits(decoder_tokens)`.

        Args:
            encoder_tokens: integers `[B, M]`; the vocabulary's `pad_id`, 0 with T5's, is
                padding, which nothing attends to.
            decoder_tokens: `[B, L]`: the decoder's inputs, including the start token 0 (or
                whatever comes first). After it, `pad_id` is padding. A position sees itself
                and earlier ones, even if training made a whole prefix visible.
            lengths: number of tokens in each row of `decoder_tokens`, `[B]`; everything after
                them is padding, whatever its ids. A vocabulary may have no `pad_id`.
            dropless: whether no token is dropped. With False, experts have the capacity of
                evaluation, and where one is full, a row depends on the other rows of its
                routing group.

        Raises:
            ValueError: the arrays are not two-dimensional arrays of integers, differ in their
                number of rows, have ids outside the vocabulary, or are too long for the
                positions.
        """
        has_encoder = self.config.is_encoder_decoder
        if not has_encoder and decoder_tokens is None:
            encoder_tokens, decoder_tokens = None, encoder_tokens
        if decoder_tokens is None or has_encoder != (encoder_tokens is not None):
            needs = "encoder_tokens and decoder_tokens; give both"
            needs = needs if has_encoder else "decoder_tokens alone; give one array"
            raise ValueError(f"architecture={self.config.architecture!r} reads {needs}")
        arrays = {"encoder_tokens": encoder_tokens} if has_encoder else {}
        arrays["decoder_tokens"] = decoder_tokens
        arrays = {
            name: token_array(tokens, name, self.config) for name, tokens in arrays.items()
        }
        if len({len(token_BL) for token_BL in arrays.values()}) > 1:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise ValueError(f"got {shapes}; expected equally many rows")
        config, B = self._config(dropless), len(arrays["decoder_tokens"])
        (rows,) = self.devices.batches(config, (B,))
        for name, token_BL in list(arrays.items()):
            is_token_BL = token_BL != (-1 if self.ids.pad_id is None else self.ids.pad_id)
            if name == "decoder_tokens" and lengths is not None:
                is_token_BL = jnp.arange(token_BL.shape[1]) < _lengths_B1(lengths, token_BL)
            arrays[f"is_{name.removesuffix('s')}"] = is_token_BL
        arrays = {name: jnp.pad(x, ((0, rows - B), (0, 0))) for name, x in arrays.items()}
        if self.experts is not None:
            arrays |= {"params": self._separated, "options": self.devices.options}
            return self.experts.run(logits_of, slotted(config), **arrays)[:B]
        self.devices.check(config, self.params)
        shapes = tuple(token_BL.shape for token_BL in arrays.values())
        return self.devices.run(logits_of, (config,), shapes, params=self.params, **arrays)[:B]

    def generate(
        self,
        inputs: Texts,
        *,
        max_length: int | None = None,
        batch_size: int = 32,
        dropless: bool = True,
        with_scores: bool = False,
        **decoding,
    ) -> list:
        """Generates an output for each input, in order.

        Texts become token ids as in training: eos ends an encoder's input if the tasks of
        training ended it so, and `<extra_id_0>` is sentinel 0 if they had sentinels. A
        prefix such as `translate English to German: ` is part of the text. Token ids are read
        as they are, without trailing padding; a decoder-only model reads the start token first.

        Args:
            inputs: texts, or lists (or rows of an array) of token ids.
            max_length: largest number of tokens of an output, the end included:
                `max_new_tokens`.
            batch_size: largest number of inputs at once; they are batched by length.
            dropless: whether no token is dropped, so that an output depends only on its input.
                With False, experts have the capacity of evaluation, and where one is full, an
                output depends on the inputs that it is batched with.
            with_scores: whether `Generated`s are returned instead of texts or lists of token
                ids.
            decoding: fields of `DecodingConfig`, such as `beam_size=4`; by default the model's
                own (`decoding`), or else greedy. An input has a list of outputs if
                `num_return_sequences` is above 1.

        Raises:
            ValueError: an input has no tokens, is too long or has unknown ids,
                or the settings contradict each other; nothing has been generated. Or an input
                has no output whose score is a number, for example because weights are NaN.
        """
        if max_length is not None:
            if "max_new_tokens" in decoding:
                raise ValueError("max_length and max_new_tokens are the same; give one")
            decoding["max_new_tokens"] = max_length
        tokens, is_text = self._read(inputs, "inputs")
        generator = self.generator(batch_size=batch_size, dropless=dropless, **decoding)
        results = [None] * len(tokens)
        number = generator.decoding.num_return_sequences
        with compiled_programs_kept(None):
            for index, hypotheses in generator([self.prompt(each) for each in tokens]):
                results[index] = [
                    Generated.of(each, self.vocabulary if is_text else None, generator.stops)
                    for each in hypotheses[:number]
                ]
        if not with_scores:
            results = [[each.output for each in outputs] for outputs in results]
        return results if number > 1 else [outputs[0] for outputs in results]

    def score(
        self, inputs: Texts | None, targets: Texts, *, batch_size=32, dropless=True, **asked
    ) -> list[Score]:
        """Log-likelihoods of targets given inputs, in order.

        Args:
            inputs: as in `generate`. For a decoder-only model they may be empty, or None for
                no inputs: targets are then scored from their first token on.
            targets: texts, each with its end, or token ids, scored as they are.
            batch_size, dropless: as in `generate`.
            asked: `logprobs` and `forced_prefix` of `Scorer`.

        Returns:
            For each target the sum of its tokens' natural log-probabilities, and their number.

        Raises:
            ValueError: as in `generate`, or inputs and targets differ in number.
        """
        if inputs is None:
            inputs = [[]] * len(targets)
        read, _ = self._read(inputs, "inputs")
        wanted, _ = self._read(targets, "targets")
        if len(read) != len(wanted):
            raise ValueError(f"{len(read)} inputs for {len(wanted)} targets; give a pair each")
        scorer = self.scorer(batch_size=batch_size, dropless=dropless, **asked)
        with compiled_programs_kept(None):
            return [score for _, score in sorted(scorer(list(zip(read, wanted, strict=True))))]

    def decoding_config(self, **asked) -> DecodingConfig:
        """The decoding configuration: the settings asked for, with the model's other defaults.

        Raises:
            FieldError: settings are out of bounds, or contradict each other.
        """
        own = {"is_prompt_bidirectional": self.text_format.is_prompt_bidirectional}
        own |= decoding_ids(self.ids)
        return DecodingConfig(**(own | with_defaults(self.decoding, asked)))

    def generator(
        self,
        *,
        batch_size: int = 32,
        dropless: bool = True,
        record: RecordWriter | None = None,
        **decoding,
    ) -> Generator:
        """The `Generator` of prompts, with its `record`; `decoding` as in `decoding_config`."""
        settings = self.decoding_config(**decoding)
        config = for_decoding(self.config, is_dropless=dropless)
        where = self.devices, self.experts, self.vocabulary, record
        return Generator(config, self._separated, settings, batch_size, *where)

    def scorer(self, *, batch_size: int = 32, dropless: bool = True, **asked) -> Scorer:
        """The `Scorer` of pairs of token lists; `asked` are its `logprobs`, `forced_prefix` and
        `start_id`, by default the vocabulary's."""
        return Scorer(
            self._config(dropless),
            self.params if self.experts is None else self.experts.params,
            is_prompt_bidirectional=self.text_format.is_prompt_bidirectional,
            batch_size=batch_size,
            devices=self.devices,
            experts=self.experts,
            **({"start_id": self.ids.start_id} | asked),
        )

    def save_vocabulary(self, folder) -> None:
        """Writes the vocabulary into a folder, if the model has one."""
        if self.vocabulary is not None:
            save_vocabulary(self.vocabulary, folder)

    def prompts(self, inputs: Texts) -> list[list[int]]:
        """Token ids that a generator reads for each input; raises as `generate` does."""
        return [self.prompt(tokens) for tokens in self._read(inputs, "inputs")[0]]

    def prompt(self, tokens: list[int]) -> list[int]:
        """Token ids that a generator reads for an input, in a decoder after the start token."""
        if self.config.is_encoder_decoder or self.ids.start_id is None:
            return tokens
        return [self.ids.start_id, *tokens]

    def without_start(self, prompt: list[int]) -> list[int]:
        """The input that `prompt` made a prompt of."""
        return prompt[len(self.prompt([])) :]

    @property
    def ids(self) -> Vocabulary:
        """The vocabulary, or T5's special ids without one."""
        return self.vocabulary or TokenIdVocabulary(self.config.vocab_size)

    def record_info(self, source: str, dropless: bool = True) -> RecordInfo:
        """The description of this model for a record of its routing.

        Args:
            source: the operation that records, as in `RecordInfo`.
            dropless: as in `generate`.

        Raises:
            ValueError: the model has no Switch layers.
        """
        require(
            self.config.switch is not None,
            "a record of a model without Switch layers: nothing is routed; record a sparse one",
        )
        config = self._config(dropless)
        return RecordInfo(
            config.switch,
            config.sparse_layers_by_stack,
            self.step,
            source,
            self.fingerprint,
            self.vocabulary and self.vocabulary.fingerprint(),
        )

    def _config(self, dropless: bool) -> ModelConfig:
        """The configuration for reading whole texts."""
        return without_capacity(self.config) if dropless else with_capacity(self.config)

    @functools.cached_property
    def _separated(self) -> dict:
        """The parameters in the form that generators take, made once for all of them."""
        if self.experts is not None:
            return self.experts.params
        return separate_experts(self.params) if self.devices.mesh is None else self.params

    def _read(self, texts: Texts, role: Literal["inputs", "targets"]):
        form = self.config, self.vocabulary, self.text_format, self.ids
        return token_lists(texts, role, *form)


def _lengths_B1(lengths, token_BL) -> jax.Array:
    """Numbers of tokens of rows, `[B, 1]`; raises ValueError if they are not such numbers."""
    B, L = token_BL.shape
    length_B = np.asarray(lengths)
    require(
        length_B.shape == (B,)
        and np.issubdtype(length_B.dtype, np.integer)
        and bool(np.all((length_B >= 1) & (length_B <= L))),
        f"lengths={lengths!r:.60}; expected {B} whole numbers, 1 to {L}, one for each row",
    )
    return jnp.array(length_B[:, None])


def load(
    model_dir: str | os.PathLike,
    step: int | Literal["best"] | None = None,
    *,
    mesh: MeshSpec | None = None,
    expert_slots: int | ExpertSlots | None = None,
    task: str | None = None,
    compiler: CompilerOptions = CompilerOptions(),
) -> Model:
    """The model in a run folder, or the one that `switchx quantize` wrote.

    Args:
        model_dir: the folder; or "tiny", the model that ships (`switchx/shipped`).
        step: step of a run's checkpoint; None is the newest complete one, "best" the best
            validated.
        mesh: mesh over whose devices parameters and computations are split, as in training;
            None is the default device.
        expert_slots: number of experts of each Switch layer that are on the device at once, the
            most recently chosen; all are in host memory, and results stay the same. None keeps
            all on the device. `ExpertSlots` has more options (`host_bytes`: experts in files).
        task: task whose experts are loaded, where experts are divided among tasks.
        compiler: XLA options of the model's programs.

    Raises:
        ValueError: the folder is neither of them, has no complete checkpoint, or its parameters
            are not those of its configuration (all that differ are named); a quantized model's
            files are damaged, missing or of another version (the file is named); the mesh does
            not fit the devices or a parameter; there is no such `task` or `expert_slots`, or
            the folder is not read expert by expert (`host_bytes`); XLA refuses an option.
    """
    model_dir = folder_of(model_dir)
    if task is not None:
        require(
            expert_slots is None and not is_artifact(model_dir),
            f"task={task!r} of {str(model_dir)!r}, expert_slots={expert_slots}; use a run "
            "folder without slots, or what `switchx quantize --task` wrote, without task",
        )
        run_config = read_config(RunFolder(model_dir))
        return _of_task(load(model_dir, step, mesh=mesh, compiler=compiler), run_config, task)
    devices = ModelMesh.of(mesh, compiler)
    if expert_slots is not None:
        model = _load_with_slots(model_dir, step, mesh, expert_slots)
        return dataclasses.replace(model, devices=devices)
    if is_artifact(model_dir):
        return _load_artifact(pathlib.Path(model_dir).expanduser(), step, devices)
    return _load_run(model_dir, step, devices)


def _of_task(model: Model, run_config: dict, task: str) -> Model:
    config, params, own = of_task(model.config, model.params, run_config.get("source"), task)
    text_format = TextFormat.of_training(own, is_encoder_decoder=config.is_encoder_decoder)
    fingerprint = hashlib.sha256(f"{model.fingerprint} {task}".encode()).hexdigest()
    return dataclasses.replace(
        model, config=config, params=params, text_format=text_format, fingerprint=fingerprint
    )


def _load_run(model_dir, step, devices: ModelMesh, select=lambda params: params) -> Model:
    """The model of a run folder; `select` returns those of its parameters that are read."""
    run = RunFolder(model_dir)
    config = read_model_config(run)
    source = read_config(run).get("source")
    step = choose_step(run, step)
    target = devices.abstract(select(abstract_params(config)))
    params = restore_params(run.path, step, target=target, model=config)
    # Every run that was trained here has a vocabulary; a model from elsewhere may have none.
    has_vocabulary = source is not None or (run.root / DESCRIPTION_FILE).exists()
    vocabulary = load_vocabulary(run.root) if has_vocabulary else None
    text_format = TextFormat.of_training(source, is_encoder_decoder=config.is_encoder_decoder)
    fingerprint = checkpoint_fingerprint(run, step, vocabulary)
    parts = config, params, vocabulary, step, text_format, fingerprint, devices
    return Model(*parts, decoding=read_decoding(run))


def _load_with_slots(model_dir, step, mesh, expert_slots: int | ExpertSlots) -> Model:
    """Reads the model into host memory, and moves all but its experts to the device."""
    asked = ExpertSlots(expert_slots) if isinstance(expert_slots, int) else expert_slots
    require(
        mesh is None,
        "expert_slots or ring_slots with a mesh: experts come to one device; leave out one of "
        "the two",
    )
    with jax.default_device(cpu_device()):
        if asked.host_bytes is None:
            model, read = load(model_dir, step), None
        elif is_artifact(model_dir):
            model = _load_artifact(pathlib.Path(model_dir).expanduser(), step, None)
            read = slices_of(model.config, model.params)
        else:
            run = RunFolder(model_dir)
            require_merged(run, "model_dir")
            checkpoint = run.checkpoints / str(choose_step(run, step))
            read = experts_of_checkpoint(read_model_config(run), checkpoint, asked.slots)
            model = _load_run(model_dir, step, ModelMesh.of(None), without_experts)
    config, params, experts = outside_of_device(model.config, model.params, asked, read)
    return dataclasses.replace(model, config=config, params=params, experts=experts)


def _load_artifact(folder: pathlib.Path, step, devices: ModelMesh | None) -> Model:
    if step is not None:
        raise ValueError(f"step={step!r} of {folder}, which is a quantized model and has one")
    artifact = read_artifact(folder) if devices else open_artifact(folder)
    try:
        step = artifact.about["step"]
        text_format = TextFormat(**artifact.about["text_format"])
    except (KeyError, TypeError) as error:
        wrong = f"{folder}: artifact.json does not say how texts are read ({error})"
        raise ValueError(f"{wrong}; make it again with `switchx quantize`") from error
    is_float32 = artifact.config.precision.compute == "float32"
    return Model(
        artifact.config,
        devices.place(native(artifact.params, in_order=is_float32))
        if devices
        else artifact.params,
        load_vocabulary(folder) if (folder / DESCRIPTION_FILE).exists() else None,
        step,
        text_format,
        artifact.fingerprint,
        devices or ONE_DEVICE,
        decoding=artifact.about.get("decoding", {}),
    )
