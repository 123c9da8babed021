"""What a cubin costs, read from its machine code: the loop over tiles, its slots, products, bytes.

A kernel's time is its loop over tiles. ``tile_cost`` finds that loop in the control-flow graph of
``nvdisasm``'s listing, takes the shortest way through it that passes every tensor-core instruction
(branches that few tiles take are left out, waits are taken once), and counts along it.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
SCHEDULERS = 4  # of a multiprocessor: each issues one instruction of a warp per clock
SHARED_RATE = 128  # bytes per clock of a multiprocessor's shared memory
LOAD = re.compile(r"\bLDG(?:STS)?\.E(?:\.\w+)*")
SHARED = re.compile(r"\b(?:LDSM?|STSM?|LDGSTS)(?:\.\w+)*(?!\w)")
# "4" and "2" count the 8 x 8 matrices of a load or store for the matrix instructions.
WIDTHS = {"128": 16, "64": 8, "4": 16, "2": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
BRANCH = re.compile(r"\bBRA(?:\.\w+)*\b.*`\((\.L\w+)\)")


@dataclass
class Block:
    """Instructions without a branch between them, and the blocks that can follow."""

    lines: list[str] = field(default_factory=list)
    after: list[int] = field(default_factory=list)

    @property
    def one_warp_multiplies(self) -> bool:
        """Whether one warp issues its matrix instructions for all (sm_100)."""
        return any("UTCHMMA" in line for line in self.lines)


@dataclass(frozen=True)
class TileCost:
    """What one tile costs a multiprocessor.

    Attributes:
        multiply_adds: Of its tensor-core instructions.
        issue_clocks: Instructions of all warps over the schedulers that issue them.
        shared_clocks: Bytes to and from shared memory, operands of matrix instructions among them,
            over its rate; without conflicts.
        bytes: Loaded from global memory: from L2 in the long run.
        shapes: Rows and columns of its matrix instructions.
    """

    multiply_adds: int
    issue_clocks: float
    shared_clocks: float
    bytes: int
    shapes: tuple[tuple[int, int], ...]


def listing(cubin: bytes) -> str:
    """The machine code, as ``nvdisasm`` writes it."""
    return _run("nvdisasm", cubin, "-c")


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of them that are kept in memory."""
    text = _run("cuobjdump", cubin, "--dump-resource-usage")
    registers, stack, local = (
        int(found[1]) if (found := re.search(rf"{key}:(\d+)", text)) else 0
        for key in ("REG", "STACK", "LOCAL")
    )
    return registers, stack + local


def load_widths(text: str) -> list[int]:
    """Bytes that one lane takes at once, of every load from global memory."""
    return [_width(found[0]) for found in LOAD.finditer(text)]


def tile_cost(text: str, warps: int, rounds: int) -> TileCost:
    """The cost of one tile.

    Args:
        text: The machine code.
        warps: Warps of a program.
        rounds: Times that the tile's dimension is gone through in a loop of its own, or in the
            loop over tiles itself if that is flattened.
    """
    graph = Graph(text)
    nested = [x for x in graph.loops if graph.multiplies(x)]
    if not any(graph.sums(x) for x in nested):
        raise ValueError(
            "expected the machine code of a tile, found no loop that multiplies and sums"
        )
    inner, outer = min(nested, key=len), max((x for x in nested if graph.sums(x)), key=len)
    last = graph.path(outer, sums=True)
    cost = _count(last, warps, graph, outer)
    if rounds == 1:
        return cost
    # Of a flattened loop only the last round of a tile sums up.
    each = _count(graph.path(inner, sums=False), warps, graph, inner)
    more = rounds - 1
    return TileCost(
        multiply_adds=cost.multiply_adds + more * each.multiply_adds,
        issue_clocks=cost.issue_clocks + more * each.issue_clocks,
        shared_clocks=cost.shared_clocks + more * each.shared_clocks,
        bytes=cost.bytes + more * each.bytes,
        shapes=cost.shapes,
    )


