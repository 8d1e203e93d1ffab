# SPDX-License-Identifier: Apache-2.0
"""A quantized model as a folder that describes itself, with checksums of every byte.

    artifact.json         what the model is, layout versions, size and SHA-256 of every file
    weights.safetensors   parameters by name; a QTensor as `<name>/values`, `<name>/scales_EFG`

plus files that the writer adds, such as the vocabulary. 4-bit values are packed two to a byte.
`artifact.json` has a checksum of itself. It is written last, into a folder that is then
renamed, so an artifact exists whole or not at all. The format holds nothing executable.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves_with_path
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from pallas_kernels import QTensor
from switchx.inference.offload import expert_source
from switchx.inference.quantize import is_quantized, packed
from switchx.models.config import ModelConfig, model_from_description
from switchx.models.params import abstract_params
from switchx.models.stored_experts import EXPERT_MATRICES, EXPERTS_PATH
from switchx.object_store import absolute
from switchx.tree import map_named, named_leaves, path_name
from switchx.whole_folders import (
    damages,
    give_mode_of_umask,
    new_folder,
    num_bytes,
    read_manifest,
    write_manifest,
)

MANIFEST = "artifact.json"
WEIGHTS = "weights.safetensors"
# An artifact in which any of these values differs is not read.
HEADER = {
    "format": "switchx quantized model",
    "format_version": 1,
    "layout_version": QTensor.LAYOUT_VERSION,
}
AGAIN = "copy the whole folder again, or make it with `switchx quantize`"


@dataclasses.dataclass(frozen=True)
class Artifact:
    """The contents of an artifact's folder.

    Attributes:
        config: the model's configuration, with unrolled layers.
        params: the model's parameters, with `QTensor`s whose 4-bit values are packed.
        about: the writer's description of where the model comes from and how it was made.
        fingerprint: fingerprint of all contents, in hexadecimal.
    """

    config: ModelConfig
    params: dict
    about: dict[str, Any]
    fingerprint: str


def is_artifact(folder: str | os.PathLike) -> bool:
    """Whether a folder holds an artifact, or the remains of one."""
    path = pathlib.Path(folder).expanduser()
    return (path / MANIFEST).exists() or (path / WEIGHTS).exists()


def write_artifact(
    folder: str | os.PathLike,
    config: ModelConfig,
    params: dict,
    about: dict[str, Any],
    add_files: Callable[[pathlib.Path], None] = lambda folder: None,
) -> int:
    """Writes a quantized model, whole or not at all.

    Args:
        config, params: the quantized model, as `quantize_experts` returns it.
        about: JSON that says where the model comes from.
        add_files: writes further files; called with the folder before it is renamed.

    Returns:
        The size of all files in bytes.

    Raises:
        ValueError: see `whole_folders.new_folder`.
    """
    with new_folder(folder) as partial:
        save_file(named_leaves(packed(params)), partial / WEIGHTS)
        give_mode_of_umask(partial / WEIGHTS)
        add_files(partial)
        describe_artifact(partial, config, params, about)
        return num_bytes(partial)


def describe_artifact(
    folder: pathlib.Path, config: ModelConfig, params: dict, about: dict[str, Any]
) -> None:
    """Writes `artifact.json` into a folder that already has the model's packed weights."""
    content = HEADER | {
        "model": dataclasses.asdict(config),
        "quantized": {
            path_name(path): {"bits": leaf.bits, "group_size": leaf.group_size}
            for path, leaf in tree_leaves_with_path(params, is_leaf=is_quantized)
            if is_quantized(leaf)
        },
        "about": about,
    }
    write_manifest(folder, MANIFEST, content, "sha256")


def read_artifact(folder: str | os.PathLike) -> Artifact:
    """Reads the model in a folder, after checking every byte of it against its checksums.

    Raises:
        ValueError: a file is missing, cut short or changed, or the artifact has another
            version; the message names the file.
    """
    return _read(folder, are_experts_read=True)


def open_artifact(folder: str | os.PathLike) -> Artifact:
    """Like `read_artifact`, but experts stay in the file: their arrays are `FileArray`s.

    The file stays open as long as one of these arrays exists, so they remain this model's even
    when the folder is replaced or removed.

    Raises:
        ValueError: as `read_artifact`.
    """
    return _read(folder, are_experts_read=False)


def _read(folder: str | os.PathLike, *, are_experts_read: bool) -> Artifact:
    path = absolute(folder)
    content = _read_manifest(path)
    if damage := next(damages(path, content["files"], "sha256"), None):
        raise ValueError(f"{path} is no whole artifact: {damage:.300}; {AGAIN}")
    where = str(path / MANIFEST)
    try:
        config = model_from_description(content["model"], where)
        arrays = _arrays(path / WEIGHTS, are_experts_read)
    except TypeError as error:
        raise ValueError(f"{where} describes no model ({error}); write it again") from error
    except SafetensorError as error:
        raise ValueError(f"{path / WEIGHTS} cannot be read ({error})") from error
    params = _params(path, config, content["quantized"], arrays)
    return Artifact(config, params, content["about"], content["sha256"])


