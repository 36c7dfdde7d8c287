"""`top`: rates, running downloads, and their processes."""

import os
import re
import signal
import threading

import pytest

from shardcache.cli.output import Console
from shardcache.cli.stats import frame, snapshots
from shardcache.layout import Layout
from shardcache.stats import database
from tests.support.clitools import Screen
from tests.support.storetools import PATIENCE, begin, metadata_for, wait_until
from tests.support.tars import make_tar

URL = "s3://lab/train/0.tar"
DATA = make_tar(0, members=40, size=100_000)


def test_rates_cover_the_time_between_two_snapshots(make_cache, origin, clock, capsys):
    origin.objects[URL] = DATA
    cache = make_cache(max_size=2 * len(DATA))
    cache.open(URL).read()
    states = snapshots(cache)
    first = next(states)
    assert (first["seconds"], first["total"].opens) == (None, 0)
    Console().render(frame(first))
    assert "0.0/s" not in capsys.readouterr().out  # nothing is measured yet
    for _ in range(10):
        cache.open(URL).close()
    cache.process.counters.flush()
    clock.sleep(2.0)
    second = next(states)
    total, (tier,) = second["total"], second["tiers"]
    assert (second["seconds"], total.hits, total.misses, total.hit_rate) == (2.0, 10, 0, 1.0)
    assert (tier["shards"], tier["bytes"], tier["max_size"]) == (1, len(DATA), 2 * len(DATA))
    assert second["processes"] == 1
    clock.sleep(2.0)
    third = next(states)
    assert (third["seconds"], third["total"].hits) == (4.0, 10)  # a longer window steadies rates
    database.zero(Layout.of_root(cache.dir))
    clock.sleep(1.0)
    assert min(next(states)["total"].counters.values()) == 0


def test_a_running_download_is_shown_with_its_process(make_cache, origin, monkeypatch, capsys):
    monkeypatch.setenv("SHARDCACHE_RANK", "3")
    origin.objects[URL] = DATA
    gate = threading.Event()
    cache = make_cache(validate=lambda path: gate.wait(PATIENCE) or None)
    states = snapshots(cache)

    def shown():
        Console().render(frame(next(states)))
        return capsys.readouterr().out.splitlines()

    with cache.open(URL) as stream:
        assert stream.read(10) == DATA[:10]
        wait_until(lambda: next(states)["fetches"][0]["written_bytes"] == len(DATA))
        *_, title, _, last = shown()
        assert title == "1 download running" and last.split()[0] == URL
        assert "100%" in last and f"rank 3, pid {os.getpid()}" in last
        gate.set()
        stream.read()
    wait_until(lambda: not next(states)["fetches"])
    left = begin(Layout.of_root(cache.dir), metadata_for("s3://lab/dead.tar", DATA))
    left.close()  # as if its process had been killed
    assert "0 downloads running" in shown()


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_on_a_terminal_it_redraws_until_a_key_ends_it_quietly(make_cache, key):
    make_cache().pin(URL)  # creates the directory
    with Screen("top", "--interval", "0.3", columns=40) as screen:
        screen.read(until=r"(?s)(0 downloads running.*){2}")
        screen.type("xyz")
        screen.read(until=r"(?s)(0 downloads running.*){4}")
        screen.type(key)
        if key != "q":  # the terminal of a test sends no signals
            os.killpg(screen.command.process.pid, signal.SIGINT)
        text, code = screen.end()
    assert code == (0 if key == "q" else 130)
    assert not any(word in text for word in ("rror", "interrupted", "xyz", "SAVED"))
    titles = re.sub(r"\x1b\[\d+m", "", next(x for x in text.splitlines() if "HIT RATE" in x))
    assert re.fullmatch(r"RANK +OPENS +HIT RATE +STREAMED( +FETCHED)?\s*", titles)
    assert "\x1b[1mshardcache top" in text and re.search(r"q\s+to quit", text)
    assert "\x1b[1A" in text  # the cursor moves up
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
