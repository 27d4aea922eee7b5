"""Look at a TensorBoard in headless Chromium: `look.py URL TAG PICTURE` prints what is on screen as JSON.

Apart from the tests, because it runs in the environment of `requirements.txt`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys

from playwright.sync_api import sync_playwright

PATIENCE_MS = 240_000
# A busy machine draws in software; none of these looks anything up on a network.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def main(url: str, tag: str, picture: str) -> None:
    """Open the scalars, narrow them down to `tag`, wait for a drawn line, take a picture."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{url}#timeseries", wait_until="domcontentloaded")
        page.get_by_role("combobox", name="Filter tags").fill(tag)
        card = page.locator("scalar-card").first
        card.wait_for()
        # A curve is a path with several points; an empty chart has axes only.
        line = card.locator("line-chart path[d*='L']").first
        line.wait_for(state="attached")
        seen = {
            "title": page.title(),
            "card": "".join(card.inner_text().split()),
            "points": (line.get_attribute("d") or "").count("L") + 1,
        }
        page.screenshot(path=picture)
        browser.close()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:4])
