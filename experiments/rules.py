# SPDX-License-Identifier: Apache-2.0
"""Rules of claims: data in run.py, committed before the first cell, judged at looks.

A run.py with claims has `RULES`, a tuple of Rules. Its hash covers them and the comparisons of
that file. An experiment without rules, or whose rules do not cover its runs, is exploratory.
"""

import dataclasses
import datetime
import hashlib
import importlib
import itertools
import json
import math
import pathlib
import subprocess
from collections.abc import Sequence
from typing import Any

from experiments.measured import Interval, finals_of
from experiments.statistics import (
    ERROR,
    OUTCOMES,
    Estimate,
    estimate,
    holm,
    loss_of_compute,
    outcome,
    parabola,
    pocock,
    simulate,
)
from switchx.files import write_atomically

HERE = pathlib.Path(__file__).resolve().parent
SEEN = HERE / "seeds_seen.json"
# A margin by formula: what 5% of compute is worth to the dense model of the first rung
# (`loss_of_compute`), between half and double its length. To a model of the second it is less.
OF_COMPUTE = "5% of compute"
EXPLORATORY, OPEN, UNDECIDED = "exploratory", "open", "undecided"
REPRODUCED, REFUTED, EQUIVALENT = "reproduced", "not reproduced", "equivalent"
NOT_TESTABLE = "not testable at this scale"
# What a run.py that claims nothing says of its measurements.
REPORTED = "reported"
WORDS = (REPRODUCED, REFUTED, EQUIVALENT, UNDECIDED, NOT_TESTABLE, EXPLORATORY, OPEN)
# Claims that Holm's procedure counts at least: those that are planned.
CLAIMS = 15
# Below it a claim is not testable.
LEAST_POWER = 0.5


@dataclasses.dataclass(frozen=True)
class Rule:
    """The test of a claim.

    Attributes:
        claim: what is claimed, a short sentence without its end.
        primary: weights of the contrast, by contender (statistics.difference, trend).
        direction: outcome that the paper claims: ahead, behind or equivalent.
        margin: differences that count as none, in nats per token or OF_COMPUTE; None where
            nothing is equivalent.
        looks: seeds of each contender at each look.
        seeds: all of them, in their order.
        expected: value of the contrast that the paper leads one to expect; power is that of
            finding `direction` there.
        rates_from: experiment whose results.json has `quality` by contender and rate; None
            where no rate is swept, as where nothing is trained.
        lengths_from: experiment whose results.json has `dense_lengths`, for OF_COMPUTE.
        gates: names in `gates` of the results, each of which is to hold.
        runs: key of the results that has the curves and seeds; empty where they are on top.
    """

    claim: str
    primary: dict[str, float]
    direction: str
    margin: float | str | None
    looks: tuple[int, ...]
    seeds: tuple[int, ...]
    expected: float
    rates_from: str | None = "rates"
    lengths_from: str = "switch_vs_dense"
    gates: tuple[str, ...] = ()
    runs: str = ""

    def __post_init__(self):
        if self.direction not in OUTCOMES[1:]:
            raise ValueError(f"{self.direction=}; use one of {', '.join(OUTCOMES[1:])}")
        if list(self.looks) != sorted({*self.looks}) or self.looks[-1] != len({*self.seeds}):
            raise ValueError(
                f"{self.looks=} of {self.seeds=}; give rising numbers, the last of all seeds"
            )
        if isinstance(self.margin, str) and self.margin != OF_COMPUTE:
            raise ValueError(f"{self.margin=}; give nats per token, None or {OF_COMPUTE!r}")
        if self.expected * {"ahead": 1, "behind": -1}.get(self.direction, 0) < 0:
            raise ValueError(f"{self.expected=} is not {self.direction}; give another sign")
        if self.direction == EQUIVALENT and self.margin is None:
            raise ValueError(f"{self.claim}: what is to be equivalent has a margin; give one")

    @property
    def level(self) -> float:
        """The nominal two-sided level of a look: Pocock's for as many looks at equal steps.

        For 4, 7 and 10 seeds that is 0.0221 where normal means would allow 0.0229; of few
        seeds Student's t needs the difference, by simulation.
        """
        return pocock(range(1, len(self.looks) + 1))

    def seeds_at(self, look: int) -> tuple[int, ...]:
        """Those of a look, the first of which is 1.

        Raises:
            ValueError: there is no such look.
        """
        if not 1 <= look <= len(self.looks):
            raise ValueError(f"{look=}; {self.claim!r} has looks 1 to {len(self.looks)}")
        return self.seeds[: self.looks[look - 1]]


