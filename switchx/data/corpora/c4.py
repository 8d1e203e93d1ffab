# SPDX-License-Identifier: Apache-2.0
"""C4 and mC4, as prepared by TFDS' own builders; read here without TensorFlow.

Raffel et al. 2020 (arXiv:1910.10683), section 2.2; Xue et al. 2021 (arXiv:2010.11934).
"""

import dataclasses
import os
from typing import Literal

import tensorflow_datasets as tfds
from etils import epath

from switchx.data import data_dir as locations
from switchx.data.corpora.corpus import CorpusSource, fingerprint_of, require_split
from switchx.fields import check_choices, require


@dataclasses.dataclass(frozen=True)
class C4:
    """The newest version below DATA_DIR/c4, in the ArrayRecord format.

    Preparing it takes TFDS with TensorFlow and Beam and a cluster; what is published as
    JSON lines (allenai/c4) is read by TextFiles.

    Attributes:
        variant: TFDS' config.
        language: of the variant `multilingual`, such as `de`; makes its splits `de` and
            `de-validation` this corpus' train and validation.
    """

    variant: Literal["en", "en.noclean", "realnewslike", "webtextlike", "multilingual"] = "en"
    language: str | None = None

    def __post_init__(self):
        check_choices(self)
        require(
            (self.variant == "multilingual") == (self.language is not None),
            f"C4.variant={self.variant!r} does not go with language={self.language!r}; the "
            "variant 'multilingual' takes a language, such as 'de', the others none",
        )

    @property
    def name(self) -> str:
        return f"c4/{self.variant}" + (f"/{self.language}" if self.language else "")

    def open(self, split: str, data_dir: str | None) -> CorpusSource:
        """Split `train` or `validation`; examples are `{"text": ...}`.

        Args:
            data_dir: as elsewhere, or an address that TFDS can read (`gs://...`).

        Raises:
            ValueError: not prepared, in another format, or no such split.
        """
        require_split(self.name, split, ("train", "validation"))
        folder = self._find(data_dir)
        builder = tfds.builder_from_directory(folder)
        require(
            builder.info.file_format is tfds.core.FileFormat.ARRAY_RECORD,
            f"{folder} is in the format {builder.info.file_format.value}, expected "
            "array_record; convert it where TensorFlow is installed: `tfds convert_format "
            f"--dataset_version_dir={folder} --out_file_format=array_record --out_dir=DIR`",
        )
        stored_split = split
        if self.language:
            stored_split = self.language + ("-validation" if split == "validation" else "")
        require_split(self.name, stored_split, builder.info.splits)
        records = builder.as_data_source(split=stored_split)
        fingerprint = fingerprint_of(
            "c4", builder.info.full_name, builder.info.splits[stored_split].shard_lengths
        )
        return CorpusSource(f"{self.name}/{split}", fingerprint, ("text",), records)

    def _find(self, data_dir: str | None) -> os.PathLike:
        is_remote = data_dir is not None and "://" in data_dir
        folders = [data_dir] if is_remote else locations.data_dirs(data_dir)
        for folder in folders:
            versions = epath.Path(folder) / "c4" / self.variant
            found = {}
            for version in versions.iterdir() if versions.exists() else ():
                if tfds.core.Version.is_valid(version.name):
                    found[tfds.core.Version(version.name)] = version
            if found:
                return found[max(found)]
        raise ValueError(
            f"c4/{self.variant} is not prepared below {', '.join(map(str, folders))}; set "
            f"DATA_DIR to TFDS' data folder, or prepare it where TensorFlow and Beam are "
            f"installed: `tfds build c4/{self.variant} --file_format=array_record "
            "--data_dir=DIR`; the JSON lines of allenai/c4 are read by the corpus TextFiles"
        )
