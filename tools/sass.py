"""Reads the output of `nvdisasm -c`: finds each kernel's main loops and the local-memory accesses in them.

A main loop is a cycle of the control flow that contains matrix instructions. Cycles are found on the flow graph, not by
position: the compiler moves cold blocks of a loop far behind it. A persistent block has a cycle around it, over its
items, which differs from a main loop in that it stores results.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

MATRIX_OPCODES = ("HMMA", "HGMMA")
LOCAL_OPCODES = ("LDL", "STL")
RESULT_OPCODES = ("STG",)
INDIRECT_JUMPS = ("BRX", "BRXU", "JMX", "JMXU")
DIRECT_JUMPS = ("BRA", "BRA.U", "JMP")

SECTION = re.compile(r'\s*\.section\s+\.text\.([^\s,"]+)')
LABEL = re.compile(r"([.$\w]+):\s*$")
INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?\w+)\s+)?([A-Z][\w.]*)(.*)")
REFERENCE = re.compile(r"`\(([.$\w]+)\)")
BRANCH_LIST = re.compile(r'BRANCH_TARGETS ([^"]+)"')
CONVERGENCE = re.compile(r"\bB\d+\b")
PREDICATE_OPERAND = re.compile(r"\bU?P\d")


@dataclass(frozen=True)
class Instruction:
    """One line of machine code. `references` are the labels it names."""

    address: int
    predicate: str
    opcode: str
    operands: str
    references: tuple[str, ...]

    @property
    def operation(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def never_continues(self) -> bool:
        """Whether control never passes to the next instruction."""
        if self.predicate:
            return False
        if self.opcode in DIRECT_JUMPS:
            return not PREDICATE_OPERAND.search(self.operands.partition("`")[0])
        return self.operation in ("EXIT", "KILL", "RET", *INDIRECT_JUMPS)

    def __str__(self) -> str:
        return f"{self.address:#06x} {self.opcode}{self.operands.partition('(*')[0].rstrip(' ;')}"


@dataclass
class Kernel:
    """The code of one entry function, with the local functions that the compiler put behind it."""

    name: str
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def main_loops(self) -> list[set[int]]:
        """The instruction numbers of every main loop, called functions included.

        These are the outermost cycles with matrix instructions, but for a cycle that stores results: there the cycles
        with matrix instructions inside it, if there are any.
        """
        edges = [self._successors(number) for number in range(len(self.code))]
        found, pending = [], self._matrix_cycles(edges, edges)
        while pending:
            cycle = pending.pop()
            inner = self._matrix_cycles(edges_inside(cycle, edges), edges) if self._any(RESULT_OPCODES, cycle) else []
            if inner:
                pending += inner
            else:
                found.append(self._with_callees(cycle, edges))
        return found

    def has_matrix_instructions(self) -> bool:
        return self._any(MATRIX_OPCODES, range(len(self.code)))

    def local_accesses(self, numbers: Iterable[int]) -> list[Instruction]:
        return [self.code[number] for number in sorted(numbers) if self.code[number].operation in LOCAL_OPCODES]

    def _any(self, operations: tuple[str, ...], numbers: Iterable[int]) -> bool:
        return any(self.code[number].operation in operations for number in numbers)

    def _matrix_cycles(self, edges: list[list[int]], all_edges: list[list[int]]) -> list[set[int]]:
        """The outermost cycles of `edges` that contain matrix instructions or call a function that does."""
        return [one for one in cycles(edges) if self._any(MATRIX_OPCODES, self._with_callees(one, all_edges))]

    def _successors(self, number: int) -> list[int]:
        """Where control can go next; a call continues behind it, a return ends the path."""
        targets = self._targets(number)
        if number + 1 < len(self.code) and not self.code[number].never_continues:
            targets.append(number + 1)
        return targets

    def _targets(self, number: int) -> list[int]:
        instruction = self.code[number]
        operation = instruction.operation
        if operation in ("BSSY", "RET") or self._callee(instruction) is not None:
            return []
        if operation == "BSYNC":
            return self._convergence_points(number)
        known = [self.labels[name] for name in instruction.references if name in self.labels]
        return known or (list(self.labels.values()) if operation in INDIRECT_JUMPS else [])

    def _convergence_points(self, number: int) -> list[int]:
        """Where a BSYNC continues: normally right behind it; if no BSSY of its barrier says so, wherever one does."""
        barrier = CONVERGENCE.findall(self.code[number].operands)
        pushes = [other for other in self.code if other.operation == "BSSY"]
        matching = [push for push in pushes if CONVERGENCE.findall(push.operands) == barrier]
        points = [self.labels[name] for push in matching for name in push.references if name in self.labels]
        return [] if number + 1 in points else points

    def _callee(self, instruction: Instruction) -> int | None:
        """The first instruction of the local function that is called; a call of a plain label is only a long jump."""
        if instruction.operation != "CALL":
            return None
        functions = [name for name in instruction.references if name.startswith("$")]
        return self.labels.get(functions[0]) if functions else None

    def _with_callees(self, cycle: set[int], edges: list[list[int]]) -> set[int]:
        reached, queue = set(cycle), list(cycle)
        while queue:
            callee = self._callee(self.code[queue.pop()])
            fresh = [callee] if callee is not None and callee not in reached else []
            while fresh:
                number = fresh.pop()
                if number not in reached:
                    reached.add(number)
                    queue.append(number)
                    fresh += edges[number]
        return reached


def parse_sass(text: str) -> list[Kernel]:
    """The kernels in the output of `nvdisasm -c`."""
    kernels: list[Kernel] = []
    for line in text.splitlines():
        if section := SECTION.match(line):
            kernels.append(Kernel(section.group(1)))
        elif kernels and (label := LABEL.match(line)):
            kernels[-1].labels[label.group(1)] = len(kernels[-1].code)
        elif kernels and (match := INSTRUCTION.match(line)):
            address, predicate, opcode, operands = match.groups()
            listed = BRANCH_LIST.search(operands)
            references = listed.group(1).split(",") if listed else REFERENCE.findall(operands)
            kernels[-1].code.append(Instruction(int(address, 16), predicate or "", opcode, operands, tuple(references)))
    for kernel in kernels:
        kernel.labels = {name: number for name, number in kernel.labels.items() if number < len(kernel.code)}
    return kernels


def edges_inside(cycle: set[int], edges: list[list[int]]) -> list[list[int]]:
    """The edges of a cycle without those back to where it is entered: what is left of it are the cycles inside.

    Instruction 0 is an entry, too; where nothing leads into a cycle, its first instruction is taken for one.
    """
    entries = {target for node, targets in enumerate(edges) if node not in cycle for target in targets} | {0}
    entries = entries & cycle or {min(cycle)}
    inside = cycle - entries
    return [[target for target in targets if target in inside] if node in cycle else []
            for node, targets in enumerate(edges)]  # fmt: skip


def cycles(edges: list[list[int]]) -> list[set[int]]:
    """The strongly connected components that contain a cycle (Tarjan's algorithm, without recursion)."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[set[int]] = []
    for root in range(len(edges)):
        path = [] if root in order else [(root, iter(edges[root]))]
        while path:
            node, rest = path[-1]
            if node not in order:
                order[node] = low[node] = len(order)
                stack.append(node)
                on_stack.add(node)
            step = next(rest, None)
            if step is not None:
                if step not in order:
                    path.append((step, iter(edges[step])))
                elif step in on_stack:
                    low[node] = min(low[node], order[step])
                continue
            path.pop()
            if path:
                low[path[-1][0]] = min(low[path[-1][0]], low[node])
            if low[node] == order[node]:
                component = set()
                while node not in component:
                    component.add(stack.pop())
                on_stack -= component
                if len(component) > 1 or node in edges[node]:
                    found.append(component)
    return found