class Graph:
    """The control-flow graph of a listing."""

    def __init__(self, text: str) -> None:
        """Cut the listing into blocks and join them."""
        self.blocks: list[Block] = [Block()]
        starts: dict[str, int] = {}
        targets: list[tuple[int, str]] = []
        for line in _with_shapes(text.splitlines()):
            if label := re.match(r"\s*(\.L\w+):", line):
                self._begin_block()
                starts[label[1]] = len(self.blocks) - 1
            elif code := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
                self.blocks[-1].lines.append(code[1])
                self._end_block(code[1], targets)
        for block, target in targets:
            if target in starts:
                self.blocks[block].after.append(starts[target])

    def _begin_block(self) -> None:
        if self.blocks[-1].lines:
            self.blocks[-1].after.append(len(self.blocks))
            self.blocks.append(Block())

    def _end_block(self, code: str, targets: list[tuple[int, str]]) -> None:
        here = len(self.blocks) - 1
        if branch := BRANCH.search(code):
            targets.append((here, branch[1]))
        elif not re.search(r"\b(EXIT|RET)\b", code):
            return
        conditional = code.startswith("@") or bool(re.search(r"\bBRA\.?\w* !?U?P\d", code))
        if conditional:
            self.blocks[here].after.append(here + 1)
        self.blocks.append(Block())

    @cached_property
    def dominators(self) -> list[set[int]]:
        """For each block the blocks on every way to it."""
        count = len(self.blocks)
        before: list[list[int]] = [[] for _ in range(count)]
        for number, block in enumerate(self.blocks):
            for after in block.after:
                if after < count:
                    before[after].append(number)
        found = [{0}] + [set(range(count))] * (count - 1)
        changed = True
        while changed:
            changed = False
            for number in range(1, count):
                ways = [found[b] for b in before[number]]
                new = {number}.union(set.intersection(*ways)) if ways else {number}
                if new != found[number]:
                    found[number], changed = new, True
        self._before = before
        return found

    @cached_property
    def loops(self) -> list[frozenset[int]]:
        """Natural loops: of each edge back to a dominator, the blocks that reach it."""
        bodies: dict[int, set[int]] = {}
        for number, block in enumerate(self.blocks):
            for head in block.after:
                if head < len(self.blocks) and head in self.dominators[number]:
                    bodies.setdefault(head, {head}).update(self._reaching(number, head))
        return [frozenset(body) for body in bodies.values()]

    def _reaching(self, end: int, head: int) -> set[int]:
        found, waiting = {head, end}, [end]
        while waiting:
            block = waiting.pop()
            if block == head:
                continue
            waiting += [b for b in self._before[block] if b not in found]
            found.update(self._before[block])
        return found

    def multiplies(self, loop: Iterable[int]) -> bool:
        """Whether a tensor-core instruction is in it."""
        return any(_is_product(line) for b in loop for line in self.blocks[b].lines)

    def sums(self, loop: Iterable[int]) -> bool:
        """Whether exponentials are summed in it."""
        return any("MUFU.EX2" in line for b in loop for line in self.blocks[b].lines)

    def path(self, loop: frozenset[int], *, sums: bool) -> list[int]:
        """The shortest way through a loop past all its products, and past its sums if asked."""
        head = next(b for b in loop if all(b in self.dominators[x] for x in loop))
        wanted = [
            b
            for b in sorted(loop)
            if (self.multiplies([b]) and not self.blocks[b].one_warp_multiplies)
            or (sums and self.sums([b]))
        ]
        ends = [b for b in loop if head in self.blocks[b].after]
        way = [head]
        for stop in [*wanted, None]:
            goals = ends if stop is None else [stop]
            if way[-1] not in goals or stop is None:
                way += self._shortest(way[-1], goals, loop, head)[1:]
        return way

    def _shortest(self, start: int, goals: list[int], loop: frozenset[int], head: int) -> list[int]:
        best: dict[int, tuple[int, list[int]]] = {start: (0, [start])}
        waiting = [start]
        while waiting:
            here = waiting.pop(0)
            cost, way = best[here]
            for after in self.blocks[here].after:
                if after not in loop or after == head or after in self.dominators[here]:
                    continue
                longer = cost + len(self.blocks[after].lines)
                if after not in best or longer < best[after][0]:
                    best[after] = longer, [*way, after]
                    waiting.append(after)
        reached = [best[goal] for goal in goals if goal in best]
        if not reached:
            raise ValueError(f"no way through the loop from block {start} to {goals}")
        return min(reached)[1]