def digest(constants: dict[str, Any]) -> str | None:
    """sha256 of RULES and the comparisons among a module's constants; None without RULES."""
    if "RULES" not in constants:
        return None
    described = {
        name: value
        for name, value in constants.items()
        if name == "RULES" or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    }
    text = json.dumps(described, sort_keys=True, default=dataclasses.asdict)
    return hashlib.sha256(text.encode()).hexdigest()


def constants_of(name: str) -> dict[str, Any]:
    """Those of an experiment's run.py as it stands."""
    return vars(importlib.import_module(f"experiments.{name}.run"))


def begin(name: str) -> dict[str, Any]:
    """What an experiment with rules notes before its first cell; empty of one without.

    Returns:
        `rule` (the hash), `registered` (the commit that last touched run.py), `registered_at`
        and, for margins by formula, `dense_lengths`.

    Raises:
        ValueError: run.py or other code is not committed, a contender's rate is not found, or
            the dense lengths are not measured.
    """
    constants = constants_of(name)
    if "RULES" not in constants:
        return {}
    file = f"experiments/{name}/run.py"
    changed = git("status", "--porcelain", "--", file)
    commit, _, time = git("log", "-1", "--format=%H %cI", "--", file).partition(" ")
    if changed or not commit:
        raise ValueError(
            f"{file} has rules and is {'changed' if commit else 'not committed'}: a rule is "
            f"committed before its first run; `git add {file} && git commit {file}`"
        )
    code = ("switchx/*.py", "pallas_kernels/*.py", "configs/*.gin", ":(glob)experiments/*.py",
            ":(glob)experiments/*/run.py", f"experiments/{name}")  # fmt: skip
    status = ("status", "--porcelain", "--untracked-files=all", "--", *code)
    changed = [line.split()[-1] for line in git(*status).splitlines()
               if line.endswith((".py", ".gin"))]  # fmt: skip
    if changed:
        raise ValueError(
            f"{', '.join(changed)}: not committed, and the contenders of {file}'s rules are "
            "made by it; commit it, or put it aside by `git stash -u`"
        )
    noted = {"rule": digest(constants), "registered": commit, "registered_at": time}
    for each in constants["RULES"]:
        if each.rates_from is not None:
            _require_rates(each)
        if each.margin == OF_COMPUTE and each.lengths_from != name:
            noted["dense_lengths"] = _of_results(each.lengths_from, "dense_lengths")
    return noted


def _require_rates(rule: Rule) -> None:
    """Raises where a contender's sweep has no optimum; contenders that were not swept have the
    rates that run.py gives them."""
    found = _of_results(rule.rates_from, "quality")
    for name in (each for each in rule.primary if each in found):
        fit = parabola([*map(float, found[name])], [*found[name].values()])
        if fit.problem:
            raise ValueError(
                f"{name}: rate not found: {fit.problem}: `make experiments EXPERIMENT="
                f"{rule.rates_from}`, or leave its claim out"
            )


def _of_results(name: str, key: str) -> dict[str, Any]:
    file = HERE / name / "results.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if key not in found:
        raise ValueError(
            f"experiments/{name}/results.json has no `{key}`, which a rule takes; run first "
            f"`make experiments EXPERIMENT={name} DATA=FOLDER`"
        )
    return found[key]


def git(*arguments: str) -> str:
    """What git says of this checkout.

    Raises:
        ValueError: it is none, or git refuses.
    """
    command = ["git", "-C", str(HERE.parent), *arguments]
    try:
        process = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(
            f"git: {error.strerror}; rules are registered by it: install it"
        ) from error
    if process.returncode:
        reason = process.stderr.strip()
        raise ValueError(f"{reason}; rules are registered by commits: work in a clone")
    return process.stdout.strip()


def judged(rules: Sequence[Rule], results: dict[str, Any]) -> dict[str, Any]:
    """The verdicts of an experiment by its rules: `claims`, one a rule, and on top those of the
    first that has a number.

    Args:
        results: as results.json has them; `gates` where rules have some. A claim whose `runs`
            they lack is open.

    Raises:
        ValueError: a look before its time, or other seeds than the rule's.
    """
    claims = [_claim(rule, results) for rule in rules]
    first = next((each for each in claims if each["effect"] is not None), claims[0])
    top = {key: first[key] for key in ("verdict", "effect", "effect_of")}
    because = " ".join(f"{each['claim']}: {each['because']}" for each in claims)
    return top | {"because": because, "claims": claims}


