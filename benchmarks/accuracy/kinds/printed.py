"""Test images of print: documents, scans, invoices, receipts, forms, sheets, puzzles, music."""

import random

import numpy as np
from PIL import Image, ImageChops, ImageFilter

from accuracy.kinds.frame import Frame, Look, Region, blend, inset, split

SILVER = (190, 190, 190)


def document(look: Look, dice: random.Random) -> Image.Image:
    """A page: title, abstract, numbered sections, sometimes two columns, footnotes."""
    frame = Frame(look, 744, 1052)
    pitch, margin = look.dice.uniform(15, 27), look.dice.uniform(40, 100)
    head, body, foot = split(inset(frame.whole, margin), [look.dice.uniform(0.05, 0.2), 1, 0.05])
    if dice.random() < 0.7:
        share, align = look.dice.uniform(0.2, 0.4), look.dice.choice(["left", "middle"])
        title = look.phrase(dice, dice.randint(2, 6))
        frame.label(head, title, share, face=look.head, align=align)
    for column in split(body, [1] * look.dice.choice([1, 1, 2]), down=False):
        _sections(frame, inset(column, 8, 0), dice, pitch)
    frame.label(
        foot, f"{dice.randint(1, 99)} / {dice.randint(99, 400)}", 0.4, SILVER, align="middle"
    )
    return frame.image


def _sections(frame: Frame, column: Region, dice: random.Random, pitch: float) -> None:
    x0, y, x1, bottom = column
    number = dice.randint(1, 9)
    while y + 4 * pitch < bottom:
        if dice.random() < 0.35:
            frame.label(
                (x0, y, x1, y + 1.5 * pitch),
                f"{number}. " + frame.look.phrase(dice, 2),
                0.6,
                face=frame.look.head,
            )
            y, number = y + 1.8 * pitch, number + 1
        if dice.random() < 0.12:
            tall = min(pitch * dice.randint(3, 9), bottom - y)
            figure(frame, inset((x0, y, x1, y + tall), 12, 4), dice)
            y += tall + pitch
        y = frame.prose((x0, y, x1, bottom), dice, pitch, count=dice.randint(2, 9)) + 0.6 * pitch


def figure(frame: Frame, region: Region, dice: random.Random) -> None:
    """A framed curve."""
    frame.fill(region, None, SILVER)
    x0, y0, x1, y1 = region
    height = np.cumsum([dice.gauss(0, 1) for _ in range(30)])
    height = (height - height.min()) / (np.ptp(height) + 1e-9)
    steps = [(x0 + (x1 - x0) * i / 29, y1 - (y1 - y0) * h) for i, h in enumerate(height.tolist())]
    frame.draw.line(steps, fill=frame.look.tints[0], width=2)


