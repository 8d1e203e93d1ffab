# SPDX-License-Identifier: Apache-2.0
"""Settings that a job takes from the run INIT_FROM and VOCABULARY_FILE, before its flags.

The model of a run folder is bound after the gin files and before the flags. Fields that decide
what parameters mean are the folder's; so are those that an evaluation may change, if no gin
file binds them. What changes no mathematics (the dispatcher, remat, scan_layers) and dropout
are the new run's own. With INIT_RULES or INIT_DROP the gin files may describe another model.
INIT_FROM in a gin file, as in the operative configuration of a run, replaces nothing.

VOCAB_SIZE follows VOCABULARY_FILE, a flag or a binding in a gin file. A flag VOCAB_SIZE wins
over both; one in a user's own gin file, as in an operative configuration, wins over
VOCABULARY_FILE in a gin file; those of the shipped files are defaults.
"""

import dataclasses
import logging
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

import gin

from switchx.checkpoint.run_folder import RunFolder, read_model_config
from switchx.data.vocabularies import read_or_trained
from switchx.fields import describe, differences, require
from switchx.gin_config import gin_internals
from switchx.gin_config.files import configs_dir
from switchx.gin_config.writing import MODEL_FILE, OF_THE_RUN
from switchx.models.config import ModelConfig

# Flags that are read before all others.
FIRST = ("INIT_FROM", "INIT_RULES", "INIT_DROP", "VOCABULARY_FILE")
# Rows of an embedding are a multiple of this, as T5's 32,128 for 32,100 ids are.
_ROWS = 128
_MACROS = {"vocab_size": "VOCAB_SIZE", "num_experts": "NUM_EXPERTS"}
_IMPORTS = "from __gin__ import dynamic_registration\nfrom switchx.models import config\n"

_log = logging.getLogger(__name__)


def take_sources(bindings: Sequence[str], *, has_own_rows: bool) -> None:
    """Binds the model of INIT_FROM, its vocabulary, and VOCAB_SIZE of VOCABULARY_FILE.

    Args:
        bindings: the flags; those in `FIRST` are already parsed, the others are not.
        has_own_rows: whether a gin file that is not shipped sets VOCAB_SIZE (`sets_rows`).

    Raises:
        ValueError: no gin file describes a model, and INIT_FROM has none that can be read.
    """
    flags = {name_of(binding) for binding in bindings}
    source = _macro("INIT_FROM")
    model = None if source is None else _model_of(source)
    if model is not None:
        _bind_model(model, source, is_whole="INIT_FROM" in flags and not _has_rules())
    has_file = "VOCABULARY_FILE" in gin_internals.macros()
    if has_file and "INIT_FROM" in flags and "VOCABULARY_FILE" not in flags:
        gin.parse_config(f"VOCABULARY_FILE = {source!r}")
    if model is None:
        source_macro = _macro_of(gin_internals.macros().get("VOCABULARY_FILE"))
        is_run = source_macro in ("INIT_FROM", "TEACHER")  # whose model has rows of its own
        _bind_rows(follows="VOCABULARY_FILE" in flags or not (is_run or has_own_rows))


def sets_rows(texts: Mapping[str, str]) -> bool:
    """Whether a gin file that is not shipped, or also names a vocabulary, binds VOCAB_SIZE.

    Args:
        texts: text of each gin file, by its path.
    """
    shipped = configs_dir().resolve()
    for path, text in texts.items():
        bound = set(re.findall(r"^(VOCAB\w+)\s*=", text, re.MULTILINE))
        is_own = shipped not in pathlib.Path(path).resolve().parents
        if "VOCAB_SIZE" in bound and (is_own or "VOCABULARY_FILE" in bound):
            return True
    return False


def require_model_of_source(model: ModelConfig, bindings: Sequence[str]) -> None:
    """Checks that no flag makes the model differ from that of INIT_FROM.

    Raises:
        ValueError: flags do; names them, and both values.
    """
    if "INIT_FROM" not in map(name_of, bindings) or _has_rules():
        return
    source = _macro("INIT_FROM")
    source_model = None if source is None else _model_of(source)
    if source_model is None:
        if source is not None:
            _log.warning("INIT_FROM=%r has no model; that of the gin files counts", source)
        return
    found = []
    for difference in differences(describe(source_model), model, "evaluation", "model"):
        field = difference.partition(":")[0].rpartition(".")[2]
        macro = next((_macro_of(v) for (_, n), v in _bound().items() if n == field), None)
        flags = [b for b in bindings if name_of(b).rpartition(".")[2] in (field, macro)]
        short = re.sub(r"\{'type': '([\w.]+)'.*\}", r"a \1", difference)
        found += [f"--gin.{flag} ({short})" for flag in flags]
    if found:
        raise ValueError(
            f"{', '.join(found)}: the model is that of INIT_FROM={source!r}; leave the flag "
            "out, or say by INIT_RULES or INIT_DROP which parameters another model takes "
            "(docs/training.md)"
        )


