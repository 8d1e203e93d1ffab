# SPDX-License-Identifier: Apache-2.0
"""Folders with a `tokenizer.json` of each form that models of 2023 to 2026 have."""

import functools
import json
import pathlib

TEXTS = [
    "Hello world, hello there 123 45678!",
    "naïve cafe\u0301  über\n\n  def f(x):\n    return x",
    "日本語 テキスト 🙂🙂",
    "<|im_start|> is <|im_end|> a text",
    " lead and trail ",
    "tabs\tand\r\nlines \u2581",
    "",
]
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def trained(form: str):
    """The library's tokenizer of a form, trained on `TEXTS`."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    of_bytes, alphabet = pre_tokenizers.ByteLevel, pre_tokenizers.ByteLevel.alphabet()
    tokenizer, special = Tokenizer(models.BPE()), [AddedToken(text) for text in SPECIAL]
    trainer = functools.partial(trainers.BpeTrainer, vocab_size=380, show_progress=False)
    texts = [text for text in TEXTS if "|" not in text] * 9
    if form in ("llama_2", "mixtral"):
        tokenizer.model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        if form == "llama_2":
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            )
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
                prepend_scheme="first", split=False
            )
        strip = decoders.Strip(" ", 1, 0)
        parts = [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            strip,
        ]
        tokenizer.decoder = decoders.Sequence(parts)
        names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        tokenizer.train_from_iterator(texts, trainer(special_tokens=names, vocab_size=330))
        # The bytes are ordinary pieces there.
        values = json.loads(tokenizer.to_str())
        values["added_tokens"] = values["added_tokens"][:3]
        tokenizer = Tokenizer.from_str(json.dumps(values))
        bos = ("<s>", 1)
    else:
        tokenizer.normalizer = None if form == "llama_3" else normalizers.NFC()
        regex = {"qwen": QWEN, "llama_3": LLAMA_3}.get(form)
        own = of_bytes(add_prefix_space=False, use_regex=regex is None)
        tokenizer.pre_tokenizer = own
        if regex is not None:
            split = pre_tokenizers.Split(Regex(regex), "isolated")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, own])
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.train_from_iterator(texts, trainer(initial_alphabet=alphabet))
        if form == "neox":
            runs = [AddedToken(" " * n, normalized=False) for n in (4, 3, 2)]
            tokenizer.add_tokens(runs)
        bos = SPECIAL[0], tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(special)
    if form in ("llama_2", "mixtral", "llama_3"):
        template = {"single": f"{bos[0]} $A", "special_tokens": [bos]}
        tokenizer.post_processor = processors.TemplateProcessing(**template)
    return tokenizer


FORMS = ("neox", "qwen", "llama_3", "llama_2", "mixtral")


def tokenizer_folder(
    folder: pathlib.Path, form: str, change=lambda values: None
) -> pathlib.Path:
    """Writes the files of a chat model with two ends.

    Args:
        change: changes the values of `tokenizer.json`.
    """
    values = json.loads(trained(form).to_str())
    if form == "llama_3":
        values["model"]["ignore_merges"] = True
    # They would cut and fill texts.
    values["truncation"] = {
        "direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    change(values)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(values, ensure_ascii=False))
    ids = {each["content"]: each["id"] for each in values["added_tokens"]}
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    generation = {"eos_token_id": ends, "pad_token_id": ids["<|endoftext|>"]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    config = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ raise_exception('not run') }}\n")
    return folder
