# SPDX-License-Identifier: Apache-2.0
"""`pytest --compile-seconds`: the tests and the files that compile longest, as JAX measures it.

Seconds of the clock in which JAX traces, lowers or compiles, or reads a compiled program back;
what overlaps counts once. What a shared fixture compiles counts for the test that asked first.
Child processes are not seen. Workers of xdist send their numbers with each test's report.
"""

import collections

import jax.monitoring
import pytest

COMPILE = "/jax/core/compile/backend_compile_duration"
EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    COMPILE,
)
PROPERTY = "compile_seconds"
MOST_ROWS = 20


def pytest_addoption(parser):
    text = f"print the {MOST_ROWS} tests and files that trace and compile longest"
    parser.addoption("--compile-seconds", action="store_true", help=text)


def pytest_configure(config):
    if config.getoption("compile_seconds"):
        config.pluginmanager.register(CompileSeconds(), "compile_seconds")


class CompileSeconds:
    """Measures in the processes that run tests; adds up and prints in the one that reports."""

    def __init__(self):
        self.spans, self.programs = [], 0
        # Node id of a test -> [seconds, programs].
        self._totals = collections.defaultdict(lambda: [0.0, 0])
        jax.monitoring.register_event_time_span_listener(self.listen)

    def listen(self, event: str, start: float, end: float, **details) -> None:
        if event in EVENTS:
            self.spans.append((start, end))
            self.programs += event == COMPILE

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        """Of set-up, call and tear-down each: what was compiled since the last of them."""
        report = yield
        report.user_properties.append((PROPERTY, [covered_s(self.spans), self.programs]))
        self.spans, self.programs = [], 0
        return report

    def pytest_runtest_logreport(self, report):
        for name, value in report.user_properties:
            if name == PROPERTY:
                total = self._totals[report.nodeid]
                total[:] = [mine + more for mine, more in zip(total, value, strict=True)]

    def pytest_terminal_summary(self, terminalreporter):
        of_files, everything = collections.defaultdict(lambda: [0.0, 0]), [0.0, 0]
        for test, value in self._totals.items():
            for total in (of_files[test.partition("::")[0]], everything):
                total[:] = [mine + more for mine, more in zip(total, value, strict=True)]
        for kind, totals in (("tests", self._totals), ("files", of_files)):
            terminalreporter.section(f"{kind} that compile longest: seconds, programs")
            rows = sorted(totals.items(), key=lambda row: -row[1][0])[:MOST_ROWS]
            for name, (seconds, programs) in [*rows, ("all", everything)]:
                terminalreporter.write_line(f"{seconds:8.2f} {programs:5}  {name}")


def covered_s(spans: list[tuple[float, float]]) -> float:
    """Seconds in at least one of the spans."""
    total = until = 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
