"""The page in a real browser: drop, match, slider, heatmap, add, browse; the report too.

Runs in Debian's Chromium, driven by Playwright. In CI (``CI=true``) a missing browser is a
failure; elsewhere the tests are skipped and say so.
"""

import base64
import csv
import io
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from sscd_vec.app.engine import Engine
from sscd_vec.bank.decisions import Decisions
from sscd_vec.bank.lineage import choose_original
from sscd_vec.bank.quality import inspect_image
from sscd_vec.bank.records import BankImage
from sscd_vec.bank.report import write_report
from sscd_vec.bank.results import Copies, Copy, CopyGroup
from sscd_vec.cli.pictures import EDITS, draw
from sscd_vec.files import find_images
from tests.app.running import Running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, FilePayload, Page

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
IN_CI = os.environ.get("CI") == "true"

DROP = """([name, content]) => {
  const bytes = Uint8Array.from(atob(content), c => c.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], name, { type: "image/jpeg" }));
  const options = { dataTransfer: data, bubbles: true, cancelable: true };
  document.body.dispatchEvent(new DragEvent("dragover", options));
  document.body.dispatchEvent(new DragEvent("drop", options));
}"""
PASTE = """([name, content]) => {
  const bytes = Uint8Array.from(atob(content), c => c.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], name, { type: "image/jpeg" }));
  document.body.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true }));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None and not IN_CI:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    assert program is not None, "CI must run the browser tests, and there is no Chromium"
    if not IN_CI:
        pytest.importorskip("playwright", reason="pip install playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture
def context(browser: "Browser") -> Iterator["BrowserContext"]:
    made = browser.new_context(viewport={"width": 1200, "height": 900})
    made.set_default_timeout(20_000)
    yield made
    made.close()


@pytest.fixture
def page(context: "BrowserContext") -> Iterator["Page"]:
    """A page that fails the test if it logs an error or breaks its content policy."""
    opened = context.new_page()
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    yield opened
    assert errors == []


@pytest.fixture
def served(engine: Engine) -> Iterator[Running]:
    with Running(engine) as running:
        yield running


def until(page: "Page", condition: str, seconds: float = 20.0) -> None:
    """Wait for a condition; Playwright's own wait needs eval, which the content policy forbids."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"still not so: {condition}"
        page.wait_for_timeout(30)


def _jpeg(seed: int, quality: int = 50) -> str:
    image = draw(seed)
    image.thumbnail((180, 180))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return base64.b64encode(buffer.getvalue()).decode()


