# SPDX-License-Identifier: Apache-2.0
"""C4 and mC4, as prepared by TFDS's own builders; read here without TensorFlow.

ArrayRecord and TFRecord are read in place; TFRecord compressed with gzip is prepared
first.

Raffel et al. 2020 (arXiv:1910.10683), section 2.2; Xue et al. 2021 (arXiv:2010.11934).
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from switchx.data.corpora.corpus import CorpusSource, fingerprint_of, require_split
from switchx.data.corpora.prepared import Recipe, open_prepared
from switchx.data.corpora.tfds_folder import find_folder
from switchx.fields import check_choices, require


@dataclasses.dataclass(frozen=True)
class C4:
    """The newest version in DATA_DIR/c4, in the ArrayRecord or the TFRecord format.

    Preparing it takes TFDS with TensorFlow and Beam and a cluster; the version published as
    JSON lines (allenai/c4) is read by TextFiles.

    Attributes:
        variant: TFDS config.
        language: language of the variant `multilingual`, such as `de`; this corpus's train and
            validation are then its splits `de` and `de-validation`.
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
            data_dir: data folder, or an address that TFDS can read (`gs://...`).

        Raises:
            ValueError: C4 is not prepared, in another format or damaged, or has no such split.
        """
        require_split(self.name, split, ("train", "validation"))
        folder = find_folder(f"c4/{self.variant}", data_dir)
        stored_split = split
        if self.language:
            stored_split = self.language + ("-validation" if split == "validation" else "")
        require_split(self.name, stored_split, folder.splits)
        account = folder.account(self.name, stored_split)
        if not folder.is_packed(stored_split):
            records = folder.records(stored_split)
            info = folder.builder.info
            lengths = info.splits[stored_split].shard_lengths
            fingerprint = fingerprint_of("c4", info.full_name, lengths)
            name = f"{self.name}/{split}"
            return CorpusSource(name, fingerprint, ("text",), records, (account,))

        def make_splits() -> dict[str, Iterator[dict[str, str]]]:
            return {split: ({"text": e["text"]} for e in folder.examples(stored_split))}

        name = f"{self.name.replace('/', '_')}_{split}".replace(".", "_").replace("-", "_")
        key = fingerprint_of("c4 2", folder.folder, folder.fingerprint(stored_split))
        recipe = Recipe(name, key, ("text",), make_splits, account)
        return open_prepared(recipe, split, folder.data_dir)
