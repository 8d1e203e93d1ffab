# SPDX-License-Identifier: Apache-2.0
"""The tables of the page, beside the paper's numbers where it has them."""

from typing import Any

# Kim et al. 2022, Table 2: BLEU of int8 and int4 less that of float16. Its average is of ten
# pairs, of which it names two.
PAPER_CHANGES = {
    ("en_de", 1): (-0.028, -0.052), ("en_de", 2): (0.051, -0.180),
    ("de_en", 1): (-0.084, 0.044), ("de_en", 2): (-0.027, -0.031),
    ("mean", 2): (-0.007, -0.167),
}  # fmt: skip
COLUMNS = {"torch": "PyTorch", "float32": "float32", "int8": "int8", "int4": "int4"}
PRUNING = {
    "float32, no pruning": "off",
    "float32, experts pruned": "experts only",
    "float32": "compaction",
}


def tables(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the sections of results.json."""
    return [
        quality(results["quality"]),
        throughput(results["throughput"]),
        pruning(results["throughput"]),
        cost(results["cost"]),
    ]


def quality(section: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for each in section["rows"]:
        row = {
            "direction": "average" if each["direction"] == "mean" else shown(each["direction"]),
            "beams": each["beams"],
            "BLEU, float32": each["float32"],
        }
        for name in (name for name in each if name.startswith("int")):
            row[f"change by {name} (95%)"] = change(each[name])
        paper = PAPER_CHANGES.get((each["direction"], each["beams"]))
        row["the paper's changes"] = paper and f"{paper[0]:+.3f}, {paper[1]:+.3f}"
        rows.append(row)
    named = [row for row in section["rows"] if row["direction"] != "mean"]
    unfinished = sum(sum(row["unfinished"].values()) for row in named)
    total = section["sentences"] * sum(len(row["unfinished"]) for row in named)
    title = (
        f"BLEU after quantization (Table 2): checkpoint {section['step']:,}, "
        f"{section['sentences']:,} sentences a direction, {unfinished:,} of {total:,} "
        f"translations cut off after {section['max_new_tokens']} tokens; {where(section)}. "
        f"sacreBLEU `{section['signature']}`, intervals of {section['bootstrap_samples']:,} "
        "paired bootstrap samples."
    )
    return {"title": title, "rows": rows}


def change(row: dict[str, float]) -> dict[str, float]:
    """Of BLEU, with its interval."""
    return {"mean": row["change"], "low": row["low"], "high": row["high"]}


def throughput(section: dict[str, Any]) -> dict[str, Any]:
    rows, note = [], ". PyTorch and transformers were not installed"
    for each in by_beams(section):
        speed = each["input_tokens_per_s"]
        row = {"beams": each["beams"], "batch": each["batch"]}
        row |= {name: round(speed[key]) for key, name in COLUMNS.items() if key in speed}
        if "torch" in speed:
            row["float32 over PyTorch"] = each["float32_is_faster"]["torch"]
            row["same texts"] = f"{each['same_texts_as_float32']['torch']:.1%}"
            note = f", {', '.join(map(' '.join, section['peers'].items()))}"
        rows.append(row)
    title = (
        f"Throughput, input tokens/s (Table 3): checkpoint {section['step']:,}, "
        f"{shown(section['direction'])}, {section['sentences']} sentences of "
        f"{section['input_tokens']:,} input tokens, up to {section['max_new_tokens']} new ones "
        f"each, medians of {section['rounds']} rounds; {where(section)}{note}{load(section)}."
    )
    return {"title": title, "rows": rows}


def pruning(section: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for each in by_beams(section):
        speed, times = each["input_tokens_per_s"], each["float32_is_faster"]
        off, *others = PRUNING
        row = {"beams": each["beams"], "batch": each["batch"]}
        row |= {name: round(speed[key]) for key, name in PRUNING.items()}
        row |= {f"gain, {PRUNING[key]}": times[off] / times[key] for key in others}
        same = min(each["same_texts_as_float32"][key] for key in PRUNING)
        rows.append(row | {"same texts": f"{same:.1%}"})
    title = (
        "What pruning of finished sentences brings, float32, input tokens/s, medians. "
        "Gains are of ratios within rounds, and so not those of the columns:"
    )
    return {"title": title, "rows": rows}


def cost(section: dict[str, Any]) -> dict[str, Any]:
    rows = [
        {
            "model": COLUMNS[each["model"]],
            "batch": each["batch"],
            "latency, ms": round(each["latency_ms"]),
            "words/s": round(each["words_per_s"]),
            "USD per million words": each["usd_per_million_words"],
            "monthly USD per word/s": each["monthly_usd_per_word_per_s"],
        }
        for each in section["rows"]
    ]
    title = (
        f"Cost (Table 4): {section['hardware']}, ${section['usd_per_month']:,.2f} a month; "
        f"{section['params'] / 1e6:.1f}M parameters; beams: {section['beams']}; "
        f"{where(section)}."
    )
    return {"title": title, "rows": rows}


def by_beams(section: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(section["rows"], key=lambda row: (row["beams"], row["batch"]))


def load(section: dict[str, Any]) -> str:
    """What else the machine did, where that was recorded: more than its cores is too much."""
    loads = [row["load_average"] for row in section["rows"] if "load_average" in row]
    return f". Load average: {min(loads):.1f} to {max(loads):.1f}" if loads else ""


def shown(direction: str) -> str:
    return direction.replace("_", "-")


def where(section: dict[str, Any]) -> str:
    found = section["environment"]
    return f"{found['device']}, {found['cores']} cores, JAX {found['jax']}"