def scanned(look: Look, dice: random.Random) -> Image.Image:
    """A document or an invoice after the scanner: grey, uneven, slanted, dirty."""
    plain = (document if look.dice.random() < 0.5 else invoice)(look, dice).convert("L")
    width, height = plain.size
    slant = dice.uniform(-0.02, 0.02)
    matrix = (1, slant, -slant * height / 2, -slant, 1, slant * width / 2)
    plain = plain.transform(
        plain.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=250
    )
    seeded = np.random.default_rng(dice.getrandbits(32))
    grain = Image.fromarray(
        seeded.integers(0, 60, (height // 2, width // 2), dtype=np.uint8)
    ).resize(plain.size)
    dirty = ImageChops.subtract(
        plain.filter(ImageFilter.GaussianBlur(look.dice.uniform(0.2, 0.9))), grain, 1.0, 10
    )
    if look.dice.random() < 0.7:
        level = look.dice.randint(110, 170)
        dirty = dirty.point([0 if value < level else 255 for value in range(256)])
    return dirty.convert("RGB")


def invoice(look: Look, dice: random.Random) -> Image.Image:
    """An invoice: a coloured head, who and when, a ruled table, sums at the right."""
    frame = Frame(look, 760, int(760 * look.dice.choice([1.29, 1.41])))
    head, parties, table, sums, foot = split(
        inset(frame.whole, look.dice.uniform(30, 70)), [1.1, 1.5, 4, 1.3, 1]
    )
    brand = look.phrase(look.dice, 1)
    if look.dice.random() < 0.5:
        frame.fill(head, look.tint(look.dice.uniform(0, 0.5)), round_by=look.dice.random() * 0.5)
    left, right = split(inset(head, 12), [1, 1], down=False)
    frame.label(left, brand, 0.5, look.pen, look.head)
    frame.label(right, f"No. {dice.randint(10000, 999999)}", 0.25, align="right")
    for side in split(inset(parties, 4, 18), [1, 1], down=False):
        for line in split(side, [1] * 5):
            words = (
                look.phrase(dice, 2)
                if dice.random() < 0.8
                else f"{dice.randint(1, 28)}/{dice.randint(1, 12)}/{dice.randint(2015, 2027)}"
            )
            frame.label(line, words, 0.7)
    _goods(frame, table, dice)
    for line, name in zip(
        split(inset(sums, 0, 14), [1, 1, 1.4]), ("net", "tax", "total"), strict=True
    ):
        frame.label((line[0] + 380, *line[1:]), name, 0.55, face=look.head)
        frame.label(line, f"{dice.uniform(5, 20000):.2f}", 0.55, align="right", face=look.fixed)
    frame.prose(foot, dice, look.dice.uniform(13, 18), SILVER)
    return frame.image


def _goods(frame: Frame, table: Region, dice: random.Random) -> None:
    look = frame.look
    pitch, ruled = look.dice.uniform(20, 36), look.dice.random() < 0.6
    rows = min(dice.randint(1, 14), int((table[3] - table[1]) / pitch) - 1)
    widths = [look.dice.uniform(0.4, 0.8), 4, 1, 1.2, 1.4]
    for row in range(rows + 1):
        y = table[1] + row * pitch
        line = (table[0], y, table[2], y + pitch)
        if row == 0:
            frame.fill(line, look.tint(0.6, 1))
        for spot, cell in enumerate(split(line, widths, down=False)):
            number = f"{dice.uniform(1, 900):.2f}" if spot > 2 else str(dice.randint(1, 50))
            words = look.phrase(dice, 1) if row == 0 or spot == 1 else number
            frame.label(inset(cell, 4, 0), words, 0.55, align="left" if spot < 2 else "right")
        if ruled:
            frame.draw.line((line[0], line[3], line[2], line[3]), SILVER)


def receipt(look: Look, dice: random.Random) -> Image.Image:
    """A till receipt on a strip of paper."""
    count = dice.randint(2, 22)
    frame = Frame(look, look.dice.randint(300, 380), 26 * (count + 12))
    lines = list(split(inset(frame.whole, 16, 12), [1] * (count + 12)))
    frame.label(lines[0], look.phrase(look.dice, 2), 0.95, face=look.head, align="middle")
    frame.label(
        lines[1],
        f"{dice.randint(0, 23):02d}:{dice.randint(0, 59):02d}  #{dice.randint(1, 9999):04d}",
        0.6,
        face=look.fixed,
        align="middle",
    )
    for line in lines[3 : 3 + count]:
        frame.label(line, f"{dice.randint(1, 9)}x " + look.word(dice)[:14], 0.66)
        frame.label(line, f"{dice.uniform(0.5, 80):.2f}", 0.66, face=look.fixed, align="right")
    x0, y0, x1, _ = lines[3 + count]
    frame.draw.line((x0, y0 + 12, x1, y0 + 12), look.pen, 2)
    frame.label(
        lines[4 + count], f"{dice.uniform(5, 500):.2f}", 0.95, face=look.fixed, align="right"
    )
    frame.prose((x0, lines[6 + count][1], x1, lines[9 + count][3]), dice, 22)
    return frame.image


def form(look: Look, dice: random.Random) -> Image.Image:
    """A form in a grid: numbered fields, ticks, some answers typed in."""
    frame = Frame(look, 780, 1040)
    head, body = split(inset(frame.whole, 44), [1, 12])
    frame.fill(head, look.tint(0.5))
    frame.label(inset(head, 10, 0), look.phrase(look.dice, 4), 0.45, face=look.head)
    number = 0
    for row in split(body, [look.dice.uniform(0.7, 1.6) for _ in range(look.dice.randint(8, 15))]):
        for cell in split(
            row, [look.dice.uniform(0.5, 2) for _ in range(look.dice.randint(1, 4))], down=False
        ):
            number += 1
            frame.fill(cell, None, look.pen)
            name, answer = split(inset(cell, 5, 3), [1, 2])
            frame.label(
                name, f"{number} {look.phrase(look.dice, 2)}", 0.8, blend(look.pen, look.paper, 0.4)
            )
            if dice.random() < 0.6:
                frame.label(
                    answer, look.phrase(dice, dice.randint(1, 3)), 0.5, (20, 40, 130), look.fixed
                )
            elif dice.random() < 0.4:
                frame.label(answer, "[x]" if dice.random() < 0.5 else "[ ]", 0.5, face=look.fixed)
    return frame.image


def spreadsheet(look: Look, dice: random.Random) -> Image.Image:
    """Cells with letters and numbers at the edges; filled blocks of figures."""
    frame = Frame(look, look.dice.randint(760, 1100), look.dice.randint(480, 760))
    columns, rows = look.dice.randint(5, 11), look.dice.randint(14, 30)
    bar, grid = split(frame.whole, [look.dice.uniform(0.5, 2), rows])
    frame.fill(bar, look.tint(look.dice.uniform(0, 0.7)))
    used = dice.randint(4, rows), dice.randint(3, columns)
    for row, line in enumerate(split(grid, [1] * rows)):
        for column, cell in enumerate(split(line, [0.4, *[1] * columns], down=False)):
            edge = row == 0 or column == 0
            frame.fill(cell, blend(look.paper, SILVER, 0.5) if edge else None, SILVER)
            if edge:
                text = str(row) if column == 0 else chr(64 + column)
                frame.label(inset(cell, 3, 0), text, 0.6, align="middle")
            elif row <= used[0] and column <= used[1] and dice.random() < 0.9:
                head = row == 1 or column == 1
                text = (
                    look.word(dice) if head else f"{dice.uniform(0, 10 ** dice.randint(1, 6)):.1f}"
                )
                frame.label(
                    inset(cell, 3, 0),
                    text,
                    0.6,
                    face=look.head if head else None,
                    align="left" if head else "right",
                )
    return frame.image


def puzzle(look: Look, dice: random.Random) -> Image.Image:
    """A crossword or a sudoku."""
    side = look.dice.choice([9, 11, 13, 15])
    frame = Frame(look, 600, 600 + look.dice.choice([0, 160]))
    grid = inset((0, 0, 600, 600), look.dice.uniform(10, 60))
    for row, line in enumerate(split(grid, [1] * side)):
        for column, cell in enumerate(split(line, [1] * side, down=False)):
            if side == 9:
                frame.fill(cell, None, look.pen)
                if dice.random() < 0.4:
                    frame.label(cell, str(dice.randint(1, 9)), 0.7, align="middle")
                if row % 3 == 0 and column % 3 == 0:
                    frame.draw.rectangle(
                        (
                            cell[0],
                            cell[1],
                            cell[0] + 3 * (cell[2] - cell[0]),
                            cell[1] + 3 * (cell[3] - cell[1]),
                        ),
                        None,
                        look.pen,
                        4,
                    )
            else:
                frame.fill(cell, look.pen if dice.random() < 0.2 else None, look.pen)
    frame.prose((20, 610, 580, frame.image.height - 10), dice, 18)
    return frame.image


def music(look: Look, dice: random.Random) -> Image.Image:
    """Sheet music: staves with notes and bars."""
    frame = Frame(look, 760, 1000)
    count = look.dice.randint(5, 11)
    frame.label((60, 20, 700, 90), look.phrase(dice, 3), 0.6, face=look.head, align="middle")
    for stave in split((50, 110, 710, 980), [1] * count):
        x0, y0, x1, y1 = inset(stave, 0, (stave[3] - stave[1]) * 0.25)
        gap = (y1 - y0) / 4
        for line in range(5):
            frame.draw.line((x0, y0 + line * gap, x1, y0 + line * gap), look.pen)
        x = x0 + 40
        while x < x1 - 20:
            y = y0 + gap * dice.randint(0, 8) / 2
            frame.draw.ellipse(
                (x - gap * 0.6, y - gap * 0.45, x + gap * 0.6, y + gap * 0.45),
                look.pen if dice.random() < 0.8 else None,
                look.pen,
            )
            frame.draw.line((x + gap * 0.6, y, x + gap * 0.6, y - 3 * gap), look.pen, 2)
            x += dice.choice([24, 24, 36, 52])
            if dice.random() < 0.15:
                frame.draw.line((x, y0, x, y1), look.pen, 2)
                x += 20
    return frame.image
