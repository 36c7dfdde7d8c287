"""The page of charts: everything in one file, and the figures are those that were counted."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardcache.cache import Cache
from shardcache.cli.charts import Series, bars, gauge, line
from shardcache.cli.page import Report, page
from shardcache.cli.top import TierUse
from shardcache.stats.database import Fetch, Sample
from tests.support.clitools import run_process
from tests.support.tars import make_tar

NOON = 1_795_348_800
SVG = "http://www.w3.org/2000/svg"


def sample(start: int, seconds: int = 60, rank: int | None = None, **counts: int) -> Sample:
    waits = {"disk": Counter({10: counts["hits"]})} if "hits" in counts else {}
    return Sample(start, seconds, rank, None, Counter(counts), waits)


def report(samples: list[Sample], **given: object) -> Report:
    facts = {"node": "n1", "made": NOON + 9000.0, "fetches": [], "tiers": [], "settings": []}
    return Report(samples=samples, **{**facts, **given})  # type: ignore[arg-type]


class Reader(HTMLParser):
    """Collects tags, attributes and text; complains of what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "rect", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "rect", "line", "circle", "polyline"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def shapes(svg: str, tag: str) -> list[ElementTree.Element]:
    inner = svg[: svg.index("</svg>") + len("</svg>")].replace("<svg ", f'<svg xmlns="{SVG}" ')
    return list(ElementTree.fromstring(inner).iter(f"{{{SVG}}}{tag}"))


# -- charts ----------------------------------------------------------------------


def test_bars_are_as_high_as_their_values_and_stand_on_each_other() -> None:
    series = [Series("a", 0, [10.0, 0.0, 5.0]), Series("b", 1, [10.0, 20.0, 0.0])]
    drawn = shapes(bars("x", [0.0, 60.0, 120.0], series, str), "rect")
    heights = [float(one.get("height", "")) for one in drawn]
    assert len(drawn) == 4  # what is nothing is not drawn
    first, above, alone, half = heights
    assert first == above == pytest.approx(alone / 2, abs=0.2)
    assert half == pytest.approx(alone / 4, abs=0.2)
    bottom, top = (float(one.get("y", "")) for one in drawn[:2])
    assert top + above == pytest.approx(bottom, abs=0.2)
    assert [one.get("fill") for one in drawn] == [
        "var(--s0)",
        "var(--s1)",
        "var(--s1)",
        "var(--s0)",
    ]


def test_bars_of_different_times_do_not_overlap() -> None:
    times = [float(60 * n) for n in range(50)]
    drawn = shapes(bars("x", times, [Series("a", 0, [1.0] * 50)], str), "rect")
    edges = [(float(one.get("x", "")), float(one.get("width", ""))) for one in drawn]
    ends = [x + width for x, width in edges]
    assert all(end < x for end, (x, _) in zip(ends, edges[1:], strict=False))
    assert ends[-1] <= 720


def test_a_line_has_gaps_where_nothing_is_known() -> None:
    svg = line("x", [0.0, 60.0, 120.0, 180.0, 240.0], [0.5, 1.0, None, 0.0, 1.0], str)
    assert len(shapes(svg, "polyline")) == 2
    heights = [float(one.get("cy", "")) for one in shapes(svg, "circle")]
    assert heights[1] < heights[0] < heights[2]  # 0 is at the bottom


@pytest.mark.parametrize(("share", "width"), [(0.0, 0.0), (0.25, 25.0), (1.0, 100.0), (1.7, 100.0)])
def test_a_gauge_is_as_full_as_what_it_shows(share: float, width: float) -> None:
    assert float(shapes(gauge("x", share), "rect")[1].get("width", "")) == width


def test_nothing_at_all_is_a_chart_too() -> None:
    assert shapes(bars("x", [], [], str), "rect") == []
    assert shapes(bars("x", [5.0], [Series("a", 0, [0.0])], str), "rect") == []
    assert shapes(line("x", [5.0], [None], str), "circle") == []


# -- the page ----------------------------------------------------------------------


def test_it_needs_nothing_from_elsewhere() -> None:
    found = Reader(page(report([sample(NOON, hits=3, misses=1, bytes_opened=400)])))
    assert found.open == []
    assert not {"script", "link", "img", "iframe"} & set(found.tags)
    assert [value for name, value in found.attributes if name in ("src", "href")] == []
    assert ("name", "viewport") in found.attributes
    style = page(report([]))
    assert "prefers-color-scheme:dark" in style and "http" not in style.split("</style>")[0]


def test_it_says_what_was_counted() -> None:
    samples = [
        sample(NOON + 60 * n, hits=9, misses=1, bytes_opened=1000, bytes_origin=100)
        for n in range(60)
    ]
    samples.append(sample(NOON, evicted_max_size=2, bytes_evicted=500, errors_origin=1))
    text = " ".join(Reader(page(report(samples, tiers=[TierUse(1, "/ssd", 7, 250, 1000)]))).text)
    for fact in (
        "90.0%",
        "600",
        "60.0 KB",
        "6.0 KB",
        "54.0 KB",
        "max_size",
        "/ssd: 7 shards, 250 B of 1.0 KB",
    ):
        assert fact in text, fact
    total = report(samples).as_dict()["total"]
    assert (total["opens"], total["hits"], total["evicted"], total["errors"]) == (600, 540, 2, 1)


