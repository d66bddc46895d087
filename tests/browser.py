"""A headless Chromium for the tests of the pages, and the pictures that they store."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PICTURES = Path(os.environ.get("PANJUE_ARTEFACTS", "build/screenshots"))
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