def _read_manifest(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = read_manifest(path, MANIFEST, "sha256")
        for name, ours in HEADER.items():
            if content.get(name) != ours:
                raise ValueError(
                    f"its {name} is {content.get(name)!r:.80}, this switchx reads {ours!r}; "
                    f"it was written by {_writer(content)}"
                )
        if WEIGHTS not in content["files"]:
            raise ValueError(f"its {MANIFEST} names no {WEIGHTS}")
        _check_form(content)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no whole artifact: {error}; {AGAIN}") from error
    return content


def _writer(content: dict[str, Any]) -> str:
    provenance = content.get("about")
    return str(provenance.get("versions") if isinstance(provenance, dict) else None)[:200]


def _check_form(content: dict[str, Any]) -> None:
    """Raises ValueError, with a clause, where a value is not one that the writer writes."""
    for name in ("model", "quantized", "about"):
        if not isinstance(content.get(name), dict):
            raise ValueError(f"its {MANIFEST} has no object {name!r}")
    for name, each in content["quantized"].items():
        has_form = isinstance(each, dict) and each.keys() == {"bits", "group_size"}
        sizes = each.values() if has_form else ()
        if not has_form or not all(n is None or (type(n) is int and n >= 1) for n in sizes):
            raise ValueError(f"its {MANIFEST} quantizes {name!r:.80} to {each!r:.80}")
    # A user's own class would be imported, and so its code would run.
    if _names_a_class(content["model"]):
        raise ValueError(f"its {MANIFEST} names a class; a quantized model is one of ours")


def _names_a_class(described: Any) -> bool:
    """Whether a description, or one nested in it, names a type."""
    if isinstance(described, dict):
        return "type" in described or any(map(_names_a_class, described.values()))
    return isinstance(described, list) and any(map(_names_a_class, described))


def _params(path: pathlib.Path, config: ModelConfig, quantized: dict, arrays: dict) -> dict:
    """A configuration's parameters; the error names all that are missing or do not fit."""
    expected, problems = set(), []

    def leaf_of(name, leaf):
        is_expert = name in quantized
        names = [f"{name}/values", f"{name}/scales_EFG"] if is_expert else [name]
        expected.update(names)
        if missing := [each for each in names if each not in arrays]:
            problems.extend(f"{each} is missing" for each in missing)
            return None
        found = [arrays[each] for each in names]
        if is_expert:
            found = [QTensor(*found, **quantized[name])]
            found[0].check()
        if found[0].shape != leaf.shape or (is_expert and EXPERT_MATRICES not in name):
            problems.append(f"{name} is {list(found[0].shape)}, expected {list(leaf.shape)}")
        return found[0]

    params = map_named(leaf_of, abstract_params(config))
    problems += [f"{name} is not of this model" for name in arrays.keys() - expected]
    if problems:
        raise ValueError(
            f"{path / WEIGHTS} does not hold the model that {MANIFEST} describes: "
            + "; ".join(sorted(problems))
        )
    return params


# Names of dtypes in safetensors; NumPy knows all of them once JAX is imported.
_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I8": "int8",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
}


def _arrays(path: pathlib.Path, are_experts_read: bool) -> dict:
    """All arrays of a safetensors file by name; experts that are not read are `FileArray`s.
    All come from the file that the path names now.

    safetensors 0.8 cannot read float8 itself. The file begins with the length of the header (8
    bytes, little-endian) and the header: JSON with each array's dtype, shape and place behind
    the header.
    """
    with safe_open(path, "np"):  # which checks the header: its size, and every place in it
        pass
    file = expert_source.OpenFile(path)
    length = int.from_bytes(file.array(0, (8,), np.dtype(np.uint8)).tobytes(), "little")
    header = json.loads(file.array(8, (length,), np.dtype(np.uint8)).tobytes())
    found = {}
    for name, each in header.items():
        if name == "__metadata__":
            continue
        if each["dtype"] not in _DTYPES:
            raise SafetensorError(f"{name} is of {each['dtype']}, no dtype of switchx")
        dtype, offset = np.dtype(_DTYPES[each["dtype"]]), 8 + length + each["data_offsets"][0]
        shape = tuple(each["shape"])
        if EXPERTS_PATH in name and not are_experts_read:
            found[name] = expert_source.FileArray(file, offset, shape, dtype)
        else:
            found[name] = jnp.array(file.array(offset, shape, dtype))
    return found
