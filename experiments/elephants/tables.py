# SPDX-License-Identifier: Apache-2.0
"""Prints the tables of results.json, beside the paper's numbers where it has them.

    python experiments/elephants/tables.py --update

With --update they take the place of what stands between the markers in README.md.
"""

import argparse
import pathlib

from cells import HERE, RESULTS, read_results

README = HERE / "README.md"
BEGIN, END = "<!-- tables of results.json -->\n", "<!-- end of the tables -->\n"
NOT_YET = "Not measured yet.\n"

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


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def quality(section: dict) -> str:
    rows = []
    for row in section["rows"]:
        cells = [_direction(row["direction"]), str(row["beams"]), f"{row['float32']:.2f}"]
        for name in ("int8", "int4"):
            each = row[name]
            interval = f"{each['low']:+.3f} to {each['high']:+.3f}"
            cells.append(f"{each['change']:+.3f} ({interval})")
        paper = PAPER_CHANGES.get((row["direction"], row["beams"]))
        rows.append([*cells, "" if paper is None else f"{paper[0]:+.3f}, {paper[1]:+.3f}"])
    named = [row for row in section["rows"] if row["direction"] != "mean"]
    unfinished = sum(sum(row["unfinished"].values()) for row in named)
    total = section["sentences"] * 3 * len(named)
    return (
        f"Checkpoint {section['step']:,}, {section['sentences']:,} sentences a direction, "
        f"{unfinished:,} of {total:,} translations cut off after {section['max_new_tokens']} "
        f"tokens; {_where(section)}. sacreBLEU `{section['signature']}`, 95% intervals of "
        f"{section['bootstrap_samples']:,} paired bootstrap samples.\n\n"
        + table(
            ["direction", "beams", "BLEU, float32", "change by int8", "change by int4",
             "the paper's changes"],
            rows,
        )
    )  # fmt: skip


def throughput(section: dict) -> str:
    rows = section["rows"]
    has_torch = "torch" in rows[0]["input_tokens_per_s"]
    columns = {name: shown for name, shown in COLUMNS.items() if has_torch or name != "torch"}
    speeds, pruning = [], []
    for row in rows:
        start = [str(row["beams"]), str(row["batch"])]
        speed, same = row["input_tokens_per_s"], row["same_texts_as_float32"]
        times = row["float32_is_faster"]
        cells = [f"{speed[name]:,.0f}" for name in columns]
        if has_torch:
            cells += [f"{times['torch']:.2f}", f"{same['torch']:.1%}"]
        speeds.append([*start, *cells])
        base = times["float32, no pruning"]
        gains = [f"{base / times[name]:.2f}" for name in list(PRUNING)[1:]]
        cells = [f"{speed[name]:,.0f}" for name in PRUNING]
        pruning.append([*start, *cells, *gains, f"{min(same[name] for name in PRUNING):.1%}"])
    start = ["beams", "batch"]
    versus = ["float32 over PyTorch", "same texts"] if has_torch else []
    note = ". PyTorch and transformers were not installed"
    if has_torch:
        note = f", {', '.join(map(' '.join, section['peers'].items()))}"
    first = (
        f"Checkpoint {section['step']:,}, {section['direction'].replace('_', '-')}, "
        f"{section['sentences']} sentences of {section['input_tokens']:,} input tokens, up to "
        f"{section['max_new_tokens']} new ones each, medians of {section['rounds']} rounds; "
        f"{_where(section)}{note}{_load(rows)}.\n\n"
    )
    gains = ["gain, experts only", "gain, compaction", "same texts"]
    return (
        first
        + table([*start, *columns.values(), *versus], sorted(speeds, key=_by_beams))
        + "\nWhat pruning of finished sentences brings, float32, input tokens/s:\n\n"
        + table([*start, *PRUNING.values(), *gains], sorted(pruning, key=_by_beams))
    )


def cost(section: dict) -> str:
    rows = [
        [
            COLUMNS[row["model"]],
            str(row["batch"]),
            f"{row['latency_ms']:,.0f}",
            f"{row['words_per_s']:,.0f}",
            f"{row['usd_per_million_words']:.4f}",
            f"{row['monthly_usd_per_word_per_s']:.3f}",
        ]
        for row in section["rows"]
    ]
    header = ["model", "batch", "latency, ms", "words/s", "USD per million words",
              "monthly USD per word/s"]  # fmt: skip
    return (
        f"{section['hardware']}, ${section['usd_per_month']:,.2f} a month; "
        f"{section['params'] / 1e6:.1f}M parameters; beams: {section['beams']}; "
        f"{_where(section)}.\n\n" + table(header, rows)
    )


SECTIONS = {
    "quality": ("## BLEU after quantization (Table 2)", quality),
    "throughput": ("## Throughput, input tokens/s (Table 3)", throughput),
    "cost": ("## Cost (Table 4)", cost),
}


def all_tables(results: dict) -> str:
    """Markdown; of what has not been measured it says so."""
    parts = []
    for name, (title, shown) in SECTIONS.items():
        text = shown(results[name]) if name in results else NOT_YET
        parts.append(f"{title}\n\n{text}")
    return "\n".join(parts)


def with_tables(page: str, tables: str) -> str:
    """The page with these tables between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no {BEGIN.strip()!r} and {END.strip()!r} after it")
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--readme", type=pathlib.Path, default=README)
    parser.add_argument("--update", action="store_true", help="write them into the README")
    arguments = parser.parse_args(arguments)
    results = read_results(arguments.results)
    tables = all_tables(results)
    print(tables, end="")
    if arguments.update:
        page = arguments.readme.read_text(encoding="utf-8")
        arguments.readme.write_text(with_tables(page, tables), encoding="utf-8")


def _by_beams(cells: list[str]) -> tuple[int, int]:
    return int(cells[0]), int(cells[1])


def _load(rows: list[dict]) -> str:
    """What else the machine did, where that was recorded: more than its cores is too much."""
    loads = [row["load_average"] for row in rows if "load_average" in row]
    if not loads:
        return ""
    return f". Load average while measuring: {min(loads):.1f} to {max(loads):.1f}"


def _direction(name: str) -> str:
    return "average" if name == "mean" else name.replace("_", "-")


def _where(section: dict) -> str:
    found = section["environment"]
    return f"{found['device']}, {found['cores']} cores, JAX {found['jax']}"


if __name__ == "__main__":
    main()
