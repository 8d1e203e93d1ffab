# SPDX-License-Identifier: Apache-2.0
"""Other routers at equal FLOPs: hash, loss-free balancing, batch priority, dropless; and
expert choice, which looks at later tokens, in the encoder of an encoder-decoder.

make experiments EXPERIMENT=routers DATA=FOLDER
"""

from typing import Any

from experiments.comparison import Trained, run_comparison, train_all, trained_in
from experiments.experiment import Comparison, Contender
from experiments.study import Study, main

# Nothing but the bias balances.
_NO_BALANCE_LOSS = "LossConfig.balance_weight=0.0"

COMPARISON = Comparison(
    contenders=(
        Contender("Switch"),
        Contender("hash", ("RouterConfig.kind='hash'", "RouterConfig.exploration='none'")),
        Contender(
            "loss-free balancing", ("RouterConfig.bias_update_rate=0.001", _NO_BALANCE_LOSS)
        ),
        Contender("batch priority", ("RouterConfig.priority='gate'",)),
        Contender(
            "dropless",
            ("RouterConfig.overflow='dropless'", "SwitchConfig.dispatcher='dropless'"),
        ),
    )
)

ENCODER = Comparison(
    contenders=(
        Contender("Switch in the encoder"),
        Contender(
            "expert choice in the encoder",
            (
                "RouterConfig.kind='expert_choice'",
                # One expert a token on average, as Switch: each takes an even share.
                "SwitchConfig.capacity_factor=1.0",
                "SwitchConfig.eval_capacity_factor=1.0",
            ),
        ),
    ),
    gin_files=("experiments/routers/encoder.gin",),
)


def verdict(trained: Trained, encoder: Trained) -> dict:
    """The paper has no such table: reported, with what is better or worse than Switch by an
    interval without 0. The effect is that of loss-free balancing, whichever is best."""
    over = {name: trained.gain(name, "Switch") for name in trained.curves if name != "Switch"}
    switch, choice = encoder.curves
    over[choice] = encoder.gain(choice, switch)
    better = [name for name, gain in over.items() if gain.low > 0]
    worse = [name for name, gain in over.items() if gain.high < 0]
    return {
        "verdict": "reported",
        "because": f"Better than Switch: {', '.join(better) or 'none'}; worse: "
        f"{', '.join(worse) or 'none'}.",
        "effect": over["loss-free balancing"],
        "effect_of": "loss-free balancing over Switch, nats per token",
    }


def judge(results: dict[str, Any]) -> dict[str, Any]:
    trained, encoder = trained_in(results), trained_in(results["encoder"])
    titles = {"": trained, "In the encoder, span corruption:": encoder}
    tables = [{"title": title, "rows": each.rows()} for title, each in titles.items()]
    return verdict(trained, encoder) | {"tables": tables}


def run(study: Study) -> dict:
    trained = train_all(study, study.cells(), ENCODER.quick() if study.is_quick else ENCODER)
    encoder = {"models": trained.models(), "curves": trained.curves}
    return run_comparison(study, COMPARISON, judge, encoder=encoder)


if __name__ == "__main__":
    main(__file__, __doc__, run)
