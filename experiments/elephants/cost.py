# SPDX-License-Identifier: Apache-2.0
"""What translating costs: Table 4 of Kim et al. 2022 (arXiv:2211.10017), from throughput.py.

    python -m experiments.elephants.cost --usd_per_month=73.46 --hardware="2 cores"

The paper's "Monthly USD/token" is the price of a month over words a second: three of its four
rows are (390.55 / 1565 = 0.250), the first is an eighth of it. Dollars per million words
are of a machine that translates all the time, a month having 730 hours. Writes the section
`cost` of results.json.
"""

import argparse
import pathlib

from experiments.elephants.sections import RESULTS, read_results, write_section

SECONDS_A_MONTH = 730 * 3600
BATCHES = (1, 20, 64)  # of the paper's table
NAMES = ("float32", "int8", "int4", "torch")


def cost_rows(throughput: dict, usd_per_month: float, batches, beams: int) -> list[dict]:
    """A row for each batch and column that was measured.

    Raises:
        ValueError: none of the batches was measured with so many beams.
    """
    chosen = [
        row for row in throughput["rows"] if row["batch"] in batches and row["beams"] == beams
    ]
    if not chosen:
        measured = sorted({(row["batch"], row["beams"]) for row in throughput["rows"]})
        raise ValueError(f"measured were (batch, beams) {measured}; choose among them")
    rows = []
    for row in chosen:
        for name in NAMES:
            if name not in row["words_per_s"]:
                continue
            words_per_s = row["words_per_s"][name]
            words_a_month = SECONDS_A_MONTH * words_per_s
            rows.append(
                {
                    "model": name,
                    "batch": row["batch"],
                    "latency_ms": row["batch_latency_ms"][name],
                    "words_per_s": words_per_s,
                    "usd_per_million_words": 1e6 * usd_per_month / words_a_month,
                    "monthly_usd_per_word_per_s": usd_per_month / words_per_s,
                }
            )
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--usd_per_month", type=float, required=True, help="of the hardware")
    parser.add_argument("--hardware", required=True, help="its name")
    parser.add_argument(
        "--batches",
        type=lambda text: tuple(map(int, text.split(","))),
        default=BATCHES,
        help="of those measured; default: the paper's, 1,20,64",
    )
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args(arguments)
    if not arguments.usd_per_month > 0:
        parser.error(f"--usd_per_month={arguments.usd_per_month}; give a price above 0")
    throughput = read_results(arguments.results).get("throughput")
    if throughput is None:
        parser.error(f"{arguments.results} has no throughput yet; run throughput.py first")
    price, batches = arguments.usd_per_month, arguments.batches
    section = {
        "hardware": arguments.hardware,
        "usd_per_month": price,
        "params": throughput["params"],
        "beams": arguments.beams,
        "rows": cost_rows(throughput, price, batches, arguments.beams),
    }
    write_section(arguments.results, "cost", section)


if __name__ == "__main__":
    main()
