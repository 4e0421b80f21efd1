"""Take the pictures of the page for the docs: python bench/page_images.py RUN_FOLDER docs/images.

The run needs evaluations and `run.record_tokens`, as `cohort demo` has; a Chromium must be installed.
"""

import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from cohort_view.server.serve import ViewServer

STEP = 12


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A view of the run as it is shown."""

    name: str
    view: str  # address within the run
    size: tuple[int, int] = (1280, 800)
    options: dict[str, Any] = field(default_factory=dict)
    before: str = ""  # script to run first


FOCUS_TOKEN = "scrollBy(0, 420); document.querySelectorAll('.tokens .token')[17].focus()"
PICTURES = (
    Picture(name="page-run", view="", size=(1280, 900)),
    Picture(name="page-step", view=f"/steps/{STEP}?group=3", size=(1280, 900)),
    Picture(name="page-tokens", view=f"/steps/{STEP}?group=3&row=48&color=push", size=(1280, 900), before=FOCUS_TOKEN),
    Picture(name="page-filter", view=f"/steps/{STEP}?where=reward+%3C+0.2+and+length+%3E+25", size=(1280, 900)),
    Picture(name="page-questions", view="/questions", size=(1280, 900)),
    Picture(name="page-dark", view=f"/steps/{STEP}?group=3", size=(1280, 900), options={"color_scheme": "dark"}),
    Picture(name="page-narrow", view=f"/steps/{STEP}", size=(390, 844)),
)


def main() -> None:
    run, out = Path(sys.argv[1]), Path(sys.argv[2])
    chosen = sys.argv[3:]
    with served(run) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for picture in PICTURES:
            if not chosen or picture.name in chosen:
                width, height = picture.size
                viewport = {"width": width, "height": height}
                page = browser.new_context(viewport=viewport, reduced_motion="reduce", **picture.options).new_page()
                page.goto(address)
                take(page, address.split("?")[0] + f"#/run/{run.name}" + picture.view, picture, out)
        browser.close()


def take(page: Page, address: str, picture: Picture, out: Path) -> None:
    page.goto(address)
    page.locator("main h1").first.wait_for()
    page.wait_for_load_state("networkidle") if "search" not in picture.view else page.wait_for_timeout(1500)
    if picture.before:
        page.evaluate(picture.before)
    page.wait_for_timeout(1200)
    file = out / f"{picture.name}.png"
    page.screenshot(path=file)
    # A palette of 256 colors halves the size
    Image.open(file).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file} {file.stat().st_size / 1000:.0f} kB")


@contextmanager
def served(run: Path) -> Iterator[str]:
    server = ViewServer([run], port=0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [server.listener]}, daemon=True)
    thread.start()
    yield server.address
    server.should_exit = True
    thread.join()


if __name__ == "__main__":
    main()
