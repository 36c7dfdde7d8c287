"""The pictures of the README: `shardcache report` in a browser, `shardcache top` in a terminal.

python docs/pictures.py          (needs chromium for the report)

Four ranks read 60 shards five times through a cache that has room for 45 of them: the real
program on real files, with a clock that runs fast, so that an hour and a half takes half a minute.
"""
# ruff: noqa: S311  (nothing here is secret)

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from io import BytesIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from shardcache.cache import Cache
from shardcache.cli.top import frame
from shardcache.clock import SystemClock
from shardcache.config import Config
from shardcache.ranks import RANK_VARIABLE
from shardcache.stats.activity import Watcher

HERE = Path(__file__).resolve().parent
SHARDS, ROOM, RANKS, EPOCHS = 60, 45, 4, 5
#: Seconds that a rank computes between two shards.
COMPUTES = (15.0, 20.0)
_SECONDS = EPOCHS * SHARDS * COMPUTES[1]  # at most


class FastClock(SystemClock):
    """Time that passes when somebody sleeps, from a moment in the past on."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._slept = 0.0

    def monotonic(self) -> float:  # type: ignore[override]
        """See `Clock.monotonic`."""
        return time.monotonic() + self._slept

    def time(self) -> float:
        """See `Clock.time`."""
        return self._start + self._slept

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        self._slept += seconds


def shards(home: Path) -> list[str]:
    """Tar files of about 800 KB."""
    urls = []
    for number in range(SHARDS):
        path = home / f"train-{number:04d}.tar"
        with tarfile.open(path, "w") as archive:
            for member in range(20):
                data = random.Random(number * 100 + member).randbytes(40_000)
                info = tarfile.TarInfo(f"{number:04d}-{member:03d}.jpg")
                info.size = len(data)
                archive.addfile(info, BytesIO(data))
        urls.append(str(path))
    return urls


def job(directory: Path, urls: list[str], rank: int, begun: float) -> None:
    """One rank's epochs."""
    os.environ[RANK_VARIABLE] = str(rank)
    limit = ROOM * Path(urls[0]).stat().st_size + 1000
    config = Config(directory, cache_local=True, min_free=0, max_size=limit)
    chance = random.Random(rank)
    with Cache.from_config(config, clock=(clock := FastClock(begun))) as cache:
        for _ in range(EPOCHS):
            for url in chance.sample(urls, len(urls)):
                with cache.open(url) as stream:
                    stream.read()
                clock.sleep(chance.uniform(*COMPUTES))


def play(directory: Path, urls: list[str]) -> None:
    """All ranks at once."""
    begun = time.time() - _SECONDS
    children = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - what is streamed is told there
                job(directory, urls, rank, begun)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    for pid in children:
        if os.waitpid(pid, 0)[1]:
            raise SystemExit("a rank failed")


def picture_of_report(directory: Path, home: Path, size: int) -> None:
    """Of the page, by a browser."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if browser is None:
        raise SystemExit("chromium is not installed")
    page = home / "report.html"
    environment = {**os.environ, "SHARDCACHE_MAX_SIZE": str(size)}
    command = [sys.executable, "-m", "shardcache", "--dir", directory, "report", "-o", page]
    subprocess.run(command, check=True, env=environment)
    subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--window-size=900,1120", f"--screenshot={HERE / 'report.png'}", page.as_uri()),
        ],
        check=True,
        capture_output=True,
    )


def picture_of_top(directory: Path, urls: list[str]) -> None:
    """Of a look while four ranks read as fast as they can."""
    end = time.monotonic() + 8
    children = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            os.environ[RANK_VARIABLE] = str(rank)
            with Cache(directory, cache_local=True, min_free=0) as cache:
                while time.monotonic() < end:
                    for url in random.sample(urls, len(urls)):
                        with cache.open(url) as stream:
                            stream.read()
                        time.sleep(0.01)
            os._exit(0)
        children.append(pid)
    with Cache(directory, cache_local=True, min_free=0, max_size="80MB") as cache:
        watcher = Watcher(cache, SystemClock())
        watcher.look()
        time.sleep(5.5)
        lines = frame(watcher.look(), "/local/nvme/shards")
        lines = [line.replace(str(directory), "/local/nvme/shards") for line in lines]
    for pid in children:
        os.waitpid(pid, 0)
    with open(os.devnull, "w") as null:
        screen = Console(record=True, width=92, file=null)
        screen.print(Text("$ shardcache top\n" + "\n".join(lines)))
        drawn = screen.export_svg(title="shardcache top")
    # The picture asks nobody for its font.
    (HERE / "top.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.S))


def main() -> None:
    """Make them."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        urls = shards(home)
        play(home / "cache", urls)
        picture_of_report(home / "cache", home, ROOM * Path(urls[0]).stat().st_size + 1000)
        picture_of_top(home / "second", urls)
    print(f"wrote {HERE / 'report.png'} and {HERE / 'top.svg'}")


if __name__ == "__main__":
    main()
