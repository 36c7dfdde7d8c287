"""What is refused, and what is never followed, written through or waited for.

As the machine's superuser, whom no permission stops: what is spared here is spared because
the code does not touch it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardcache import Cache, ConfigError
from shardcache.cli.main import main
from shardcache.layout import MANIFEST, META, PROGRESS, Layout
from shardcache.store.root import make_root
from shardcache.wds.attach import url_opener
from tests.support.storetools import (
    needs_root,
    public_directory,
)
from tests.support.tars import make_tar
from tests.support.users import ANNA, BELA, ask

SHARDS = {"a.tar": make_tar(1), "b.tar": make_tar(2)}
MIB = 1 << 20


def command(*arguments: object, **environment: str) -> tuple[int, str]:
    """Exit code and all output of a run of the command line."""
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SHARDCACHE_MIN_FREE": "0", **environment}.items():
            patch.setenv(name, value)
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            code = main([str(argument) for argument in arguments])
    assert "Traceback" not in text.getvalue()
    return code, text.getvalue()


# -- URLs ----------------------------------------------------------------------

REFUSED = {
    "pipe:touch {marker}; cat {marker}": "allow_schemes=['pipe']",
    "PIPE: touch {marker}": "allow_schemes=['pipe']",
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
        ways: list[Callable[[], Any]] = [
            lambda: cache.open(text),
            lambda: cache.fetch(text),
            lambda: cache.path(text),
            lambda: list(url_opener([{"url": text}], cache=cache)),
        ]
        # WebDataset's "::" joins several shards, and prewarm reads its specs as WebDataset does.
        if "::" not in text:
            ways.append(lambda: cache.prewarm([text]))
        for way in ways:
            with pytest.raises(ConfigError) as caught:
                way()
            assert fix in str(caught.value)
            assert "SECRET" not in str(caught.value) and "\x1b" not in str(caught.value)
    code, said = command("--dir", tmp_path / "cache", "path", "--fetch", text)
    assert code == 2 and "SECRET" not in said and "\x1b" not in said
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    ["../../../etc/passwd", "a/../../b.tar", "/etc/passwd", "a//b//", "meta.json", "progress",
     ".hidden", "-rf", "a" * 900, "\u202e.tar", "a\\b:c*?.tar"],
)  # fmt: skip
def test_no_key_leaves_its_place(tmp_path: Path, name: str, origin, make_cache) -> None:
    url = f"s3://lab/{name}"
    cache = make_cache()
    key = str(cache.parse(url))
    origin.objects[key] = SHARDS["a.tar"]
    before = set(os.listdir(tmp_path))
    entry = cache.fetch(url)
    assert entry.data.read_bytes() == SHARDS["a.tar"]
    assert entry.data.resolve() == entry.data
    assert entry.data.is_relative_to(cache.dir / "v1" / "objects")
    assert len(os.fsencode(entry.data.name)) <= 126 and entry.data.name not in (META, PROGRESS)
    code, said = command("--dir", cache.dir, "ls", "--long")
    assert code == 0 and "\u202e" not in said
    assert cache.remove(url)[0] == len(SHARDS["a.tar"])
    assert set(os.listdir(tmp_path)) - before <= {"cache"}


# -- roots ---------------------------------------------------------------------


def fetch_in(root: Path) -> tuple[str, str]:
    """What Python and the command line say of a root; empty if it is used."""
    shard, said = str(root.parent / "origin.tar"), ""
    try:
        with Cache(root, min_free=0, cache_local=True) as cache:
            cache.fetch(shard)
    except ConfigError as exn:
        said = str(exn)
    code, printed = command("--dir", root, "prewarm", shard, SHARDCACHE_CACHE_LOCAL="1")
    assert code in (0, 2), printed
    return said, printed if code else ""


def directory(uid: int, mode: int, fix: str) -> Callable[[Path], str]:
    def make(root: Path) -> str:
        root.mkdir()
        os.chown(root, uid, uid)
        root.chmod(mode)
        return fix.format(root=root)

    return make


def group_writable_cache(root: Path) -> str:
    make_root(root, "1")
    for path in (root, *root.rglob("*")):
        os.chown(path, ANNA.uid, ANNA.uid)
    root.chmod(0o770)
    return f"chmod g-w {root}"


ROOTS = {
    "foreign": directory(BELA.uid, 0o755, "use a directory of your own"),
    "writable": directory(ANNA.uid, 0o1777, "below it, such as {root}/shards"),
    "group-writable": directory(ANNA.uid, 0o770, "chmod g-w {root}"),
    "a file": lambda root: root.touch() or "point dir at a directory",
    "a cache that its group may write": group_writable_cache,
}


@needs_root
@pytest.mark.parametrize("kind", ROOTS)
def test_a_root_that_others_could_tamper_with_is_refused_with_the_fix(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "origin.tar").write_bytes(SHARDS["a.tar"])
    assert fetch_in(tmp_path / "cache") == ("", "")  # all code is loaded, before users change
    with public_directory() as public:
        public.chmod(0o1777)
        (public / "origin.tar").write_bytes(SHARDS["a.tar"])
        root = public / "cache"
        fix = ROOTS[kind](root)
        before = {p: p.lstat().st_mtime_ns for p in public.rglob("*")}
        for said in ask(ANNA, fetch_in, root):
            assert fix in said and str(root) in said
        for arguments in (("clean", "--all", "-y"), ("rm", "-y", "s3://lab/a.tar")):
            assert ask(ANNA, lambda a=arguments: command("--dir", root, *a))[0] != 0
        assert {p: p.lstat().st_mtime_ns for p in public.rglob("*")} == before


# -- what a damaged or hostile record may say ------------------------------------


def entry_of(make_cache, origin, url: str = "s3://lab/a.tar"):
    origin.objects[url] = SHARDS["a.tar"]
    cache = make_cache()
    return cache, cache.fetch(url), url


HOSTILE: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "another size": lambda r: json.dumps({**r, "size": 1}).encode(),
    "another type": lambda r: json.dumps({**r, "url": 1}).encode(),
    "deep": lambda r: b"[" * 60_000,
    "huge": lambda r: json.dumps({**r, "url": "a" * 20_000_000}).encode(),
    "the next schema": lambda r: json.dumps({**r, "schema": 2}).encode(),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_sidecar_is_a_miss_and_is_replaced(make_cache, origin, kind: str) -> None:
    cache, entry, url = entry_of(make_cache, origin)
    sidecar = entry.path / META
    sidecar.write_bytes(HOSTILE[kind](json.loads(sidecar.read_bytes())))
    code, said = command("--dir", cache.dir, "ls", "--json")
    assert code == 0 and json.loads(said)["shards"][0]["state"] == "damaged"
    again, before = make_cache(), len(origin.requests)
    for _ in range(2):
        with again.open(url) as stream:
            assert stream.read() == SHARDS["a.tar"]
    assert len(origin.requests) == before + 1
    assert json.loads(sidecar.read_bytes())["url"] == url


# -- what is not ours --------------------------------------------------------------


def test_nothing_that_is_not_ours_is_ever_removed(tmp_path: Path, make_cache, origin) -> None:
    cache, entry, url = entry_of(make_cache, origin)
    layout = Layout.of_root(cache.dir)
    names: list[str | bytes] = ["model.ckpt", "results.csv", ".hidden", "-rf", "a\nb", "\x1b[2J",
             "\u202e", "x" * 255, b"\xff\xfe", "~", "*", "0" * 31, "0" * 33,
             "G" * 32, f"{entry.path.name}.bak", f"{entry.key}.lock.orig", "evict.x", "progress",
             ".starting-", f"evict.{'0' * 32}.{'0' * 31}", "0" * 32 + ".session~"]  # fmt: skip
    places = [cache.dir, layout.base, layout.objects, layout.partial]
    places += [layout.locks, layout.sessions, layout.ranks, entry.path.parent]
    places += [entry.path.parent.parent, layout.key_lock(entry.key).parent]
    kept = []
    for place in places:
        place.mkdir(exist_ok=True)
        for name in names:
            kept.append(os.path.join(os.fsencode(place), os.fsencode(name)))
            with contextlib.suppress(FileExistsError), open(kept[-1], "xb") as file:
                file.write(b"precious")
        directory = place / "checkpoints"
        directory.mkdir()
        (directory / "model.ckpt").write_bytes(b"precious")
        kept.append(os.fsencode(directory / "model.ckpt"))
    for _ in range(2):
        cache.clean(everything=True)
        cache.remove(url)
        assert command("--dir", cache.dir, "clean", "--all", "-y")[0] == 0
        assert command("--dir", cache.dir, "clean", "--orphans")[0] == 0
        with cache.open(url) as stream:
            assert stream.read() == SHARDS["a.tar"]
    for path in kept:
        with open(path, "rb") as file:
            assert file.read() == b"precious", path


def test_a_directory_without_our_manifest_is_not_touched(
    tmp_path: Path, make_cache, origin
) -> None:
    cache, _, url = entry_of(make_cache, origin)
    (cache.dir / MANIFEST).unlink()
    (tmp_path / "x").mkdir()
    before = sorted(cache.dir.rglob("*.tar"))
    for directory in (cache.dir, tmp_path / "x" / ".." / "cache"):  # the same place, said otherwise
        for arguments in (("clean", "--all", "-y"), ("clean", "--orphans"), ("rm", "-y", url)):
            code, said = command("--dir", directory, *arguments)
            assert code == 2 and "is not a shardcache directory" in said
    assert sorted(cache.dir.rglob("*.tar")) == before != []
