"""Makes the pictures of `coldblock top` in this folder, from a live engine whose KV pool is too small for its load.

    python docs/pictures/top.py

Owns: the load and the moment. Does not know: what the screen looks like.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from coldblock.protocol.client import AsyncClient
from coldblock.protocol.messages import SamplingParams
from coldblock.tools.daemons import running_engine
from coldblock.tools.fetch_model import resolve_model
from coldblock.tools.top.app import TopApp

FOLDER = Path(__file__).parent
MODEL = "smollm2-135m"
ENGINE_FLAGS = ("--num-gpu-blocks", "60", "--max-cpu-offload-mb", "64", "--threads", "1")
SENDERS = ("frontend:4711", "notebook")
START_S = 60.0
LONG_ENOUGH_S = 60.0  # for graphs with a past
SHARED = "You are a patient teacher. You explain one thing at a time, in plain words and with an example. "
TOPICS = (
    "a hash table", "the tides", "compound interest", "a rainbow", "photosynthesis", "the moon's phases", "a fugue",
    "public keys", "yeast", "the Doppler effect", "a suspension bridge", "vaccines", "plate tectonics", "sonnets",
)  # fmt: skip
PICTURES = {
    "top.svg": ((160, 46), (*["left"] * 6, "down", "enter")),  # sorted by swaps, the first one opened
    "top-80x24.svg": ((80, 24), ("down",)),
}


async def main() -> None:
    """Start the engine, keep it busy, take the pictures."""
    resolve_model(MODEL)
    async with (
        running_engine(MODEL, *ENGINE_FLAGS) as endpoint,
        AsyncClient(endpoint, name="top") as watcher,
        asyncio.TaskGroup() as group,
    ):
        load = [group.create_task(ask(endpoint, SENDERS[i % 2], i)) for i in range(len(TOPICS))]
        await watcher.ready(START_S)
        for file, (size, keys) in PICTURES.items():
            await take(watcher, FOLDER / file, size, keys)
        for task in load:
            task.cancel()


async def ask(endpoint: str, name: str, number: int) -> None:
    """One question after another, for ever."""
    async with AsyncClient(endpoint, name=name) as client:
        await client.ready(START_S)
        while True:
            topic = TOPICS[number % len(TOPICS)]
            sampling = SamplingParams(max_tokens=90 + 20 * (number % 7), ignore_eos=True, seed=number)
            request_id = f"chatcmpl-{number:02d}-{topic.split()[-1]}"
            async for _ in await client.submit(f"{SHARED}Explain {topic}.", sampling, request_id=request_id):
                pass
            number += len(TOPICS)


async def take(client: AsyncClient, file: Path, size: tuple[int, int], keys: tuple[str, ...]) -> None:
    """Watch for a while, press these keys, and take a picture while requests are swapped out and blocks move."""
    app = TopApp(client)
    async with app.run_test(size=size) as pilot:
        await asyncio.sleep(LONG_ENOUGH_S)
        await pilot.press(*keys)
        while not (stats := app.history.frame().stats) or not (stats.swapped and stats.link.out_bytes_per_s):
            await asyncio.sleep(0.05)
        await pilot.pause(0.1)
        picture = app.export_screenshot()
    file.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))  # fonts from elsewhere


if __name__ == "__main__":
    asyncio.run(main())