def test_drop_match_slider_heatmap(page: "Page", served: Running, tmp_path: Path) -> None:
    page.goto(served.address)
    until(page, "document.getElementById('facts').textContent.includes('12 images')")
    assert page.locator("#thresholdValue").text_content() == "0.800"

    page.evaluate(DROP, ["suspect.jpg", _jpeg(3)])
    first = page.locator(".match").first
    first.wait_for()
    assert "picture-03.png" in str(first.text_content())
    assert page.locator(".verdict").text_content() == "Copy of 1 image"
    assert page.locator(".match.copy").count() == 1
    until(page, "document.querySelector('.match img').naturalWidth > 0")

    page.locator("#threshold").evaluate(
        "node => { node.value = 1; node.dispatchEvent(new Event('input')) }"
    )
    assert page.locator(".verdict").text_content() == "Perhaps a copy: take a look"
    assert page.locator(".match.copy").count() == 0
    page.locator("#threshold").evaluate(
        "node => { node.value = -0.2; node.dispatchEvent(new Event('input')) }"
    )
    assert page.locator(".match.copy").count() > 1
    page.click("#calibrated")
    assert page.locator(".match.copy").count() == 1

    page.locator(".match").first.click()
    page.click("#heat")
    page.wait_for_selector("#pair canvas")
    assert page.locator("#pair canvas").count() == 2
    painted = page.locator("#pair canvas").first.evaluate(
        "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    )
    assert painted > 10
    page.screenshot(path=tmp_path / "heatmap.png")
    page.click("#heat")
    assert not page.locator("#pair canvas").first.is_visible()
    page.click("#shut")


def test_outlines_of_what_was_copied(page: "Page", engine: Engine) -> None:
    engine.bank.verify = True
    with Running(engine) as running:
        page.goto(running.address)
        page.evaluate(DROP, ["suspect.jpg", _jpeg(3, quality=90)])
        first = page.locator(".match.copy").first
        first.wait_for()
        first.click()
        assert page.locator("#pair polygon").count() == 4
        box = page.locator("#pair polygon").first.bounding_box()
        image = page.locator("#pair img").first.bounding_box()
        assert box is not None and image is not None
        assert box["width"] == pytest.approx(image["width"], rel=0.1)  # the whole image
        assert box["height"] == pytest.approx(image["height"], rel=0.1)
        page.click("#shut")
        page.locator("#results summary").first.click()
        page.locator(".match.below").first.click()
        assert page.locator("#pair polygon").count() == 0


def test_paste_add_browse_and_remove(page: "Page", served: Running) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(served.address)
    until(page, "document.getElementById('facts').textContent.includes('12 images')")
    page.evaluate(PASTE, ["new.jpg", _jpeg(99)])
    page.wait_for_selector(".verdict")
    assert page.locator(".verdict").text_content() == "No copy found"
    page.get_by_role("button", name="Add to bank").click()
    until(page, "document.getElementById('facts').textContent.includes('13 images')")
    page.evaluate(PASTE, ["again.jpg", _jpeg(99)])
    until(page, "document.querySelectorAll('.verdict').length == 2")
    assert page.locator(".verdict").first.text_content() == "Copy of 1 image"
    page.click("#tabBank")
    until(page, "document.querySelectorAll('#images figure').length == 13")
    page.fill("#text", "upload")
    until(page, "document.querySelectorAll('#images figure').length == 1")
    page.get_by_role("button", name="Remove").click()
    until(page, "document.querySelectorAll('#images figure').length == 0")


def test_several_files_a_bad_one_and_a_phone(
    browser: "Browser", served: Running, tmp_path: Path
) -> None:
    phone = browser.new_context(
        viewport={"width": 390, "height": 844}, is_mobile=True, color_scheme="dark"
    )
    page = phone.new_page()
    page.set_default_timeout(20_000)
    page.goto(served.address)
    for name, content in (
        ("1.jpg", base64.b64decode(_jpeg(1))),
        ("2.jpg", base64.b64decode(_jpeg(2))),
        ("broken.jpg", b"\xff\xd8\xff broken"),
    ):
        (tmp_path / name).write_bytes(content)
    page.set_input_files("#files", sorted(tmp_path.glob("*.jpg")))
    page.wait_for_selector("#results .error")
    until(page, "document.querySelectorAll('.verdict').length == 2")
    assert "broken.jpg" in str(page.locator("#results .error").text_content())
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark == "rgb(17, 19, 22)"
    phone.close()


def test_token_is_asked_for(page: "Page", engine: Engine) -> None:
    with Running(engine, token="open sesame") as running:
        page.goto(f"{running.address}/#token=open%20sesame")
        until(page, "document.getElementById('facts').textContent.includes('images')")
        assert "token" not in page.url
        page.evaluate(DROP, ["suspect.jpg", _jpeg(3)])
        page.wait_for_selector(".match.copy")
        until(page, "document.querySelector('.match img').src.startsWith('blob:')")


def test_results_are_explained_named_and_taken_away(page: "Page", served: Running) -> None:
    page.goto(served.address)
    until(page, "document.getElementById('facts').textContent.includes('12 images')")
    page.click(".explain summary")
    assert "0.800" in str(page.locator("#meaning").text_content())
    hostile = '=1+1"><img src=x onerror=alert(1)>\u202e.jpg'
    page.evaluate(DROP, [hostile, _jpeg(3)])
    page.locator(".match").first.wait_for()
    assert page.locator(".match .name").first.text_content() == "photos/picture-03.png"
    assert page.locator("#results img").count() == 11  # the image and ten matches, none of a name
    with page.expect_download() as saved:
        page.click("#saveCsv")
    rows = list(csv.DictReader(Path(saved.value.path()).read_text().splitlines()))
    assert len(rows) == 10 and rows[0]["copy"] == "true" and rows[1]["copy"] == "false"
    assert rows[0]["image"] == "'" + hostile and rows[0]["name"] == "photos/picture-03.png"
    with page.expect_download() as saved:
        page.click("#saveJson")
    listed = json.loads(Path(saved.value.path()).read_text())
    assert listed[0]["image"] == hostile and listed[0]["threshold"] == 0.8
    with page.expect_download() as saved:
        page.click("#saveParquet")
    assert pq.read_table(saved.value.path()).to_pylist() == listed


def test_files_that_are_no_images_are_named_and_unknown_types_are_tried(
    context: "BrowserContext", served: Running
) -> None:
    page = context.new_page()  # its console names the refused request
    page.goto(served.address)
    until(page, "document.getElementById('facts').textContent.includes('12 images')")
    files: list[FilePayload] = [
        {"name": "notes.pdf", "mimeType": "application/pdf", "buffer": b"%PDF"},
        {"name": "phone.heic", "mimeType": "", "buffer": b"no image at all"},
    ]
    page.set_input_files("#files", files)
    until(page, "document.querySelectorAll('#results .error').length == 1")
    assert "phone.heic: " in str(page.locator("#results .error").text_content())
    assert page.locator("#problem").text_content() == "Not an image: notes.pdf"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"false_match_rate": 0.01, "per": "query"}, "about 1 in 100 searches for an image that"),
        ({"false_match_rate": 0.01, "per": "comparison"}, "about 1 in 100 pairs of unrelated"),
    ],
)
def test_where_the_threshold_comes_from_is_said_in_words(
    page: "Page", engine: Engine, options: dict[str, Any], words: str
) -> None:
    rows = np.random.default_rng(0).normal(size=(300, engine.bank.normalizer.dim_in))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    engine.bank.replace_normalizer(engine.bank.normalizer.calibrate(rows, force=True, **options))
    with Running(engine) as running:
        page.goto(running.address)
        page.click(".explain summary")
        until(page, "document.getElementById('meaning').textContent != ''")
        assert words in str(page.locator("#meaning").text_content())


