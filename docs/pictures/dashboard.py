"""Makes docs/pictures/dashboard.png: the live page of a small engine under load, in a headless Chromium.

    python docs/pictures/dashboard.py [FILE.png] [--dark] [--narrow]

A pool of 24 blocks, chats that do not fit into it, forty seconds of watching. Needs the extra `test` and Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from pathlib import Path

import httpx
from coldblock.tools.daemons import running_engine, running_frontend
from coldblock.tools.fetch_model import resolve_model
from playwright.async_api import async_playwright

MODEL = "smollm2-135m"
ENGINE_FLAGS = ("--num-gpu-blocks", "24", "--max-model-len", "512", "--max-cpu-offload-mb", "24", "--threads", "1")
CHROMIUM = {"executable_path": "/usr/bin/chromium", "args": ["--no-sandbox", "--disable-gpu", "--disable-quic"]}
WATCH_S = 40
ASK_EVERY_S = 1.0
MOST_AT_ONCE = 5
QUESTIONS = (
    "Explain what a hash table is and what it is good for.",
    "Why is the sky blue, and why is the sunset red?",
    "Tell the story of a lighthouse keeper and a storm.",
    "How does a bicycle stay upright?",
    "What happens when bread dough rises?",
)


async def keep_asking(http: httpx.AsyncClient) -> None:
    """A new chat every few seconds, of different lengths, until cancelled."""
    places = asyncio.Semaphore(MOST_AT_ONCE)

    async def ask(question: str, tokens: int) -> None:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": tokens, "ignore_eos": True}
        await http.post("/v1/chat/completions", json=body)
        places.release()

    async with asyncio.TaskGroup() as chats:
        for question, tokens in zip(itertools.cycle(QUESTIONS), itertools.cycle((220, 140, 300)), strict=False):
            await places.acquire()
            chats.create_task(ask(question, tokens))
            await asyncio.sleep(ASK_EVERY_S)


async def picture(url: str, file: Path, *, dark: bool, width: int) -> None:
    """Watch for a while, then take the whole page."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(**CHROMIUM)
        scheme = "dark" if dark else "light"
        page = await browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme, device_scale_factor=1.5
        )
        await page.goto(f"{url}/dashboard")
        await page.wait_for_timeout(1000 * WATCH_S)
        await page.screenshot(path=file, full_page=True)
        await browser.close()


async def main() -> None:
    """Engine, frontend, load, picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, default=Path(__file__).with_suffix(".png"))
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--narrow", action="store_true")
    options = parser.parse_args()
    resolve_model(MODEL)
    async with (
        running_engine(MODEL, *ENGINE_FLAGS) as endpoint,
        running_frontend(endpoint, "--shutdown-timeout", "1") as (host, port),
        httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=None) as http,
    ):
        load = asyncio.create_task(keep_asking(http))
        try:
            await picture(
                f"http://{host}:{port}", options.file, dark=options.dark, width=420 if options.narrow else 1280
            )
        finally:
            load.cancel()


if __name__ == "__main__":
    asyncio.run(main())
