"""The kernels on paper: the bytes they move, and the least time their machine code needs.

``traffic`` counts bytes from the kernels' loads and stores; a test counts the same under the
interpreter. ``roofline`` divides what a tile costs (``speed.aot``) by what a GPU can do. Its times
are lower bounds: nothing waits, nothing conflicts, every multiprocessor is always busy. They are
not measurements.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sscd_vec.kernels import gem, neighbours, push, scan
from sscd_vec.kernels.launch import Gpu

DIMENSION = 512
GEM_SHAPES = ((64, 2048, 9, 9), (256, 2048, 7, 7), (32, 512, 41, 41))
LOSS_ROWS = (8192, 32768)
BATCHES = ((8192, 8192), (512, 32768), (32768, 32768))  # local and global rows
PAPER_GPU = Gpu(80, 163 << 10, 1)  # the tiles that the interpreter takes, columns in one part


@dataclass(frozen=True)
class Traffic:
    """Bytes a kernel moves between its programs and memory, counted from its loads and stores.

    Attributes:
        kernel: Which.
        shape: On what.
        moved: Bytes loaded and stored by all programs, whether or not a cache serves them.
        least: Bytes of all inputs and outputs, each once.
        operations: Floating-point operations of its matrix products.
    """

    kernel: str
    shape: str
    moved: int
    least: int
    operations: int = 0


@dataclass(frozen=True)
class Card:
    """What a GPU can do at its boost clock, from its maker's data sheet.

    Attributes:
        name: Its usual name.
        target: The architecture it runs.
        processors: Multiprocessors.
        gigahertz: The clock at which it reaches its stated half-precision rate.
        l2: Bytes per clock of its L2 cache; where the maker states none, 64 for each
            multiprocessor, more than any is known to reach.
        hbm: Bytes per second of its memory.
    """

    name: str
    target: str
    processors: int
    gigahertz: float
    l2: int
    hbm: float


CARDS = (
    Card("A100", "sm_80", 108, 1.41, 5120, 2.04e12),
    Card("H100", "sm_90", 132, 1.83, 132 * 64, 3.35e12),
    Card("B200", "sm_100", 148, 1.86, 148 * 64, 8.0e12),
)


def gem_traffic(shape: tuple[int, int, int, int], size: int) -> list[Traffic]:
    """GeM on a contiguous map of ``size`` bytes per element."""
    n, c, h, w = shape
    pixels, rows = h * w, n * c
    x, y = rows * pixels * size, rows * size
    wide = rows * 4 if size < 4 else 0  # y in float32, kept for the backward of half precisions
    saved = rows * 4
    text = f"{n}x{c}x{h}x{w}, {size} bytes"
    forward, backward = x + y + wide, 2 * x + y + saved
    if pixels % gem.FLAT_ROWS and pixels <= gem.FLAT_PIXELS:
        # Rows meet in memory, written, read and written again; y and dy are read for each pixel.
        forward = x + y + 3 * saved
        backward = 2 * x + pixels * (y + saved)
    return [
        Traffic("gem_forward", text, forward, x + y),
        Traffic("gem_backward", text, backward, 2 * x + y + saved),
    ]


def loss_traffic(rows: int, size: int, dimension: int = DIMENSION) -> list[Traffic]:
    """The kernels of ``sscd_loss`` on a whole batch of two unmixed views of each image."""
    parts = 2 if size == 4 else 1
    scan_tile = scan.scan_tile(PAPER_GPU, parts, rows)
    push_tile = push.push_tile(PAPER_GPU, parts, dimension)
    matrix, factors = rows * dimension * size, rows * dimension * 2 * parts
    scalars, gradient = rows * 4, rows * dimension * 4
    text = f"{rows}x{dimension}, {size} bytes"
    products = 2 * rows * rows * dimension
    scan_m, scan_n = scan_tile["BLOCK_M"], scan_tile["BLOCK_N"]
    push_m, push_n = push_tile["BLOCK_M"], push_tile["BLOCK_N"]
    scan_blocks, push_blocks = -(-rows // scan_m), -(-rows // push_m)
    scan_moved = (scan_blocks + -(-rows // scan_n)) * factors + 3 * scalars
    push_moved = (push_blocks + 1) * factors + (push_blocks + 2) * scalars + gradient
    # Two views: a row finds its one positive in a run of four entries (two rows, two slots) that it
    # walks for each of its slots, reading one entry and two or four source ids at each step.
    walk = rows * (2 * 8 + 4 * (4 + 2 * 4) + 4 * (4 + 4 * 4))
    chunks = rows // neighbours.CHUNK
    once = matrix + scalars
    return [
        Traffic("mark", text, 2 * rows * (16 + 32 + 8), 2 * rows * 16),
        Traffic(
            "scan", text, scan_moved + _mates(rows, scan_m, scan_n), factors + 3 * scalars, products
        ),
        Traffic("positives", text, 2 * matrix + walk + 5 * scalars, once + 4 * scalars),
        Traffic("distance", text, 2 * matrix + 8 * rows + scalars, matrix + 8 * rows + scalars),
        Traffic(
            *("push", text, push_moved + _mates(rows, push_m, push_n)),
            *(factors + 2 * scalars + gradient, 2 * products),
        ),
        Traffic("pull", text, 2 * matrix + walk + 11 * scalars + 2 * gradient, once + 2 * gradient),
        Traffic("chunk", text, 16 * chunks, 16 * chunks),
        Traffic(
            "pair_gradient",
            text,
            3 * matrix + 2 * gradient + rows * (3 * 8 + 8 + 8),
            matrix + 2 * gradient + rows * (8 + 4),
        ),
    ]


def _mates(rows: int, block_m: int, block_n: int) -> int:
    """Bytes of the tiles' flags, and of the sources that marked and ragged tiles compare."""
    held = {(i // block_m, j // block_n) for i in range(rows) for j in (i, (i + rows // 2) % rows)}
    row_blocks, column_blocks = -(-rows // block_m), -(-rows // block_n)
    if rows % block_n:
        held |= {(i, column_blocks - 1) for i in range(row_blocks)}
    compared = sum(
        min(block_m, rows - i * block_m) + min(block_n, rows - j * block_n) for i, j in held
    )
    return row_blocks * column_blocks + 8 * compared


def traffic() -> list[Traffic]:
    """Every kernel and shape."""
    found = [t for shape in GEM_SHAPES for size in (4, 2) for t in gem_traffic(shape, size)]
    return found + [t for rows in LOSS_ROWS for size in (4, 2) for t in loss_traffic(rows, size)]


def roofline(cost: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The least time of a step of the loss on each card, by what bounds it.

    Args:
        cost: The matrix kernels' figures, records of ``speed.aot.Figures``.
    """
    found = {(str(x["variant"]), str(x["target"])): x for x in cost}
    rows = []
    for card in CARDS:
        for local, everyone in BATCHES:
            for products in ("fp32", "bf16"):
                costs = _launches(found, card.target, products, local == everyone)
                rows.append(_bound(card, local, everyone, products, costs))
    return rows


def _launches(
    cost: dict[tuple[str, str], dict[str, object]], target: str, products: str, whole: bool
) -> list[tuple[int, dict[str, float]]]:
    """Products of each pair of rows, and the cost of each, for the launches of a step."""
    scanned = max(
        (name for name, where in cost if where == target and name.startswith(f"scan {products}")),
        key=lambda name: int(name.rsplit("x", 1)[1]),
    )
    sides = ("both",) if whole else ("a", "b")
    names = [(1, scanned), *((2, f"push {products} {side}") for side in sides)]
    return [
        (count, {k: v for k, v in cost[name, target].items() if isinstance(v, float)})
        for count, name in names
    ]


def _bound(
    card: Card, local: int, everyone: int, products: str, costs: list[tuple[int, dict[str, float]]]
) -> dict[str, object]:
    clocks = card.processors * card.gigahertz * 1e9
    pairs = local * everyone * DIMENSION
    size = 4 if products == "fp32" else 2  # float32 in two parts of two bytes
    read = (local + everyone) * DIMENSION * size
    limits = {}
    for limit in ("issue", "tensor", "shared"):
        needed = sum(n * pairs * cost[f"{limit}_clocks"] / 1000 for n, cost in costs)
        limits[limit] = needed / clocks
    moved = sum(2 * n * pairs * cost["bytes_per_flop"] for n, cost in costs)
    limits["L2"] = moved / (card.l2 * card.gigahertz * 1e9)
    limits["HBM"] = (len(costs) * read + (local + everyone) * DIMENSION * 4) / card.hbm
    longest = max(limits, key=lambda limit: limits[limit])
    return {
        "GPU": card.name,
        "local x global rows": f"{local} x {everyone}",
        "products": products,
        **{f"{limit} ms": 1e3 * seconds for limit, seconds in limits.items()},
        "lower bound ms": 1e3 * limits[longest],
        "bound by": longest,
    }