def test_what_a_person_decides_lasts(page: "Page", served: Running) -> None:
    page.goto(served.address)
    page.evaluate(DROP, ["suspect.jpg", _jpeg(3)])
    page.locator(".match.copy").first.click()
    page.get_by_role("button", name="Not a copy").click()
    until(page, "document.querySelector('.verdict').textContent == 'No copy found'")
    assert "not a copy, you said" in str(page.locator("#sideScore").text_content())
    page.click("#shut")
    page.reload()
    page.evaluate(DROP, ["another-name.jpg", _jpeg(3)])
    page.locator(".match").first.wait_for()
    assert page.locator(".match.copy").count() == 0
    with page.expect_download() as saved:
        page.click("#saveDecisions")
    (decision,) = Decisions.load(saved.value.path())
    assert not decision.is_copy


def test_a_read_only_bank_offers_no_changes(page: "Page", engine: Engine) -> None:
    with Running(engine, read_only=True) as running:
        page.goto(running.address)
        until(page, "document.getElementById('facts').textContent.includes('images')")
        page.evaluate(DROP, ["suspect.jpg", _jpeg(3)])
        page.wait_for_selector(".match.copy")
        assert page.get_by_role("button", name="Add to bank").count() == 0
        page.locator(".match.copy").first.click()
        assert page.get_by_role("button", name="Not a copy").count() == 0
        page.click("#shut")
        page.click("#tabBank")
        until(page, "document.querySelectorAll('#images figure').length == 12")
        assert page.get_by_role("button", name="Remove").count() == 0


