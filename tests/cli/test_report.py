"""``shardcache report``: one file without external parts, and the right figures."""

import re
import sys

import pytest

from shardcache.cache import Cache
from shardcache.space import budget
from shardcache.units import format_bytes
from tests.support.shop import Shop
from tests.support.storetools import room


def test_the_report_is_one_file_with_the_right_figures(run, tmp_path, monkeypatch):
    shop = Shop(tmp_path, 4)
    with Cache(shop.path, cache_local=True, max_size=shop.room(3)) as cache:
        for _ in range(3):  # one shard is streamed for lack of room
            for url in shop.urls:
                cache.open(url).read()
        cache.remove(shop.urls[0])
        cache.fetch(shop.urls[0])
    page = tmp_path / "report.html"
    code, out, err = run("--dir", shop.path, "report", "-o", page)
    assert (code, err) == (0, "") and f"wrote {page}" in out
    html = page.read_text()
    assert "<svg" in html and not re.search(r"<(script|link|img|iframe)\b", html)
    assert not re.search(r"""\b(src|href)=["'][^#]""", html)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))
    labels = re.findall(r">([^<>]+)</text>", html)
    assert "origin" in labels and "upstream" not in labels  # of which there were none
    facts = (
        *("Shards opened 12 ", f"{shop.path}: 3 shards", "(100%)", "0 5 10 15 Shards opened"),
        *("1 / 1 (100.00%)", "Bytes received over the network", "400.0 KB", " none "),
        f"Bytes streamed, not stored {format_bytes(3 * shop.size)}",
    )
    assert [fact for fact in facts if fact not in text] == []
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    err = run.err("--dir", shop.path, "report", "-o", page, code=2)
    assert "pip install 'shardcache[report]'" in err


def test_the_report_of_a_short_job_shows_its_course(run, make_cache, origin, clock, tmp_path):
    page, urls = tmp_path / "report.html", [f"s3://lab/{n}.bin" for n in range(4)]
    with make_cache(dir=tmp_path / "cache") as cache:
        for url in urls:  # one minute
            origin.objects[url] = bytes(1_000_000)
            cache.open(url).read()
            cache.process.counters.flush()
            clock.sleep(20)
        cache.remove(urls[0])
    run.out("report", "-o", page)
    size = page.read_text().partition("Size of the cache")[0].rpartition("<svg")[2]
    bars = re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: #3b82c4"', size)
    edges = [[float(y) for y in re.findall(r"[ML] \S+ (\S+)", bar)] for bar in bars]
    heights = [max(ys) - min(ys) for ys in edges]
    shards = [height / heights[0] for height in heights]
    assert shards == pytest.approx([1, 2, 3, 4, 3], abs=0.01)


def test_the_report_of_an_empty_cache_escapes_names(run, tmp_path):
    root = tmp_path / "<b>cache"
    page = tmp_path / "report.html"
    run("--dir", root, "pin", "s3://b/a.tar")  # creates the cache
    run.out("--dir", root, "report", "-o", page)
    assert "Nothing was counted" in page.read_text() and "<b>cache" not in page.read_text()


def test_report_and_top_estimate_a_large_cache(run, make_cache, origin, tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "_COUNTED", 50)  # instead of 10,000
    root = tmp_path / "cache"
    with make_cache(dir=root) as cache:
        for n in range(200):
            origin.objects[f"s3://lab/{n}.bin"] = bytes(1000)
            cache.fetch(f"s3://lab/{n}.bin")
    (tier,) = run.json("top", "--interval", "0.2")["tiers"]
    assert tier["estimated"] and 150 < tier["shards"] < 250
    assert tier["bytes"] == pytest.approx(1000 * tier["shards"], rel=0.01)
    assert tier["disk_bytes"] == pytest.approx(room(root, 1000) * tier["shards"], rel=0.01)
    page = tmp_path / "report.html"
    run.out("report", "-o", page)
    assert f"{root}: about {tier['shards']} shards, " in page.read_text()