def _model_of(source: str) -> ModelConfig | None:
    """The model of a run folder; None if there is none and gin files describe one."""
    try:
        model = read_model_config(RunFolder(source))
        require(
            type(model) is ModelConfig,
            f"{source} has a {type(model).__name__}, a class of your own, which is taken by "
            f"its gin file: --gin_file={source}/{MODEL_FILE}",
        )
        return model
    except ValueError as error:
        if _has_model():
            return None
        raise ValueError(
            f"INIT_FROM={source!r}: the model is taken from there, and {error}; for a run that "
            "has begun, its own model.gin is one: --gin_file=MODEL_DIR/model.gin"
        ) from error


def _bind_model(model: ModelConfig, source: str, *, is_whole: bool) -> None:
    """Binds the fields of a model.

    Args:
        is_whole: whether the fields that decide what parameters mean are bound regardless of
            gin files.
    """
    bound = _bound()
    lines = []
    replaced = []
    for cls, field, value, text, may_differ in _fields(model):
        here = bound.get((cls, field))
        macro = _macro_of(here)
        if (cls, field) not in bound:
            if macro := _MACROS.get(field):
                lines.append(f"{macro} = {text}")
                text = f"%{macro}"
            lines.append(f"config.{cls}.{field} = {text}")
        elif is_whole and not may_differ:
            current = here if macro is None else _macro(macro, object)
            is_other = not isinstance(value, type(None)) and current != value
            if is_other and not dataclasses.is_dataclass(value):
                replaced.append(f"{cls}.{field}={value!r} for {current!r}")
            name = macro or f"config.{cls}.{field}"
            lines.append(f"{name} = {text}")
    gin.parse_config(_IMPORTS + "\n".join(lines))
    if replaced:
        _log.warning(
            "the model is that of INIT_FROM=%r, not that of the gin files: %s",
            source,
            ", ".join(replaced),
        )


def _fields(description, may_differ: bool = False) -> Iterator[tuple]:
    """Class, field, value, text in gin, and whether an evaluation may change it, of all fields
    that a new run takes."""
    cls = type(description).__name__
    for field in dataclasses.fields(description):
        occasion = field.metadata.get("may change on")
        if field.name in OF_THE_RUN or occasion == "resume":
            continue
        value = getattr(description, field.name)
        differs = may_differ or occasion == "evaluation"
        text = repr(value)
        if dataclasses.is_dataclass(value):
            text = f"@config.{type(value).__name__}()"
            yield from _fields(value, differs)
        yield cls, field.name, value, text, differs


def _bind_rows(*, follows: bool) -> None:
    """Sets VOCAB_SIZE to what the vocabulary of VOCABULARY_FILE needs; without `follows`, only
    if it is less."""
    file, rows = _macro("VOCABULARY_FILE"), _macro("VOCAB_SIZE", int)
    if file is None or rows is None:
        return
    try:
        size = read_or_trained(file).size
    except (OSError, ValueError):
        return  # whatever needs the vocabulary reports it: a plan needs none
    if follows or rows < size:
        gin.parse_config(f"VOCAB_SIZE = {-(-size // _ROWS) * _ROWS}")


def _bound() -> dict[tuple[str, str], object]:
    """The bound values, by class and field."""
    return {
        (selector.rpartition(".")[2], name): value
        for (_, selector), values in gin_internals.bindings().items()
        for name, value in values.items()
    }


def _has_model() -> bool:
    model = gin_internals.macros().get("MODEL")
    is_ours = getattr(model, "selector", "").rpartition(".")[2] == ModelConfig.__name__
    return not is_ours or ("ModelConfig", "architecture") in _bound()


def _has_rules() -> bool:
    return any(_macro(name, (list, tuple)) for name in ("INIT_RULES", "INIT_DROP"))


def _macro(name: str, kind=str):
    """A macro's value, through macros that it names; None if it has another type."""
    value = gin_internals.macros().get(name)
    if (other := _macro_of(value)) not in (None, name):
        return _macro(other, kind)
    return value if isinstance(value, kind) else None


def _macro_of(value) -> str | None:
    """NAME of a value `%NAME`."""
    selector = getattr(value, "scoped_selector", "")
    name, _, configurable = selector.rpartition("/")
    return name if configurable == "gin.macro" else None


def name_of(binding: str) -> str:
    """NAME of a binding `NAME=VALUE`."""
    return binding.partition("=")[0].strip()