def test_how_full_it_was_is_reckoned_back_from_what_is_there() -> None:
    samples = [
        sample(NOON, bytes_stored=700),
        sample(NOON + 60, bytes_stored=200, bytes_evicted=100, hits=1),
        sample(NOON + 180, bytes_evicted=300),
    ]
    found = report(
        samples, tiers=[TierUse(1, "/ssd", 7, 400, 900), TierUse(1, "/ram", 3, 150, 600)]
    )
    told = found.as_dict()
    assert told["cached_bytes"] == 550
    assert [row["cached_bytes"] for row in told["over_time"]] == [750, 850, 850, 550]
    text = page(found)
    drawn = text[text.index("Bytes in the cache</h2>") + len("Bytes in the cache</h2>") :]
    heights = [float(one.get("cy", "")) for one in shapes(drawn, "circle")]
    assert heights[1] == heights[2] < heights[0] < heights[3]
    (limit,) = (one for one in shapes(drawn, "line") if one.get("stroke-dasharray"))
    assert float(limit.get("y1", "")) < heights[1]  # 1.5 KB are more than there ever were


def test_a_limit_that_is_far_away_is_not_drawn_and_an_empty_cache_has_no_line() -> None:
    samples = [sample(NOON, bytes_stored=700)]
    far = page(report(samples, tiers=[TierUse(1, "/ssd", 7, 700, 10_000)]))
    none = page(report(samples, tiers=[TierUse(1, "/ssd", 7, 700, None)]))
    assert "Bytes in the cache" in far and "Bytes in the cache" in none
    assert "stroke-dasharray" not in far + none
    empty = page(report(samples, tiers=[TierUse(1, "/ssd", 0, 0, 1000)]))
    assert "Bytes in the cache" not in empty


def test_what_was_removed_by_hand_makes_nothing_less_than_nothing() -> None:
    samples = [sample(NOON, bytes_stored=100), sample(NOON + 60, bytes_stored=900)]
    rows = report(samples, tiers=[TierUse(1, "/ssd", 1, 50, None)]).as_dict()["over_time"]
    assert [row["cached_bytes"] for row in rows] == [0, 50]


def test_an_hour_is_shown_by_minutes_and_a_month_by_days() -> None:
    hour = [sample(NOON + 60 * n, hits=1) for n in range(60)]
    month = [sample(NOON + 3600 * n, 3600, hits=1) for n in range(24 * 30)]
    for samples, least, most in ((hour, 60, 60), (month, 30, 31)):
        rows = report(samples).as_dict()["over_time"]
        assert least <= len(rows) <= most
        assert sum(row["hits"] for row in rows) == len(samples)
        starts = [row["at"] for row in rows]
        assert len({b - a for a, b in itertools.pairwise(starts)}) == 1  # no gap


def test_ranks_are_compared_where_there_are_some() -> None:
    one = page(report([sample(NOON, rank=0, hits=1)]))
    two = page(report([sample(NOON, rank=0, hits=1), sample(NOON, rank=1, misses=1)]))
    assert "By rank" not in one and "By rank" in two


def test_shards_that_came_twice_are_named_and_nothing_is_markup() -> None:
    bad = "s3://lab/<script>alert(1)</script>.tar"
    fetches = [Fetch(1.0, 10, 0.1, None, url) for url in (bad, bad, "s3://lab/once.tar")]
    text = page(report([], fetches=fetches, node="<u>", settings=[("dir", "<i>", "x")]))
    assert not [tag for tag in ("<script>", "<u>", "<i>") if tag in text]
    assert bad in "".join(Reader(text).text) and "once.tar" not in text
    (row,) = report([], fetches=fetches).as_dict()["refetched"]
    assert row == {"url": bad, "fetches": 2, "bytes": 20}


def test_a_cache_that_did_nothing_has_a_page() -> None:
    text = " ".join(Reader(page(report([]))).text)
    assert "Nothing was counted" in text and "None of 0 shards" in text


# -- the command --------------------------------------------------------------------


@pytest.fixture
def used(tmp_path: Path) -> Path:
    (tmp_path / "a.tar").write_bytes(make_tar(1))
    with Cache(tmp_path / "cache", cache_local=True, min_free=0) as cache:
        for _ in range(2):
            with cache.open(str(tmp_path / "a.tar")) as stream:
                stream.read()
    return tmp_path / "cache"


def test_the_command_writes_one_file(used: Path, tmp_path: Path) -> None:
    code, said, errors = run_process("report", "-o", tmp_path / "r.html", directory=used)
    assert (code, errors) == (0, "") and re.match(r"wrote .*r\.html, [\d.]+ KB", said)
    found = Reader((tmp_path / "r.html").read_text())
    assert "50.0%" in found.text and found.open == []


def test_machines_get_the_figures_and_no_file(used: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.html"
    code, said, _ = run_process("report", "--json", "-o", output, directory=used)
    found = json.loads(said)
    assert (code, found["total"]["hits"], found["total"]["misses"]) == (0, 1, 1)
    assert found["tiers"][0]["shards"] == 1 and not output.exists()
    size = found["tiers"][0]["bytes"]
    assert found["cached_bytes"] == found["over_time"][-1]["cached_bytes"] == size > 0
    assert found["total"]["bytes_stored"] == size


def test_where_it_cannot_be_written_it_says_so(used: Path, tmp_path: Path) -> None:
    code, _, errors = run_process("report", "-o", tmp_path / "none" / "r.html", directory=used)
    assert code != 0 and "r.html" in errors and "Traceback" not in errors


def test_a_secret_of_the_configuration_is_not_in_it(used: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'dir = "{used}"\n[storage_options]\nkey = "who"\nsecret = "hush-hush"\n')
    code, _, _ = run_process(
        "--config", config, "report", "-o", tmp_path / "r.html", directory=used
    )
    assert code == 0 and "hush-hush" not in (tmp_path / "r.html").read_text()