def _claim(rule: Rule, results: dict[str, Any]) -> dict[str, Any]:
    runs = results.get(rule.runs) if rule.runs else results
    if runs is None:
        return _unmeasured(rule, OPEN, "its runs are not done.", 0)
    seeds = list(runs["seeds"])
    if len(seeds) not in rule.looks or seeds != list(rule.seeds[: len(seeds)]):
        raise ValueError(
            f"{rule.claim}: a look before its time: seeds {seeds}, looks are at {rule.looks} "
            f"of {list(rule.seeds)}; train a look to its end with ARGS=--look=NUMBER"
        )
    look = rule.looks.index(len(seeds)) + 1
    finals = finals_of(runs)
    lost = [name for name in finals if not all(map(math.isfinite, finals[name]))]
    if stopped := [name for name in lost if name in rule.primary]:
        because = f"runs of {', '.join(stopped)} have no finite quality."
        return _unmeasured(rule, NOT_TESTABLE, because, look)
    finals = {name: values for name, values in finals.items() if name not in lost}
    if len({tuple(finals.get(name, name)) for name in rule.primary}) < len(rule.primary):
        raise ValueError(
            f"{rule.claim}: of {', '.join(rule.primary)} two have the same quality with every "
            "seed, to the bit: they are one model; give each the bindings that its name says"
        )
    found, margin = estimate(finals, rule.primary), rule.margin
    if margin == OF_COMPUTE:
        lengths = results["dense_lengths"]
        margin = loss_of_compute({float(x): values for x, values in lengths.items()})
    ends = simulate(
        rule.primary, rule.expected, found.sd, rule.looks, margin, rule.level, len(finals)
    )
    failed = [name for name in rule.gates if not results["gates"][name]]
    if ends[rule.direction] < LEAST_POWER:
        failed.append(f"power {ends[rule.direction]:.2f} is below {LEAST_POWER}")
    interval = found.interval(rule.level)
    return {
        "claim": rule.claim,
        "verdict": NOT_TESTABLE if failed else _word(rule, found, margin, look),
        "because": _because(rule, found, interval, margin, look, failed),
        "effect": dataclasses.asdict(interval),
        "effect_of": f"{rule.claim}, nats per token ({1 - rule.level:.1%} at look {look} of "
        f"{len(rule.looks)})",
        "p": min(1.0, found.p() * len(rule.looks)),
        "power": ends[rule.direction],
        "margin": margin,
        "look": look,
        "looks": len(rule.looks),
        "variance": found.model,
        "sd": found.sd,
    }


def _unmeasured(rule: Rule, verdict: str, because: str, look: int) -> dict[str, Any]:
    """A claim without a number."""
    return {
        "claim": rule.claim,
        "verdict": verdict,
        "because": because,
        "effect": None,
        "effect_of": rule.claim,
        "p": 1.0,
        **dict.fromkeys(("power", "margin")),
        "look": look,
        "looks": len(rule.looks),
        **dict.fromkeys(("variance", "sd")),
    }


def _word(rule: Rule, found: Estimate, margin: float | None, look: int) -> str:
    word = OUTCOMES[outcome(found.mean, found.error, found.freedom, margin, rule.level)]
    if word == OPEN:
        return UNDECIDED if look == len(rule.looks) else OPEN
    if word == EQUIVALENT:
        return EQUIVALENT
    return REPRODUCED if word == rule.direction else REFUTED


def _because(
    rule: Rule,
    found: Estimate,
    interval: Interval,
    margin: float | None,
    look: int,
    failed: list[str],
) -> str:
    text = f"{interval} nats per token with {1 - rule.level:.1%} confidence, by "
    text += f"{rule.looks[look - 1]} seeds and {found.model}; claimed is {rule.direction}"
    if margin is not None:
        text += f"; differences within {margin:.4f} count as none"
    return text + f"; a gate failed: {', '.join(failed)}" * bool(failed) + "."


def standing(results: dict[str, Any]) -> dict[str, Any]:
    """The results with the verdict that they may have: where their rule does not cover their
    runs `exploratory`, with `exploratory_because` and the judged word in `verdict_before`."""
    reason = _exploratory_because(results)
    results = {key: value for key, value in results.items() if key != "exploratory_because"}
    if not reason:
        return results
    if "claims" in results:
        results["claims"] = [_exploratory(each) for each in results["claims"]]
    return _exploratory(results) | {"exploratory_because": reason}


