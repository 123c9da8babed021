"""Drawn images: documents, tables, slides, code, chats, charts, codes, maps and logos from a seed.

Trained on photos alone, a model learns that everything on a plain background is alike. A few drawn
images in every batch, several of one kind, teach it that two invoices differ. Only fonts are read
from files, and no image is drawn twice.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from PIL import Image

from sscd_vec.trainer.augment.charts import (
    Box,
    Sheet,
    bars,
    blend,
    circle,
    dashboard,
    flow,
    lines,
    pie,
    scatter,
)


def document(page: Sheet) -> None:
    """Draw a letter or article: margins, a heading, one to three columns of text."""
    w, h, size = page.width, page.height, page.height * page.between(0.018, 0.04)
    margin, top = w * page.between(0.04, 0.14), h * page.between(0.03, 0.15)
    if page.random.random() < 0.7:
        page.write(margin, top, page.words(int(page.between(5, 24))), size * page.between(1.5, 2.5))
        top += size * 4
    columns = int(page.random.integers(1, 4))
    wide = (w - 2 * margin) / columns
    for column in range(columns):
        left = margin + column * wide
        low = top + (h * page.between(0, 0.25) if page.random.random() < 0.3 else 0)
        page.paragraph((left, low, left + wide * 0.94, h * page.between(0.6, 0.97)), size)
    if page.random.random() < 0.3:
        x, y = w * page.between(0, 0.7), h * page.between(0, 0.7)
        page.pen.rectangle((x, y, x + w * 0.25, y + h * 0.2), fill=page.accent())


def invoice(page: Sheet) -> None:
    """Draw address blocks, a table of amounts and a total."""
    w, h, size = page.width, page.height, page.height * page.between(0.02, 0.035)
    if page.random.random() < 0.6:
        page.pen.rectangle((0, 0, w, h * page.between(0.03, 0.14)), fill=page.accent())
    page.write(w * page.between(0.05, 0.6), h * page.between(0.03, 0.1), page.words(10), size * 2)
    for left in (0.06, page.between(0.5, 0.65)):
        page.paragraph((w * left, h * 0.16, w * (left + 0.3), h * page.between(0.22, 0.34)), size)
    table(page, (w * 0.06, h * page.between(0.36, 0.42), w * 0.94, h * page.between(0.55, 0.85)))
    page.write(
        w * page.between(0.5, 0.7), h * page.between(0.87, 0.93), page.words(12, 0.8), size * 1.4
    )


def spreadsheet(page: Sheet) -> None:
    """Draw a table over the whole page."""
    table(page, (0, page.height * page.between(0, 0.15), page.width, page.height))


def table(page: Sheet, box: Box) -> None:
    """Draw rows and columns of numbers, ruled or striped."""
    left, top, right, bottom = box
    rows, columns = int(page.random.integers(4, 22)), int(page.random.integers(2, 9))
    step, edges = (bottom - top) / rows, np.sort(page.random.uniform(left, right, columns - 1))
    edges = np.concatenate([[left], edges])
    striped, ruled = page.random.random(2) < 0.5
    stripe = page.accent()
    for row in range(rows):
        y = top + row * step
        if row == 0 or (striped and row % 2):
            page.pen.rectangle(
                (left, y, right, y + step), fill=stripe if row == 0 else blend(page.paper, stripe)
            )
        if ruled:
            page.pen.line((left, y, right, y), fill=page.ink)
        for x in edges[: columns if page.random.random() < 0.9 else 1]:
            page.write(x + 2, y + step * 0.15, page.words(int(page.between(1, 9)), 0.7), step * 0.6)
    if ruled:
        for x in edges:
            page.pen.line((x, top, x, bottom), fill=page.ink)


def slide(page: Sheet) -> None:
    """Draw a title, bullets, and sometimes a chart."""
    w, h, size = page.width, page.height, page.height * page.between(0.04, 0.07)
    if page.random.random() < 0.5:
        page.pen.rectangle((0, 0, w, h * page.between(0.08, 0.22)), fill=page.accent())
    page.write(
        w * page.between(0.04, 0.3), h * 0.05, page.words(int(page.between(8, 22))), size * 1.5
    )
    half = page.between(0.45, 0.95)
    for bullet in range(int(page.random.integers(2, 8))):
        y = h * 0.25 + bullet * size * 1.8
        page.pen.ellipse(
            (w * 0.05, y + size * 0.3, w * 0.05 + size * 0.4, y + size * 0.7), fill=page.accent()
        )
        page.write(w * 0.09, y, page.words(int(half * w / size * page.between(0.6, 1.7))), size)
    if half < 0.7:
        (flow, bars, pie, scatter)[int(page.random.integers(4))](
            page, (w * half, h * 0.3, w * 0.96, h * 0.9)
        )


def code(page: Sheet) -> None:
    """Draw indented lines of coloured words."""
    size = page.height * page.between(0.022, 0.05)
    gutter = page.width * page.between(0, 0.1)
    indent, y = 0, page.height * page.between(0, 0.05)
    while y < page.height:
        indent = int(np.clip(indent + page.random.integers(-1, 2), 0, 6))
        x = gutter + 4 + indent * size * 1.5
        for _ in range(int(page.random.integers(0, 6))):
            word = page.words(int(page.between(1, 10)), 0.2)
            page.write(x, y, word, size, page.accent() if page.random.random() < 0.6 else page.ink)
            x += (len(word) + 1) * size * 0.55
        y += size * 1.35
    page.pen.line((gutter, 0, gutter, page.height), fill=page.accent())


def chat(page: Sheet) -> None:
    """Draw speech bubbles on the left and right, under a bar."""
    w, h, size = page.width, page.height, page.height * page.between(0.025, 0.04)
    ours, theirs = page.accent(), blend(page.paper, page.accent())
    y = h * page.between(0, 0.12)
    page.pen.rectangle((0, 0, w, y), fill=page.accent())
    while y < h:
        mine = page.random.random() < 0.5
        wide, lines = w * page.between(0.2, 0.75), int(page.random.integers(1, 6))
        tall = lines * size * 1.5 + size
        left = w * 0.96 - wide if mine else w * 0.04
        page.pen.rounded_rectangle(
            (left, y + size, left + wide, y + tall),
            radius=round(size),
            fill=ours if mine else theirs,
        )
        page.paragraph((left + size, y + size * 1.4, left + wide - size, y + tall), size)
        y += tall + size * page.between(0.2, 1.5)


def word(page: Sheet) -> None:
    """Draw one to three large words."""
    for _ in range(int(page.random.integers(1, 4))):
        size = page.height * page.between(0.1, 0.35)
        text = page.words(int(page.random.integers(2, 9))).strip() or "a"
        fill = page.ink if page.random.random() < 0.6 else page.accent()
        page.write(
            page.width * page.between(0, 0.4), page.height * page.between(0, 0.7), text, size, fill
        )


def matrix_code(page: Sheet) -> None:
    """Draw a matrix code: random modules, three finder marks, a quiet zone."""
    count = int(page.random.integers(21, 46))
    modules = page.random.random((count, count)) < 0.5
    mark = np.pad(np.pad(np.ones((3, 3), bool), 1), 1, constant_values=True)
    mark = np.pad(mark, ((0, 1), (0, 1)))
    modules[:8, :8], modules[:8, -8:], modules[-8:, :8] = mark, mark[:, ::-1], mark[::-1]
    levels = np.where(modules[..., None], np.array(page.ink), np.array(page.paper)).astype(np.uint8)
    side = round(min(page.width, page.height) * page.between(0.5, 0.95))
    printed = Image.fromarray(levels).resize((side, side), Image.Resampling.NEAREST)
    page.image.paste(
        printed,
        (round(page.between(0, page.width - side)), round(page.between(0, page.height - side))),
    )


def street_map(page: Sheet) -> None:
    """Draw areas, roads of different widths, and names."""
    w, h = page.width, page.height
    scale = np.array([w, h])
    for _ in range(int(page.random.integers(3, 12))):
        centre, count = page.random.random(2), int(page.random.integers(3, 9))
        ring = centre + page.random.uniform(0.05, 0.3) * circle(count) * page.random.uniform(
            0.6, 1.4, (count, 1)
        )
        page.pen.polygon(
            [(x, y) for x, y in (ring * scale).tolist()], fill=blend(page.paper, page.accent())
        )
    for _ in range(int(page.random.integers(6, 40))):
        start, turn = page.random.random(2), page.between(0, 6.3)
        steps = np.stack(
            [
                np.cos(turn + page.random.normal(0, 0.3, 8)),
                np.sin(turn + page.random.normal(0, 0.3, 8)),
            ],
            axis=1,
        )
        road = (start + np.cumsum(steps * page.between(0.03, 0.2), axis=0)) * scale
        page.pen.line(
            [(x, y) for x, y in road.tolist()],
            fill=page.accent() if page.random.random() < 0.3 else page.ink,
            width=int(page.random.integers(1, 6)),
        )
    for _ in range(int(page.random.integers(2, 12))):
        page.write(
            w * page.between(0, 0.9),
            h * page.between(0, 0.9),
            page.words(7),
            h * page.between(0.02, 0.04),
        )


def drawing(page: Sheet) -> None:
    """Draw outlines and filled shapes, as in a cartoon."""
    scale = np.array([page.width, page.height])
    for _ in range(int(page.random.integers(3, 16))):
        count = int(page.random.integers(3, 30))
        ring = page.random.random(2) + page.between(0.04, 0.35) * circle(
            count
        ) * page.random.uniform(0.5, 1.2, (count, 1))
        points = [(x, y) for x, y in (ring * scale).tolist()]
        if page.random.random() < 0.5:
            page.pen.polygon(points, fill=page.accent(), outline=page.ink)
        else:
            page.pen.line(
                points, fill=page.ink, width=int(page.random.integers(1, 5)), joint="curve"
            )


def logo(page: Sheet) -> None:
    """Draw a few shapes around one point, sometimes with a name below."""
    x, y = page.width * page.between(0.35, 0.65), page.height * page.between(0.3, 0.55)
    half = min(page.width, page.height) * page.between(0.15, 0.4)
    for shape in range(int(page.random.integers(1, 6))):
        count, r = int(page.random.integers(3, 9)), half * page.between(0.2, 1)
        dx, dy = page.random.normal(0, 0.3, 2) * half
        ring = circle(count, page.between(0, 6.3)) * r + np.array([x + dx, y + dy])
        fill = page.accent() if page.random.random() < 0.8 or shape == 0 else page.paper
        if page.random.random() < 0.4:
            page.pen.ellipse((x + dx - r, y + dy - r, x + dx + r, y + dy + r), fill=fill)
        else:
            page.pen.polygon([(u, v) for u, v in ring.tolist()], fill=fill)
    if page.random.random() < 0.6:
        page.write(
            x - half,
            y + half * 1.1,
            page.words(int(page.random.integers(3, 9))),
            half * 0.4,
            page.accent(),
        )


KINDS: tuple[Callable[[Sheet], None], ...] = (
    document,
    invoice,
    spreadsheet,
    slide,
    flow,
    code,
    chat,
    bars,
    lines,
    scatter,
    pie,
    dashboard,
    word,
    matrix_code,
    street_map,
    drawing,
    logo,
)


def draw_image(
    seed: int, kind: int, side: int, fonts: tuple[str, ...] = ()
) -> tuple[npt.NDArray[np.uint8], float]:
    """Draw one image.

    Args:
        seed: Decides everything but the kind.
        kind: An index into ``KINDS``; it wraps around.
        side: Side of the square that stores it.
        fonts: Font files to choose from; empty uses Pillow's own.

    Returns:
        uint8 ``(side, side, 3)``, and width / height of the page.
    """
    page = Sheet(np.random.default_rng((kind, seed)), side * side, fonts)
    KINDS[kind % len(KINDS)](page)
    square = page.image.resize((side, side), Image.Resampling.BILINEAR, reducing_gap=2.0)
    return np.array(square), page.width / page.height
