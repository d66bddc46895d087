"""A headless Chromium for the tests of the pages, and the pictures that they store."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

PICTURES = Path(os.environ.get("PANJUE_ARTEFACTS", "build/screenshots"))
DEMO = Path(os.environ["PANJUE_DEMO"]).absolute() if "PANJUE_DEMO" in os.environ else None
"""The finished run of `make score`, if the pictures of the first page are to be made anew."""

WIDTH = 1000
"""Of the pictures of the first page, in pixels."""

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return Debian's Chromium."""
    if BROWSER is None:
        pytest.skip("there is no Chromium here; apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=QUIET)
        yield started
        started.close()


def take_pictures(page: Any, name: str) -> None:
    """Store how a page looks on a phone and a screen, by day and by night; nothing sticks out."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            PICTURES.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=PICTURES / f"{name}-{scheme}-{width}.png", full_page=True)


def take_picture_of_first_page(page: Any, name: str, height: int | None = None) -> None:
    """Store a picture of the demo in `eval/`, where the first page has it.

    A picture of another run lies with those of `take_pictures`. Without `height`, it shows the
    whole page.
    """
    folder = Path(__file__).parents[1] / "eval" if DEMO else PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    page.set_viewport_size({"width": WIDTH, "height": height or 900})
    page.screenshot(path=path, full_page=height is None)
    with Image.open(path) as picture:
        assert picture.width == WIDTH
        fewer_colors = picture.convert("RGB").quantize(64)
    fewer_colors.save(path, optimize=True)  # half the size
