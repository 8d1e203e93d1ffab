# SPDX-License-Identifier: Apache-2.0
"""`generation_config.json` of transformers as a folder's decoding defaults, and back.

Settings of `DecodingConfig` become defaults; others are reported if they would change a text.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from switchx.data.special_ids import EOS_ID, PAD_ID, their_ids
from switchx.fields import require
from switchx.interop.tensor_folder import read_json

GENERATION = "generation_config.json"
# Their name -> that of `DecodingConfig`, if values mean the same.
_SAME = {
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "num_beams": "beam_size",
    "num_return_sequences": "num_return_sequences",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "prompt_lookup_num_tokens": "prompt_lookup_num_tokens",
    "stop_strings": "stop",
    "suppress_tokens": "suppressed_ids",
}
_LENGTHS = {"max_length": "max_new_tokens", "min_length": "min_new_tokens"}
_IDS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}  # values if none is given
_READ = (*_SAME, *_LENGTHS, *_IDS, *_SAMPLING, "do_sample", "forced_bos_token_id")
# Settings that change no text of an encoder-decoder.
_SILENT = (
    "_from_model_config", "transformers_version", "bos_token_id", "use_cache", "cache_config",
    "cache_implementation", "output_attentions", "output_hidden_states", "output_scores",
    "output_logits", "return_dict_in_generate", "low_memory", "disable_compile",
    "compile_config", "max_matching_ngram_size", "is_assistant",
)  # fmt: skip
_NEUTRAL = {
    "typical_p": 1.0,
    "encoder_repetition_penalty": 1.0,
    "num_beam_groups": 1,
    "guidance_scale": 1.0,
    "early_stopping": False,
    "renormalize_logits": False,
}


def read_generation(folder: pathlib.Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """A folder's settings of generation; without the file, those in its `config.json`."""
    file = folder / GENERATION
    values = read_json(file) if file.is_file() else {n: config[n] for n in _READ if n in config}
    return {name: value for name, value in values.items() if value is not None}


def end_ids(values: Mapping[str, Any]) -> list:
    """The ids that end a text, one of which is `DecodingConfig.eos_id`."""
    ends = values.get("eos_token_id")
    return list(ends) if isinstance(ends, list) else [] if ends is None else [ends]


def decoding_defaults(
    values: Mapping[str, Any],
    special_ids: Sequence[int],
    vocab_size: int,
    where: str,
    *,
    has_encoder: bool = True,
) -> tuple[dict[str, Any], list[str]]:
    """Returns fields of a `DecodingConfig` in JSON, and sentences on what is not used.

    Args:
        values: settings, as `read_generation` returns them.
        special_ids: the model's special ids, by which its token ids become ours.

    Raises:
        ValueError: an id is not in the vocabulary. Values are not checked otherwise.
    """
    found, unused = {}, {}
    if not has_encoder:  # their lengths count the prompt, and the token is forced without one
        given = {n: values[n] for n in (*_LENGTHS, "forced_bos_token_id") if n in values}
        unused = {n: v for n, v in given.items() if v and _LENGTHS.get(n) not in values}
        values = {n: v for n, v in values.items() if n not in given}
    for theirs, ours in _LENGTHS.items():
        length = values.get(theirs)  # of a decoder's input, which begins with the start
        if length and ours not in values:
            found[ours] = length - 1 if type(length) is int else length
    found |= {_SAME[name]: value for name, value in values.items() if name in _SAME}
    sampling = {name: values[name] for name in _SAMPLING if name in values}
    if values.get("do_sample") and found.get("beam_size", 1) == 1:
        sampling = _SAMPLING | sampling
        sampling["top_k"] = sampling["top_k"] or None
        found |= sampling
        sampling = {}
    elif values.get("do_sample"):
        unused |= sampling | {"do_sample": True}
    if (forced := values.get("forced_bos_token_id")) == special_ids[PAD_ID]:
        unused["forced_bos_token_id"] = forced  # padding in an output is not kept
    elif forced is not None:
        found["forced_prefix"] = [forced]
    if others := [i for i in end_ids(values) if i != special_ids[EOS_ID]]:
        found["other_eos_ids"] = others
    ours = {their: our for our, their in their_ids(special_ids).items()}
    for name in ("forced_prefix", "other_eos_ids", "suppressed_ids"):
        ids = found.get(name, [])
        require(
            isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab_size for i in ids),
            f"{where}: the tokens {ids!r:.80} are not all of 0 to {vocab_size - 1}; correct it",
        )
        found |= {name: [ours.get(i, i) for i in ids]} if ids else {}
    for name, value in values.items():
        if name not in _READ + _SILENT and value != _NEUTRAL.get(name) and value:
            unused[name] = value
    notes = []
    if unused:
        notes.append(
            f"{where}: not used: {_listed(unused)}; texts of transformers may be others"
        )
    idle = {name: value for name, value in sampling.items() if value != _SAMPLING[name]}
    if idle and not values.get("do_sample"):
        notes.append(
            f"{where}: {_listed(idle)} without do_sample=True: neither transformers nor "
            "switchx samples by itself; to sample, give them as options"
        )
    return found, notes


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.80}" for name, value in values.items())


def write_generation(
    defaults: Mapping[str, Any], special_ids: Sequence[int], start: int
) -> dict[str, Any]:
    """The content of `generation_config.json`."""
    theirs = their_ids(special_ids)

    def ids(name: str) -> list[int]:
        return [theirs.get(i, i) for i in defaults.get(name, ())]

    ends = [special_ids[1], *ids("other_eos_ids")]
    content = {
        "decoder_start_token_id": start,
        "eos_token_id": ends if len(ends) > 1 else ends[0],
        "pad_token_id": special_ids[0],
    }
    content |= {name: defaults[ours] for name, ours in _SAME.items() if ours in defaults}
    if suppressed := ids("suppressed_ids"):
        content["suppress_tokens"] = suppressed
    if "temperature" in defaults:
        sampling = {name: defaults[name] for name in _SAMPLING}
        content |= sampling | {"do_sample": True, "top_k": sampling["top_k"] or 0}
    if forced := ids("forced_prefix"):
        content["forced_bos_token_id"] = forced[0]
    return content
