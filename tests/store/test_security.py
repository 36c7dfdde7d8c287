"""Refused roots, files of other programs, and planted links, pipes and sockets.

The tests run as root, so no permission protects a file: the code itself must not touch it.
"""

import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shardcache import Cache, ConfigError
from shardcache.layout import JOURNAL, MANIFEST
from shardcache.urls import parse_url
from tests.support.caches import read, warnings
from tests.support.clitools import command
from tests.support.disktools import needs_root, unmount
from tests.support.storetools import begin, begun, fill, layout_of, metadata_for, public_directory
from tests.support.tars import make_tar
from tests.support.users import ANNA, BELA, ask

URL, SHARD = "s3://lab/a.tar", make_tar(1)
#: A shard of several blocks, whose download can be resumed.
BIG_URL, BIG = "s3://lab/big.tar", make_tar(2, 700, 3000)
TOKEN = "0" * 32
PRECIOUS = b"precious" * 100
OBJECTS = {URL: SHARD, BIG_URL: BIG}


def fetch_in(root: Path) -> str:
    """Fetch and evict a shard; returns the error message for a root that is not accepted."""
    try:
        with Cache(root, min_free=0, cache_local=True, max_size="1MB", policy="lru") as cache:
            cache.fetch(str(root.parent / "origin.tar"))
            assert cache.clean(max_size=1).removed
    except ConfigError as exn:
        return str(exn)
    return ""


@pytest.fixture
def public(tmp_path: Path) -> Iterator[Path]:
    """A directory with a shard in which every user may write, such as /tmp."""
    (tmp_path / "origin.tar").write_bytes(SHARD)
    assert fetch_in(tmp_path / "cache") == ""  # imports all modules before the user changes
    with public_directory() as found:
        found.chmod(0o1777)
        (found / "origin.tar").write_bytes(SHARD)
        yield found


def directory(uid: int, mode: int, fix: str) -> Callable[[Path], str]:
    def make(root: Path) -> str:
        root.mkdir()
        os.chown(root, uid, uid)
        root.chmod(mode)
        return fix.format(root=root)

    return make


def cache_of_another_user(root: Path) -> str:
    assert ask(BELA, fetch_in, root, umask=0o022) == ""
    root.chmod(0o755)
    return "Use a directory of your own"


ROOTS = {
    "foreign": directory(BELA.uid, 0o755, "Use a directory of your own"),
    "writable": directory(ANNA.uid, 0o1777, "below it, such as {root}/shards"),
    "group-writable": directory(ANNA.uid, 0o770, "chmod g-w {root}"),
    "a cache of another user": cache_of_another_user,
    "a file": lambda root: root.touch() or "Set dir to a directory",
}


@needs_root
@pytest.mark.parametrize("kind", ROOTS)
def test_a_root_that_others_could_tamper_with_is_refused_with_the_fix(public, kind):
    root = public / "cache"
    fix = ROOTS[kind](root)
    before = {p: p.lstat().st_mtime_ns for p in public.rglob("*")}
    message = ask(ANNA, fetch_in, root)
    assert fix in message and str(root) in message
    for arguments in (("clean", "--all", "-y"), ("rm", "-y", "s3://lab/a.tar")):
        assert ask(ANNA, lambda a=arguments: command("--dir", root, *a))[0] != 0
    assert {p: p.lstat().st_mtime_ns for p in public.rglob("*")} == before


def test_files_of_other_programs_are_never_removed_and_hide_nothing(make_cache) -> None:
    cache = make_cache()
    entry, layout = cache.fetch(URL), layout_of(cache.dir)
    live = begun(layout, BIG_URL, BIG)
    names: list[str | bytes] = ["model.ckpt", "results.csv", ".hidden", "-rf", "a\nb", "\x1b[2J",
             "\u202e", "x" * 255, b"\xff\xfe", "~", "*", "0" * 31, "0" * 33,
             "G" * 32, f"{entry.path.name}.bak", f"{entry.key}.lock.orig", "evict.x", "progress",
             ".starting-", f"evict.{'0' * 32}.{'0' * 31}", "0" * 32 + ".session~"]  # fmt: skip
    parents = [cache.dir, layout.base, layout.objects, layout.partials]
    parents += [layout.locks, layout.sessions, layout.ranks, entry.path.parent]
    parents += [entry.path.parent.parent, layout.key_lock(entry.key).parent, live.path]
    kept = []
    for parent in parents:
        (parent / "checkpoints").mkdir(parents=True)
        kept += [parent / os.fsdecode(name) for name in (*names, "checkpoints/model.ckpt")]
    kept.remove(live.path / JOURNAL)
    for path in kept:
        path.write_bytes(b"precious")
    with cache.open(URL):  # although other names are listed before and after its data
        cache.clean(everything=True)
        assert cache.path(URL) == entry.path / "a.tar" and live.data.exists()
    for _ in range(2):
        cache.clean(everything=True)
        cache.remove(URL)
        assert command("--dir", cache.dir, "clean", "--all", "-y")[0] == 0
        assert command("--dir", cache.dir, "clean", "--orphans")[0] == 0
        assert read(cache, URL) == SHARD
    for path in kept:
        assert path.read_bytes() == b"precious", path
    live.close()


