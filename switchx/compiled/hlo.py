# SPDX-License-Identifier: Apache-2.0
"""The one reader of HLO text: computations of a compiled program and their instructions.

The syntax is XLA's (`compiled.as_text()`), of its CPU, GPU and TPU compilers. Every count of a
program is a sum over its instructions, where those in loops count as often as the loop runs
(`Program.sum_of_run`): collectives (`collectives.py`), FLOPs (`flops.py`), bytes that kernels
move (`moved_bytes.py`). Copies to and from the host are in `host_copies.py`.
"""

import dataclasses
import functools
import math
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction

NO_SHARES: Mapping[str, Fraction] = types.MappingProxyType({})

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[a-z][\w-]*)\("
)
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|(?:branch|called)_computations|(?:true|false)_computation)="
    r"\{?(%?[\w.-]+(?:, ?%[\w.-]+)*)"
)
# A token of an attribute's value: a quoted text, or a bracket or comma.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Array:
    """An array that an instruction returns.

    Attributes:
        dtype: name of the dtype in HLO, such as `bf16`, `pred` or `f8e4m3fn`.
        shape: sizes of the dimensions; () for a scalar and for a token.
        layout: order of its dimensions, its tiles and its memory space: `S(1)` is a TPU's
            vector memory, `S(5)` the host's.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str = ""

    @property
    def num_bytes(self) -> int:
        """The bytes of its elements; 0 for a token."""
        bits = 8 if self.dtype == "pred" else int((re.findall(r"\d+", self.dtype) or [0])[0])
        return math.prod(self.shape) * bits // 8


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction, `name = type opcode(arguments), attributes`.

    Attributes:
        computation: the computation that contains it.
        arguments: the text in its parentheses: operands, the number of a parameter, the value
            of a constant.
        rest: the text after them, which has the attributes.
        text: the whole line.
    """

    computation: "Computation" = dataclasses.field(repr=False)
    name: str
    type: str
    opcode: str
    arguments: str
    rest: str
    is_root: bool
    text: str

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays that it returns, with those of tuples in order."""
        return tuple(
            Array(dtype, tuple(int(size) for size in shape.split(",") if size), layout)
            for dtype, shape, layout in _ARRAY.findall(self.type)
        )

    @functools.cached_property
    def operands(self) -> tuple["Instruction", ...]:
        """The instructions whose results it takes."""
        made = self.computation.instructions
        return tuple(made[name] for name in re.findall(r"%([\w.-]+)", self.arguments))

    @functools.cached_property
    def called(self) -> tuple["Computation", ...]:
        """The computations that it runs; for a loop, only the body."""
        known = self.computation.computations
        names = [name for found in _CALLED.findall(self.rest) for name in found.split(",")]
        return tuple(known[name.strip().lstrip("%")] for name in names)

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """Name -> value, as the text has it."""
        found, start, depth = {}, 0, 0
        ends = [(match.start(), match[0]) for match in _TOKEN.finditer(self.rest)]
        for end, token in [*ends, (len(self.rest), ",")]:
            depth += 1 if token in "({[" else -1 if token in ")}]" else 0
            if token == "," and not depth:
                name, equals, value = self.rest[start:end].strip().partition("=")
                found |= {name: value} if equals else {}
                start = end + 1
        return found

    @property
    def op_name(self) -> str:
        """The operation that it was traced from, with its name scopes; "" if it has none."""
        found = _OP_NAME.search(self.rest)
        return found[1] if found else ""

    @property
    def is_end(self) -> bool:
        """Whether it ends what another instruction started, whose computation it may name."""
        return self.opcode.endswith(("-done", "-update"))

    @property
    def trips(self) -> int | None:
        """The number of times that the body of a `while` runs; None if it depends on the data.

        Compilers write the number, except the TPU compiler: for it, the number is read from a
        condition that compares a constant with a counter whose start and step are constants,
        too, as in `lax.scan` and `fori_loop`.
        """
        if trips := _TRIPS.search(self.rest):
            return int(trips[1])
        condition = self.computation.computations[self.attributes["condition"].lstrip("%")]
        compared = condition.root
        if compared.opcode == "compare" and "direction=LT" in compared.rest:
            counter, bound = compared.operands
            is_known = bound.opcode == "constant" and bound.type.startswith(("s32[]", "u32[]"))
            if is_known and (counts := self._counter(counter)):
                begin, step = counts
                return max(0, -(-(int(bound.arguments) - begin) // step))
        return None

    def _counter(self, counter: "Instruction") -> tuple[int, int] | None:
        """The start and the step of a loop's counter; None if they depend on the data.

        Args:
            counter: instruction that the condition compares.
        """

        def made(each: "Instruction") -> "Instruction":
            while each.opcode in ("copy", "bitcast"):
                (each,) = each.operands
            return each

        parts = made(self.operands[0]), self.called[0].root
        if counter.opcode != "get-tuple-element" or {x.opcode for x in parts} != {"tuple"}:
            return 0, 1  # as in all loops of JAX that are not a user's own
        number = int(counter.attributes["index"])
        first, last = (made(each.operands[number]) for each in parts)
        added = [made(each) for each in last.operands] if last.opcode == "add" else []
        steps = [int(each.arguments) for each in added if each.opcode == "constant"]
        if first.opcode in ("parameter", "get-tuple-element") or added and not steps:
            return None
        begin = int(first.arguments) if first.opcode == "constant" else 0
        return begin, steps[0] if steps and steps[0] > 0 else 1  # 1 is fused with something


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A computation: its instructions by name, in the order of the text.

    In a scheduled program, as all compiled ones are, this is the order in which they run.

    Attributes:
        computations: all computations of the program, by name.
    """

    name: str
    computations: dict[str, "Computation"] = dataclasses.field(repr=False)
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(each for each in self if each.is_root)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled program.

    Attributes:
        num_devices: the number of devices that run it.
        computations: all computations by name, in the order of the text.
        entry: computation with which a run begins.
    """

    num_devices: int
    computations: dict[str, Computation]
    entry: Computation

    def __iter__(self) -> Iterator[Instruction]:
        """All instructions, in the order of the text."""
        return (each for computation in self.computations.values() for each in computation)

    def sum_of_run(
        self,
        own: Callable[[Instruction], Counter | None],
        *,
        size: Callable[[Counter], float] = Counter.total,
        shares: Mapping[str, Fraction] = NO_SHARES,
        of_data_loop: Callable[[Counter], Counter] | None = None,
    ) -> Counter:
        """Adds up what one run of the program executes.

        A loop's body counts once per trip; of a conditional's branches, the largest counts.

        Args:
            own: function that returns an instruction's count; None for an instruction that
                counts as the computations that it runs.
            size: function of a count by which branches are compared.
            shares: share of a `conditional`'s executions in which its largest branch runs, by
                the name scope (`jax.named_scope`) of the conditional. A pipeline's ticks read
                from a table what they do (`ticks.branch_shares`).
            of_data_loop: function that returns the count of a loop whose end depends on the
                data, from the count of one trip.

        Raises:
            ValueError: such a loop counts something, and there is no `of_data_loop`.
        """

        @functools.cache
        def of_computation(computation: Computation) -> Counter:
            total = Counter()
            for each in computation:
                total.update(of_instruction(each))
            return total

        def of_instruction(each: Instruction) -> Counter:
            if (counted := own(each)) is not None:
                return counted
            if each.is_end or not each.called:
                return Counter()
            inside, times = max(map(of_computation, each.called), key=size), 1
            if each.opcode == "conditional":
                times = _share(each, shares)
            elif each.opcode == "while" and any(inside.values()):
                times = each.trips
                if times is None and of_data_loop:
                    return of_data_loop(inside)
                if times is None:
                    raise ValueError(
                        "a loop has no known trip count, as the data ends it: "
                        f"{each.text.strip()[:200]}; count a program of lax.scan and "
                        "fori_loop, or give matrix_flops its trips"
                    )
            return Counter({key: times * n for key, n in inside.items()})

        return of_computation(self.entry)


def within(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """Instructions and those of the computations that they run, each computation once."""
    seen = set()

    def walk(instructions):
        for each in instructions:
            yield each
            for called in each.called:
                if called not in seen:
                    seen.add(called)
                    yield from walk(called)

    return walk(instructions)


def _share(conditional: Instruction, shares: Mapping[str, Fraction]) -> Fraction | int:
    """One of `shares`, by the name scope that contains a conditional; 1 in any other scope."""
    # Its own scopes, after those of the branch that it is in.
    own = re.split(r"/cond/|/body/", conditional.op_name)[-1]
    return next((share for name, share in shares.items() if name in own), 1)


# Metadata of a Pallas kernel is JSON of several lines.
_CONTINUED = re.compile(r'\n(?="|\}\})')


@functools.lru_cache(maxsize=1)  # several readers of one text follow each other
def parse(text: str) -> Program:
    """Reads the HLO text of one compiled program.

    Raises:
        ValueError: the text is not HLO, or has two programs.
    """
    sizes = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])
    computations, entry, current = {}, None, None
    for line in _CONTINUED.sub(" ", text).splitlines():
        if current is None:
            if match := _COMPUTATION.match(line):
                current = computations[match[2]] = Computation(match[2], computations)
                entry = current if match[1] else entry
        elif line.startswith("}"):
            current = None
        elif line.strip():
            each = _instruction(line, current)
            if current.instructions.setdefault(each.name, each) is not each:
                raise ValueError(
                    f"expected instructions of one name each, got {each.name} twice in "
                    f"{current.name}; give the text of one program"
                )
    if entry is None:
        raise ValueError(f"expected HLO text with an ENTRY computation, got {text[:200]!r}")
    return Program(math.prod(map(int, sizes)), computations, entry)


def _instruction(line: str, computation: Computation) -> Instruction:
    depth, match = 1, _INSTRUCTION.match(line)
    for bracket in re.finditer(r"[()]", line[match.end() :]) if match else ():
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            end = match.end() + bracket.start()
            return Instruction(
                computation,
                name=match["name"],
                type=match["type"],
                opcode=match["opcode"],
                arguments=line[match.end() : end],
                rest=line[end + 1 :],
                is_root=bool(match["root"]),
                text=line,
            )
    raise ValueError(
        "expected an instruction of HLO, `%name = type opcode(operands), attributes`, got "
        f"{line.strip()[:200]!r} in {computation.name}"
    )
