"""Collectives: what the devices of a compiled program send each other.

Read from the text of the program (HLO) after the compiler has partitioned it: a list of
computations, each a list of instructions, which call one another.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)

_ITEM_BITS = {"pred": 8, "s4": 4, "u4": 4}
_HEAD = re.compile(r"(ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%(?P<name>[\w.-]+) = (?P<shape>.*?) (?P<opcode>[a-z][\w-]*)\("
)
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\]")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"\b(?:calls|to_apply|body)=%([\w.-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"([0-9]+)"')
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([0-9,]+)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[[0-9]+,([0-9]+)\]")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']*)'=([0-9]+)")
_GROUP_AXIS = re.compile(r"'([^']*)'(?::\([0-9]+\)([0-9]+))?")
# An all-reduce of which each device keeps its share: how a TPU's program spells it.
_REDUCE_SCATTER = "all-reduce-scatter"


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one kind.

    Attributes:
        count: how often they run.
        payload: bytes of the whole arrays that are reduced, gathered, scattered or
            moved, as one device sees them.
        sent: bytes that each device sends, if the devices of a group stand in a ring.
    """

    count: int = 0
    payload: float = 0
    sent: float = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.count + other.count,
            self.payload + other.payload,
            self.sent + other.sent,
        )

    def times(self, number: int) -> "Traffic":
        """The same, a number of times."""
        return Traffic(self.count * number, self.payload * number, self.sent * number)


class Reading(NamedTuple):
    """What a program's text says.

    Attributes:
        traffic: of a step, by kind; only the kinds that are there.
        unknown_loops: loops with collectives whose number of trips the text does not
            tell; they are counted as one trip each.
    """

    traffic: dict[str, Traffic]
    unknown_loops: int


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    line: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        """The names between the parentheses behind the opcode."""
        rest = self.line.split(f" {self.opcode}(", 1)[1]
        return _NAME.findall(rest.split(")", 1)[0])


_Computation = dict[str, _Instruction]


def read_collectives(text: str, num_devices: int) -> Reading:
    """Adds up the collectives of a compiled program.

    Args:
        text: the program, as `jax.stages.Compiled.as_text` gives it.
        num_devices: that it is for: the group of a collective that names none.

    Returns:
        The traffic of a run of the program.
    """
    computations, entry = _parse(text)
    return _total(entry, computations, num_devices, {})


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    """The computations by name, and the name of the one where the program begins."""
    computations: dict[str, _Computation] = {}
    current: _Computation = {}
    entry = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = computations.setdefault(head["name"], {})
            entry = head["name"] if line.startswith("ENTRY") else entry
        elif found := _INSTRUCTION.match(line):
            current[found["name"]] = _Instruction(
                found["name"],
                found["shape"],
                found["opcode"],
                line,
                bool(found["root"]),
            )
    return computations, entry


def _total(
    name: str,
    computations: Mapping[str, _Computation],
    num_devices: int,
    known: dict[str, Reading],
) -> Reading:
    """The traffic of a computation and of those that it calls, trips counted."""
    if name in known:
        return known[name]
    traffic: dict[str, Traffic] = {}
    unknown_loops = 0
    computation = computations[name]
    for instruction in computation.values():
        if own := _own_traffic(name, instruction, computation, num_devices):
            kind, amount = own
            traffic[kind] = traffic.get(kind, Traffic()) + amount
        for callee in _callees(instruction):
            inner = _total(callee, computations, num_devices, known)
            trips = 1
            if instruction.opcode == "while" and inner.traffic:
                found = _trips(instruction, computation, computations)
                trips = found or 1
                unknown_loops += found is None
            unknown_loops += inner.unknown_loops
            for kind, amount in inner.traffic.items():
                traffic[kind] = traffic.get(kind, Traffic()) + amount.times(trips)
    known[name] = Reading(traffic, unknown_loops)
    return known[name]


def _callees(instruction: _Instruction) -> Iterator[str]:
    # The end of an asynchronous call names the same computation as its start.
    if instruction.opcode in ("async-update", "async-done"):
        return
    yield from _CALLED.findall(instruction.line)
    for names in _BRANCHES.findall(instruction.line):
        yield from _NAME.findall(names)


