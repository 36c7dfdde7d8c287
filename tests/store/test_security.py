"""What is refused, and what is never followed, written through or waited for.

As the machine's superuser, whom no permission stops: what is spared here is spared because
the code does not touch it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcache import Cache, ConfigError
from shardcache.layout import MANIFEST, PROGRESS, Layout
from shardcache.locks.flock import Holder, KeyLock
from shardcache.store.root import make_root
from shardcache.urls import parse_url
from shardcache.wds.attach import url_opener
from tests.support.caches import read, warnings
from tests.support.clitools import command
from tests.support.storetools import (
    begin,
    fill,
    metadata_for,
    needs_root,
    public_directory,
)
from tests.support.tars import make_tar
from tests.support.users import ANNA, BELA, ask

URL, SHARD = "s3://lab/a.tar", make_tar(1)
#: Of several blocks, so that a killed download of it can be resumed.
BIG_URL, BIG = "s3://lab/big.tar", make_tar(2, 700, 3000)
TOKEN = "0" * 32


REFUSED = {
    "pipe:touch {marker}; cat {marker}": "allow_schemes=['pipe']",
    "shardcache::pipe:touch {marker}": "allow_schemes=['pipe']",
    "filecache::pipe:touch {marker}": "chain",
    "gs://AK:SECRET@lab/a.tar": "storage_options",
    "s3://lab/\x1b[2J.tar": "control character",
}


@pytest.mark.parametrize("url", REFUSED)
def test_a_url_is_refused_in_every_way_in_and_nothing_is_run(tmp_path: Path, url: str) -> None:
    marker = tmp_path / "marker"
    text, fix = url.format(marker=marker), REFUSED[url]
    with Cache(tmp_path / "cache", min_free=0) as cache:
        ways = [cache.open, cache.fetch, cache.path]
        ways.append(lambda url: list(url_opener([{"url": url}], cache=cache)))
        # WebDataset's "::" joins several shards, and prewarm reads its specs as WebDataset does.
        if "::" not in text:
            ways.append(cache.prewarm)
        said = []
        for way in ways:
            with pytest.raises(ConfigError, match=re.escape(fix)) as caught:
                way(text)
            said.append(str(caught.value))
    code, text = command("--dir", tmp_path / "cache", "path", "--fetch", text)
    assert code == 2 and (fix in text or "::" in url) and not marker.exists()
    assert not any("SECRET" in each or "\x1b" in each for each in [*said, text])


def fetch_in(root: Path) -> str:
    """What is said of a root; nothing if it is used."""
    try:
        with Cache(root, min_free=0, cache_local=True) as cache:
            cache.fetch(str(root.parent / "origin.tar"))
    except ConfigError as exn:
        return str(exn)
    return ""


def directory(uid: int, mode: int, fix: str) -> Callable[[Path], str]:
    def make(root: Path) -> str:
        root.mkdir()
        os.chown(root, uid, uid)
        root.chmod(mode)
        return fix.format(root=root)

    return make


def cache_of_a_group(root: Path) -> str:
    make_root(root, "1")
    for path in (root, *root.rglob("*")):
        os.chown(path, ANNA.uid, ANNA.uid)
    root.chmod(0o770)
    return f"chmod g-w {root}"


ROOTS = {
    "foreign": directory(BELA.uid, 0o755, "use a directory of your own"),
    "writable": directory(ANNA.uid, 0o1777, "below it, such as {root}/shards"),
    "group-writable": directory(ANNA.uid, 0o770, "chmod g-w {root}"),
    "a cache that its group may write": cache_of_a_group,
    "a file": lambda root: root.touch() or "point dir at a directory",
}


@needs_root
@pytest.mark.parametrize("kind", ROOTS)
def test_a_root_that_others_could_tamper_with_is_refused_with_the_fix(tmp_path, kind):
    (tmp_path / "origin.tar").write_bytes(SHARD)
    assert fetch_in(tmp_path / "cache") == ""  # all code is loaded, before users change
    with public_directory() as public:
        public.chmod(0o1777)
        (public / "origin.tar").write_bytes(SHARD)
        root = public / "cache"
        fix = ROOTS[kind](root)
        before = {p: p.lstat().st_mtime_ns for p in public.rglob("*")}
        said = ask(ANNA, fetch_in, root)
        assert fix in said and str(root) in said
        for arguments in (("clean", "--all", "-y"), ("rm", "-y", "s3://lab/a.tar")):
            assert ask(ANNA, lambda a=arguments: command("--dir", root, *a))[0] != 0
        assert {p: p.lstat().st_mtime_ns for p in public.rglob("*")} == before


def test_nothing_that_is_not_ours_is_ever_removed(tmp_path: Path, make_cache, origin) -> None:
    origin.objects[URL], cache = SHARD, make_cache()
    entry, layout = cache.fetch(URL), Layout.of_root(cache.dir)
    names: list[str | bytes] = ["model.ckpt", "results.csv", ".hidden", "-rf", "a\nb", "\x1b[2J",
             "\u202e", "x" * 255, b"\xff\xfe", "~", "*", "0" * 31, "0" * 33,
             "G" * 32, f"{entry.path.name}.bak", f"{entry.key}.lock.orig", "evict.x", "progress",
             ".starting-", f"evict.{'0' * 32}.{'0' * 31}", "0" * 32 + ".session~"]  # fmt: skip
    places = [cache.dir, layout.base, layout.objects, layout.partial]
    places += [layout.locks, layout.sessions, layout.ranks, entry.path.parent]
    places += [entry.path.parent.parent, layout.key_lock(entry.key).parent]
    kept = []
    for place in places:
        (place / "checkpoints").mkdir(parents=True)
        kept += [place / os.fsdecode(name) for name in names]
        kept.append(place / "checkpoints" / "model.ckpt")
    for path in kept:
        path.write_bytes(b"precious")
    for _ in range(2):
        cache.clean(everything=True)
        cache.remove(URL)
        assert command("--dir", cache.dir, "clean", "--all", "-y")[0] == 0
        assert command("--dir", cache.dir, "clean", "--orphans")[0] == 0
        with cache.open(URL) as stream:
            assert stream.read() == SHARD
    for path in kept:
        assert path.read_bytes() == b"precious", path


def test_a_cache_that_lost_its_manifest_is_not_touched(tmp_path: Path, make_cache, origin) -> None:
    origin.objects[URL], cache = SHARD, make_cache()
    data = cache.fetch(URL).data
    (cache.dir / MANIFEST).unlink()
    (tmp_path / "x").mkdir()
    for directory in (cache.dir, tmp_path / "x" / ".." / "cache"):  # the same place, said otherwise
        for arguments in (("clean", "--all", "-y"), ("clean", "--orphans"), ("rm", "-y", URL)):
            code, said = command("--dir", directory, *arguments)
            assert code == 2 and "is not a shardcache directory" in said
    assert data.read_bytes() == SHARD


# -- files of other programs ------------------------------------------------------------------


def killed_download(layout: Layout) -> Path:
    """What a killed process leaves of `BIG`; the next reader resumes it."""
    etag = f'"{hashlib.md5(BIG).hexdigest()}"'  # as the origin states it
    partial = begin(layout, metadata_for(BIG_URL, BIG, etag=etag))
    fill(partial, BIG, range(1))
    partial.close()
    lock = KeyLock(layout.key_lock(partial.metadata.key))
    assert lock.try_acquire(Holder(4711, "node-7", 0, "job", 1.0, partial=partial.path.name))
    lock.release()
    return partial.path


@pytest.mark.parametrize("content", [b"precious" * 100, b""], ids=["precious", "empty"])
@pytest.mark.parametrize("link", [os.link, os.symlink])
@pytest.mark.parametrize(
    "name",
    [
        *("{lock}", "locks/budget.lock", "locks/clean.lock", "usage", "limits", "pins/{key}.pin"),
        *("stats.db", "stats.db-journal", "stats.db-wal"),
    ],
)
def test_nothing_is_written_through_a_link(
    make_cache, origin, tmp_path, caplog, name, link, content
):
    origin.objects.update({URL: SHARD, BIG_URL: BIG})
    with make_cache() as earlier:
        earlier.fetch(BIG_URL)
        earlier.pin(URL)
    cache = make_cache(max_size="10MB")
    layout, key = Layout.of_root(cache.dir), parse_url(URL).key
    path = layout.base / name.format(lock=layout.key_lock(key), key=key)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    victim = tmp_path / "thesis.txt"
    victim.write_bytes(content)
    link(victim, path)
    assert read(cache, URL) == SHARD
    cache.close()
    command("--dir", cache.dir, "clean")
    assert victim.read_bytes() == content
    if name in ("{lock}", "locks/budget.lock"):
        [warning] = warnings(caplog)
        assert f"is streamed, not cached: {path}: " in warning


@pytest.mark.parametrize("name", ["big.tar", PROGRESS])
def test_a_download_is_not_resumed_in_a_file_that_has_another_name(
    make_cache, origin, tmp_path, name
):
    origin.objects[BIG_URL], cache = BIG, make_cache()
    path = killed_download(Layout.of_root(cache.dir)) / name
    victim = tmp_path / "thesis.txt"
    victim.write_bytes(content := path.read_bytes())
    path.unlink()
    os.link(victim, path)
    assert read(cache, BIG_URL) == BIG and cache.path(BIG_URL)
    assert victim.read_bytes() == content