def test_a_cache_without_a_manifest_is_not_touched(make_cache) -> None:
    cache = make_cache()
    data = cache.fetch(URL).data
    (cache.dir / MANIFEST).unlink()
    for arguments in (("clean", "--all", "-y"), ("clean", "--orphans"), ("rm", "-y", URL)):
        code, text = command("--dir", cache.dir, *arguments)
        assert code == 2 and "is not a shardcache directory" in text
    assert data.read_bytes() == SHARD


def deep_tree(path: Path) -> None:
    """Make a tree that is deeper than the recursion limit of Python."""
    subprocess.run(["mkdir", "-p", path / ("d/" * (sys.getrecursionlimit() + 100))], check=True)


def full_directory(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_bytes(b"precious")


def make_socket(path: Path) -> None:
    fd = os.open(path.parent, os.O_RDONLY)
    with closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(f"/proc/self/fd/{fd}/{path.name}")  # the full path is too long
    os.close(fd)


FOREIGN: dict[str, Callable[[Path], object]] = {
    "thesis.txt": lambda path: path.write_bytes(b"precious"),
    ".hidden": lambda path: path.write_bytes(b"precious"),
    os.fsdecode(b"\xff\n"): lambda path: path.write_bytes(b"precious"),
    "samples.idx": full_directory,  # a name that shardcache uses
    "link": lambda path: path.symlink_to(path.parents[5]),
    "pipe": os.mkfifo,
    "tree": deep_tree,
}


def killed_download(layout) -> Path:
    """Make the partial of `BIG` that a killed process leaves; the next reader resumes it."""
    etag = f'"{hashlib.md5(BIG).hexdigest()}"'  # as the origin states it
    partial = begin(layout, metadata_for(BIG_URL, BIG, etag=etag))
    fill(partial, BIG, range(1))
    partial.close()
    return partial.path


WAYS: dict[str, Callable[[Cache], object]] = {
    "clean --all": lambda cache: cache.clean(everything=True),
    "rm": lambda cache: cache.remove(URL),
    "max_size": lambda cache: cache.clean(max_size=1),
    "set aside": lambda cache: (os.truncate(cache.path(URL), 1), cache.fetch(URL), cache.clean()),
    "without a sidecar": lambda cache: (
        (cache.path(URL).parent / "meta.json").write_bytes(b""),
        cache.clean(everything=True),
    ),
}


@pytest.mark.parametrize("way", [*WAYS, "partial", "without a shard"])
def test_files_of_other_programs_outlive_the_shard_beside_them(make_cache, caplog, way):
    cache = make_cache(policy="lru")
    layout = layout_of(cache.dir)
    if way == "partial":
        directory = killed_download(layout)
    elif way == "without a shard":
        (directory := layout.new_hidden(TOKEN)).mkdir()
    else:
        directory = cache.fetch(URL).path
    try:
        for name, make in FOREIGN.items():
            make(directory / name)
        WAYS.get(way, lambda cache: cache.clean(orphans=True))(cache)
        [kept] = layout.partials.glob("kept.*")
        assert set(os.listdir(kept)) - {"a.tar"} == set(FOREIGN)
        assert (way == "without a sidecar") == (kept / "a.tar").exists()
        assert (kept / "thesis.txt").read_bytes() == b"precious"
        assert (kept / "samples.idx/thesis.txt").read_bytes() == b"precious"
        [warning] = [each for each in warnings(caplog) if str(kept) in each]
        assert repr(min(FOREIGN)) in warning and "shardcache did not write" in warning
        caplog.clear()
        assert read(cache, URL) == SHARD and read(cache, BIG_URL) == BIG
        cache.clean(everything=True)
        assert cache.clean(everything=True, dry_run=True).removed == ()
        assert os.listdir(layout.partials) == [kept.name] and warnings(caplog) == []
    finally:
        subprocess.run(["rm", "-rf", layout.partials, layout.objects], check=True)


@needs_root
@pytest.mark.parametrize("at", ["mnt", "", "a.tar"])
def test_nothing_behind_a_mount_is_removed(make_cache, tmp_path, at) -> None:
    cache = make_cache()
    entry, layout = cache.fetch(URL), layout_of(cache.dir)
    aside = layout.new_hidden(entry.key)
    entry.path.rename(aside)
    home = tmp_path / "home"
    home.mkdir()
    (home / "a.tar").write_bytes(b"precious")
    where, what = aside / at, home / "a.tar" if at == "a.tar" else home
    if at == "mnt":
        where.mkdir()
    subprocess.run(["mount", "--bind", what, where], check=True)
    try:
        for _ in range(2):
            assert command("--dir", cache.dir, "clean", "--all", "-y")[0] == 0
            assert read(cache, URL) == SHARD
        assert (home / "a.tar").read_bytes() == b"precious"
    finally:
        for path in (where, *layout.partials.glob("kept.*/*")):
            unmount(path)


@pytest.mark.parametrize(
    ("link", "content"), [(os.link, PRECIOUS), (os.link, b""), (os.symlink, PRECIOUS)]
)
@pytest.mark.parametrize(
    "name",
    [
        *("{lock}", "locks/budget.lock", "locks/clean.lock", "usage", "limits", "pins/{key}.pin"),
        *("stats.db", "stats.db-journal", "stats.db-wal", "locks/downloads.lock"),
    ],
)
def test_link_targets_are_not_written(make_cache, tmp_path, caplog, name, link, content):
    with make_cache() as earlier:
        earlier.fetch(BIG_URL)
        earlier.pin(URL)
    cache = make_cache(max_size="10MB")
    layout, key = layout_of(cache.dir), parse_url(URL).key
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


@pytest.mark.parametrize("name", ["big.tar", JOURNAL])
@pytest.mark.parametrize("harm", ["linked", "huge"])
def test_a_linked_or_huge_partial_is_not_used(make_cache, tmp_path, name, harm):
    cache = make_cache()
    path = killed_download(layout_of(cache.dir)) / name
    victim, content = tmp_path / "thesis.txt", path.read_bytes()
    if harm == "linked":
        victim.write_bytes(content)
        path.unlink()
        os.link(victim, path)
    else:
        os.truncate(path, 1 << 43)
    assert read(cache, BIG_URL) == BIG and cache.path(BIG_URL).stat().st_size == len(BIG)
    assert harm == "huge" or victim.read_bytes() == content


def json_bomb(path: Path) -> None:
    path.write_bytes(b"[" * 60_000)


PLANTED: list[tuple[str, Callable[[Path], object]]] = [
    ("{lock}", json_bomb),
    ("{lock}", os.mkfifo),
    ("locks/budget.lock", json_bomb),
    ("locks/clean.lock", json_bomb),
    ("locks/downloads.lock", os.mkfifo),
    ("usage", json_bomb),
    ("limits", json_bomb),
    ("limits", full_directory),
    (f"pins/{TOKEN}.pin", json_bomb),
    ("stats.db-journal", os.mkfifo),
    (f"sessions/{TOKEN}.session", make_socket),
    (f"sessions/{TOKEN}.session", full_directory),
    (f"sessions/{TOKEN}.session", lambda path: path.symlink_to("nowhere")),
    ("sessions/job.streamed", full_directory),
    (f"partial/{TOKEN}.{TOKEN[:24]}-5.{TOKEN}", deep_tree),
]


@pytest.mark.parametrize(("name", "make"), PLANTED)
def test_planted_files_disturb_no_read_and_no_clean(make_cache, origin, name, make):
    urls = [URL, "s3://lab/b.tar", "s3://lab/c.tar"]
    origin.objects.update(dict.fromkeys(urls, SHARD))
    with make_cache() as earlier:
        for url in urls[1:]:
            earlier.fetch(url)
    cache = make_cache(max_size=2 * len(SHARD), policy="lru")  # the third shard needs room
    layout = layout_of(cache.dir)
    path = layout.base / name.format(lock=layout.key_lock(parse_url(URL).key))
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)
    try:
        assert read(cache, URL) == SHARD and cache.path(URL) is not None
        cache.close()
        for arguments in (("ls",), ("clean",), ("clean", "--all", "-y")):
            assert command("--dir", cache.dir, *arguments)[0] == 0
    finally:
        subprocess.run(["rm", "-rf", layout.partials], check=True)


@needs_root
def test_directories_of_another_user_do_not_prevent_caching(public: Path) -> None:
    assert ask(ANNA, fetch_in, public / "cache") == ""
    layout = layout_of(public / "cache")
    for parent in (layout.objects, layout.objects / TOKEN[:2]):
        (parent / TOKEN).mkdir(mode=0o700, parents=True)
    layout.new_hidden(TOKEN).mkdir(mode=0o700)
    assert ask(ANNA, fetch_in, public / "cache") == ""


def test_an_entry_behind_a_link_is_a_miss(make_cache, origin, tmp_path):
    origin.objects[URL] = SHARD
    key_dir = make_cache().fetch(URL).path.parent
    key_dir.rename(tmp_path / "elsewhere")
    key_dir.symlink_to(tmp_path / "elsewhere")
    assert make_cache().path(URL) is None