def _count(way: list[int], warps: int, graph: Graph, loop: frozenset[int]) -> TileCost:
    lines = [line for b in way for line in graph.blocks[b].lines]
    slots: float = warps * len(lines)
    for number in loop - set(way):
        if graph.blocks[number].one_warp_multiplies:
            slots += len(graph.blocks[number].lines)
            lines += graph.blocks[number].lines
    products = [x for line in lines if (x := _product(line, warps))]
    moved = sum(_width(found[0]) for line in lines if (found := LOAD.search(line)))
    shared = sum(_width(found[0]) for line in lines if (found := SHARED.search(line)))
    operands = sum(_shared_operands(line, warps) for line in lines)
    return TileCost(
        multiply_adds=sum(x[2] for x in products),
        issue_clocks=slots / SCHEDULERS,
        shared_clocks=(shared * 32 * warps + operands) / SHARED_RATE,
        bytes=moved * 32 * warps,
        shapes=tuple(sorted({x[:2] for x in products})),
    )


def _is_product(line: str) -> bool:
    return bool(re.search(r"\b(HMMA|HGMMA|UTCHMMA)\b", line))


def _product(line: str, warps: int) -> tuple[int, int, int] | None:
    """Rows, columns and multiply-adds, by all warps, of a matrix instruction."""
    found = re.search(r"\bHMMA\.(\d\d)(\d)(\d\d)\.|\b(?:HG|UTCH)MMA\.(\d+)x(\d+)x(\d+)", line)
    if not found:
        return None
    m, n, k = (int(size) for size in found.groups() if size)
    return m, n, m * n * k * _issuers(line, warps)


def _issuers(line: str, warps: int) -> int:
    """Who issues a matrix instruction: each warp, each warp group of four, or one warp for all."""
    return warps if " HMMA" in f" {line}" else warps // 4 if "HGMMA" in line else 1


def _shared_operands(line: str, warps: int) -> int:
    """Bytes of half-precision operands that a matrix instruction reads from shared memory."""
    found = re.search(r"\b(?:HG|UTCH)MMA\.(\d+)x(\d+)x(\d+)\S*\s+(.*)", line)
    if not found:
        return 0
    m, n, k = (int(size) for size in found.groups()[:3])
    # The right factor always; the left one unless it is in registers or tensor memory.
    left = re.match(r"(?:R\d+, )?gdesc", found[4]) is not None
    return 2 * k * (n + m * left) * _issuers(line, warps)


def _with_shapes(lines: Iterable[str]) -> Iterator[str]:
    """The listing with the shape of each UTCHMMA, from the last descriptor in its register."""
    shapes: dict[str, str] = {}
    for line in lines:
        if move := re.search(r"UMOV (UR\d+), (0x[0-9a-f]+)", line):
            value = int(move[2], 16)
            m, n = (value >> 24 & 0x1F) << 4, (value >> 17 & 0x3F) << 3
            if m in (64, 128) and n and value & 0x30 == 0x10:
                shapes[move[1]] = f"{m}x{n}x16"
        found = re.search(r"UTCHMMA.*idesc\[(UR\d+)\]", line)
        yield line.replace("UTCHMMA", f"UTCHMMA.{shapes[found[1]]}") if found else line


def _width(load: str) -> int:
    return next((WIDTHS[part] for part in load.split(".") if part in WIDTHS), 4)


def _run(tool: str, cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [TOOLS / tool, option, file.name], capture_output=True, text=True, check=True
        )
    return done.stdout