def test_api_page(page: "Page", served: Running) -> None:
    page.goto(f"{served.address}/docs")
    page.wait_for_selector("section")
    headings = page.locator("h2").all_text_contents()
    assert "POST /search" in headings and "GET /metrics" in headings


def test_report_with_thousands_of_groups(page: "Page", tmp_path: Path) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    images = []
    for seed, edit in ((0, "framed"), (1, "captioned")):
        for name, image in (("o", draw(seed)), ("e", EDITS[edit](draw(seed), rng))):
            path = tmp_path / f"{name}{seed} <b>&'.jpg"
            image.save(path, quality=80)
            images.append(inspect_image(find_images(path)[0]))
    groups = []
    for number in range(3000):
        pair = images[:2] if number % 2 else images[2:]
        kept = choose_original(pair).keep
        heat = rng.random((9, 12))
        members = [BankImage(image.file.id, "", 1, image.file) for image in pair]
        copy = Copy(members[1 - kept], 0.4 + number / 6000, pair[1 - kept], heat, heat)
        keep = Copy(members[kept], 1.0, pair[kept])
        groups.append(CopyGroup(keep, (copy,), (("/x/</script>.jpg", 0.5),)))
    found = Copies(groups, 0.4, 9000, 3000, [])
    write_report(tmp_path / "r.html", found, title="</script>")
    start = time.monotonic()
    page.goto((tmp_path / "r.html").as_uri())
    page.wait_for_selector(".group")
    assert time.monotonic() - start < 20
    assert page.locator("h1").text_content() == "</script>"
    assert "3,000 groups" in str(page.locator("#facts").text_content())
    assert page.locator(".group").count() < 200  # the rest is drawn when it comes into view
    page.select_option("#sort", "weak")
    assert "score 0.400" in str(page.locator(".group figure:not(.keep)").first.text_content())
    page.fill("#filter", "o1 <b>")
    until(page, "document.querySelector('.group').textContent.includes('o1 <b>')")
    before = page.locator(".group").count()
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    until(page, f"document.querySelectorAll('.group').length > {before}")
    boxes = [page.locator(".group").nth(n).bounding_box() for n in (0, 1)]
    assert boxes[0] and boxes[1] and boxes[0]["y"] == boxes[1]["y"]  # pairs stand side by side
    page.evaluate("scrollTo(0, 0)")
    page.locator(".group figure:not(.keep) .frame").first.click()
    page.click("#heat")
    assert page.locator("#pair canvas").first.is_visible()
    page.click("#shut")
    with page.expect_download() as saved:
        page.click("#export")
    listed = Path(saved.value.path()).read_text().splitlines()
    assert len(listed) == 1500


def test_names_in_a_report_are_text_to_a_browser(page: "Page", tmp_path: Path) -> None:
    names = [
        '"><img src=x onerror=document.title=1>.jpg',
        "right\u202egpj.left.jpg",
        "line\nbreak.jpg",
    ]
    images = []
    for seed, name in enumerate(names):
        draw(seed).save(tmp_path / name, quality=80)
        images.append(inspect_image(find_images(tmp_path / name)[0]))
    members = [BankImage(image.file.id, "", 1, image.file) for image in images]
    copies = [Copy(*both) for both in zip(members, (1.0, 0.7, 0.6), images, strict=True)]
    group = CopyGroup(copies[0], tuple(copies[1:]))
    write_report(tmp_path / "r.html", Copies([group], 0.4, 3, 3, []), title=names[0])
    page.goto((tmp_path / "r.html").as_uri())
    page.wait_for_selector(".group")
    assert page.title() == names[0]
    assert page.locator("img[onerror]").count() == 0
    said = str(page.locator(".group").text_content())
    assert "<img src=x onerror=document.title=1>.jpg" in said
    assert "left.jpg" in said and "break.jpg" in said