def _exploratory(results: dict[str, Any]) -> dict[str, Any]:
    word = results.get("verdict", EXPLORATORY)  # a run.py without rules may say none
    earlier = {} if word in (EXPLORATORY, REPORTED) else {"verdict_before": word}
    return results | earlier | {"verdict": EXPLORATORY}


def _exploratory_because(results: dict[str, Any]) -> str:
    """Why the verdict of results is exploratory; empty where it is not."""
    rule = results.get("rule")
    if rule is None:
        text = "no rule was registered before the runs"
        if "code" not in results and ("curves" in results or "trained_by" in results):
            text = f"all contenders had one learning rate, tuned for none of them, and {text}"
        return text
    if rule != digest(constants_of(results["experiment"])):
        return "its rule was changed after its runs began"
    times = [
        datetime.datetime.fromisoformat(results[k]) for k in ("registered_at", "first_cell")
    ]
    if times[0] >= times[1]:
        return "its rule was committed after its first run"
    again = sorted(seeds_of(results) & seen_before(**_seen_as(results)))
    if again:
        seeds = ", ".join(map(str, again))
        return (
            f"an earlier rule, or other code, had seen seeds {seeds}; those from {next_seed()} "
            "are unseen"
        )
    return ""


def seeds_of(results: dict[str, Any]) -> set[int]:
    """The seeds of all runs of an experiment."""
    parts = (results, *(part for part in results.values() if isinstance(part, dict)))
    return {seed for part in parts for seed in part.get("seeds", ())}


def seen() -> list[dict[str, Any]]:
    """What published results had seen, oldest first: `experiment`, `rule` (None where there was
    none) and `seeds`."""
    return json.loads(SEEN.read_text(encoding="utf-8"))


def _seen_as(results: dict[str, Any]) -> dict[str, str | None]:
    """What the seeds of results are noted under; the code makes the contenders of a rule."""
    key = {"experiment": results["experiment"], "rule": results.get("rule")}
    return key | ({"code": results["code"]} if key["rule"] and "code" in results else {})


def seen_again(name: str, code: str, seeds: Sequence[int]) -> list[int]:
    """Those of some seeds that test nothing for an experiment's rule as it stands here, by code
    of this fingerprint."""
    key = {"experiment": name, "rule": digest(constants_of(name)), "code": code}
    return sorted({*seeds} & seen_before(**key))


def seen_before(**key: str | None) -> set[int]:
    """Seeds that are no test of a rule: those of an earlier rule of this experiment or of the
    same rule by other code, and those that any experiment without a rule had published before
    it. Experiments whose rules were registered may share runs, as those of a control."""
    earlier = itertools.takewhile(lambda e: e != key | {"seeds": e["seeds"]}, seen())
    used = [
        e["seeds"] for e in earlier
        if e["rule"] is None or e["experiment"] == key["experiment"]
    ]  # fmt: skip
    return {seed for seeds in used for seed in seeds}


def note_seeds(results: dict[str, Any]) -> None:
    """Adds the seeds of published results to those seen."""
    key, entries = _seen_as(results), seen()
    known = next((e for e in entries if e == key | {"seeds": e["seeds"]}), None)
    if known is None:
        entries.append(known := key | {"seeds": []})
    known["seeds"] = sorted({*known["seeds"], *seeds_of(results)})
    lines = ",\n ".join(json.dumps(each) for each in entries)
    write_atomically(SEEN, f"[{lines}]\n".encode())


def next_seed() -> int:
    """The first of the next hundred that no published result has seen."""
    most = max((seed for each in seen() for seed in each["seeds"]), default=-1)
    return 100 * (most // 100 + 1)


def over_all_claims(claims: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Claims with `p_holm`, their p adjusted for all claims of the experiments; what does not
    hold by it is open until its last look, and undecided then.

    Equivalence keeps its own level. Claims that are not judged yet, of CLAIMS, count as p 1.
    """
    ps = [1.0 if each["verdict"] == EXPLORATORY else each["p"] for each in claims]
    adjusted = holm([*ps, *[1.0] * (CLAIMS - len(ps))])
    rows = []
    for claim, p in zip(claims, adjusted, strict=False):
        is_lost = claim["verdict"] in (REPRODUCED, REFUTED) and p >= ERROR
        word = OPEN if claim["look"] < claim["looks"] else UNDECIDED
        rows.append(claim | {"p_holm": p} | ({"verdict": word} if is_lost else {}))
    return rows
