"""A headless Chromium for tests of pages, and what a page must not do in it.

Without Chromium such a test is skipped, unless the gate runs it: that sets `REQUIRED`, and then it fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

REQUIRED = "COLDBLOCK_REQUIRE_CHROMIUM"
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A started browser. For modules without asynchronous tests: Playwright keeps this thread's event loop."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        reason = "no Chromium: install it (Debian: apt-get install chromium) to test the pages in a browser"
        if os.environ.get(REQUIRED):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_ARGUMENTS))
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(browser: Browser, url: str, *, problems_expected: bool = False, **options: Any) -> Iterator[Page]:
    """The page at `url`. Fails at the end if it asked another host for anything, threw, or wrote an error."""
    problems: list[str] = []
    host = "/".join(url.split("/")[:3]) + "/"

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            problems.append(f"console: {message.text}")

    def on_request(request: Request) -> None:
        if not request.url.startswith(host):
            problems.append(f"asked for {request.url}")

    page = browser.new_page(**options)
    page.set_default_timeout(30_000)
    page.on("console", on_console)
    page.on("pageerror", lambda error: problems.append(f"threw: {error}"))
    page.on("request", on_request)
    try:
        page.goto(url)
        yield page
    finally:
        page.close()
    assert problems_expected or not problems, problems