def _own_traffic(
    name: str, instruction: _Instruction, computation: _Computation, num_devices: int
) -> tuple[str, Traffic] | None:
    """The kind and traffic of an instruction of computation `name`, if it has any."""
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    group = _group_size(instruction.line, num_devices)
    operands = sum(
        _num_bytes(computation[operand].shape) for operand in instruction.operands
    )
    if kind == "all-reduce" and name.startswith(_REDUCE_SCATTER):
        kind = "reduce-scatter"
    others = (group - 1) / group
    payload = operands * group if kind == "all-gather" else operands
    sent = {
        "all-reduce": 2 * others * payload,
        "collective-permute": payload,
    }.get(kind, others * payload)
    return kind, Traffic(1, payload, sent)


def _num_bytes(shape: str) -> float:
    """The bytes of an array, or of all arrays of a tuple: bf16[8,128]{1,0:T(8,128)}."""
    total = 0.0
    for dtype, sides in _ARRAY.findall(shape):
        digits = re.search("[0-9]+", dtype)
        bits = _ITEM_BITS.get(dtype) or int(digits[0] if digits else 0)
        items = 1
        for side in filter(None, sides.split(",")):
            items *= int(side)
        total += bits / 8 * items
    return total


def _group_size(line: str, num_devices: int) -> int:
    """How many devices take part in each of the groups of a collective."""
    if listed := _LISTED_GROUPS.search(line):
        return listed[1].count(",") + 1
    if counted := _COUNTED_GROUPS.search(line):
        return int(counted[1])
    if found := _MESH_GROUPS.search(line):
        sizes = {axis: int(size) for axis, size in _MESH_AXIS.findall(found[1])}
        group = 1
        for axis, part in _GROUP_AXIS.findall(found[2]):
            group *= int(part) if part else sizes[axis]
        return group
    return num_devices


def _trips(
    loop: _Instruction,
    computation: _Computation,
    computations: Mapping[str, _Computation],
) -> int | None:
    """How often the body of a while loop runs; None where the text does not tell.

    Either the compiler has noted it, or the loop counts: its condition is i < stop, its
    body adds a step to i, which stands at some place of the tuple that goes round.
    """
    if noted := _TRIPS.search(loop.line):
        return int(noted[1])
    condition, body = (
        computations[re.search(rf"\b{part}=%([\w.-]+)", loop.line)[1]]
        for part in ("condition", "body")
    )
    test = next(one for one in condition.values() if one.is_root)
    if test.opcode != "compare" or "direction=LT" not in test.line:
        return None
    counter, limit = (_origin(condition, name) for name in test.operands)
    place = re.search(r"index=([0-9]+)", counter.line)
    if counter.opcode != "get-tuple-element" or place is None:
        return None
    place = int(place[1])
    result = next(one for one in body.values() if one.is_root)
    start = _entry_of(computation, loop.operands[0], place)
    following = _entry_of(body, result.name, place)
    if following is None or following.opcode != "add":
        return None
    addends = [_constant(_origin(body, name)) for name in following.operands]
    step = next((addend for addend in addends if addend is not None), None)
    first, stop = _constant(start), _constant(limit)
    if first is None or stop is None or not step:
        return None
    return max(0, -(-(stop - first) // step))


def _origin(computation: _Computation, name: str) -> _Instruction:
    """The instruction that made a value, through copies of it."""
    instruction = computation[name]
    while instruction.opcode in ("copy", "copy-start", "copy-done", "bitcast"):
        instruction = computation[instruction.operands[0]]
    return instruction


def _entry_of(computation: _Computation, name: str, place: int) -> _Instruction | None:
    """The instruction that made an entry of a tuple; None if it is made elsewhere."""
    made = _origin(computation, name)
    if made.opcode != "tuple":
        return None
    return _origin(computation, made.operands[place])


def _constant(instruction: _Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant":
        return None
    number = re.search(r" constant\((-?[0-9]+)\)", instruction.line)
    return int(number[1]) if number else None
