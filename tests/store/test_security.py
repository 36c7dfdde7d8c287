"""What is refused, and what is never followed, written through or waited for.

As the machine's superuser, whom no permission stops: what is spared here is spared because
the code does not touch it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcache import Cache, ConfigError
from shardcache.layout import MANIFEST, Layout
from shardcache.store.root import make_root
from shardcache.wds.attach import url_opener
from tests.support.clitools import command
from tests.support.storetools import needs_root, public_directory
from tests.support.tars import make_tar
from tests.support.users import ANNA, BELA, ask

URL, SHARD = "s3://lab/a.tar", make_tar(1)


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
