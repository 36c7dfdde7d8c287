"""The shim is a filesystem: what fails on it is a fault that was asked for, or the cache's."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import random
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stress.fuse.shim import Shim, mounted, needs_fuse
from tests.support.storetools import Parent, crowd, forked, wait_until


@pytest.fixture(scope="module", autouse=True)
def _fuse() -> None:
    needs_fuse()


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Shim]:
    with mounted(tmp_path) as found:
        yield found


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """What a call said: its value, or its errno by name."""
    try:
        return function(*args)
    except OSError as exn:
        return errno.errorcode[exn.errno or 0]


# -- like a plain directory ----------------------------------------------------------


class Twins:
    """The same operations on two directories; whatever they say must be the same.

    Args:
        roots: the two.
        seed: of the sequence.
    """

    def __init__(self, roots: tuple[Path, Path], seed: int) -> None:
        self.roots = roots
        self.chance = random.Random(seed)
        self.fds: list[tuple[int, int]] = []
        self.done: list[str] = []

    def name(self) -> str:
        directory = self.chance.choice(["", "d0/", "d1/", "d0/d2/"])
        return directory + self.chance.choice(["f0", "f1", "f2", "f3", "d0", "d1", "d2", "s0"])

    def run(self, steps: int) -> None:
        operations = [getattr(self, name) for name in dir(Twins) if name.startswith("do_")]
        for _ in range(steps):
            operation = self.chance.choice(operations)
            call, told = operation()
            self.done.append(told)
            first, second = (outcome(call, index) for index in (0, 1))
            assert first == second, (self.done[-20:], first, second)
        for pair in self.fds:
            self.compare(pair)
            for fd in pair:
                os.close(fd)
        assert self.tree(0) == self.tree(1), self.done[-20:]

    def compare(self, pair: tuple[int, int]) -> None:
        """Two open files, whatever became of their names."""
        found = [os.fstat(fd) for fd in pair]
        assert found[0].st_size == found[1].st_size and found[0].st_nlink == found[1].st_nlink
        with contextlib.suppress(OSError):  # opened for writing only
            first, second = (os.pread(fd, 1 << 20, 0) for fd in pair)
            assert first == second, self.done[-20:]

    def tree(self, index: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path in sorted(self.roots[index].rglob("*")):
            looks = path.lstat()
            name = str(path.relative_to(self.roots[index]))
            found[name] = [looks.st_mode, looks.st_nlink]
            if stat.S_ISREG(looks.st_mode):
                found[name] += [looks.st_size, looks.st_mtime_ns if looks.st_mtime < 10**9 else 0]
                found[name] += [path.read_bytes() if looks.st_mode & 0o400 else b""]
            elif stat.S_ISLNK(looks.st_mode):
                found[name].append(os.readlink(path))
        return found

    def on_path(self, function: Callable[[Path], Any], *, told: str) -> Any:
        name = self.name()
        return lambda i: function(self.roots[i] / name), f"{told} {name}"

    def on_two(self, function: Callable[[Path, Path], Any], *, told: str) -> Any:
        one, two = self.name(), self.name()
        return (
            lambda i: function(self.roots[i] / one, self.roots[i] / two),
            f"{told} {one} {two}",
        )

    def on_fd(self, function: Callable[[int], Any], *, told: str) -> Any:
        if not self.fds:
            return self.do_open()
        number = self.chance.randrange(len(self.fds))
        return lambda i: function(self.fds[number][i]), f"{told} #{number}"

    def do_open(self) -> Any:
        name = self.name()
        flags = self.chance.choice([os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR])
        for extra in (os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND, os.O_NOFOLLOW):
            flags |= extra if self.chance.random() < 0.4 else 0
        mode = self.chance.choice([0o600, 0o644, 0o400])
        opened: list[int] = []

        def call(index: int) -> str:
            opened.append(os.open(self.roots[index] / name, flags, mode))
            if index == 1 and len(opened) == 2:
                self.keep((opened[0], opened[1]))
            return "opened"

        return call, f"open {name} {flags:o}"

    def keep(self, pair: tuple[int, int]) -> None:
        self.fds.append(pair)
        if len(self.fds) > 8:
            old = self.fds.pop(self.chance.randrange(len(self.fds)))
            self.compare(old)
            for fd in old:
                os.close(fd)

    def do_write(self) -> Any:
        data = self.chance.randbytes(self.chance.choice([1, 100, 5000, 200_000]))
        at = self.chance.randrange(100_000)
        return self.on_fd(lambda fd: os.pwrite(fd, data, at), told=f"pwrite {len(data)} at {at}")

    def do_append(self) -> Any:
        data = self.chance.randbytes(50)
        return self.on_fd(lambda fd: os.write(fd, data), told="write")

    def do_read(self) -> Any:
        size, at = self.chance.randrange(1, 300_000), self.chance.randrange(150_000)
        return self.on_fd(lambda fd: os.pread(fd, size, at), told=f"pread {size} at {at}")

    def do_map(self) -> Any:
        return self.on_fd(_mapped, told="mmap")

    def do_ftruncate(self) -> Any:
        size = self.chance.randrange(200_000)
        return self.on_fd(lambda fd: os.ftruncate(fd, size), told=f"ftruncate {size}")

    def do_fsync(self) -> Any:
        return self.on_fd(os.fsync, told="fsync")

    def do_fchmod(self) -> Any:
        return self.on_fd(lambda fd: os.fchmod(fd, 0o640), told="fchmod")

    def do_fstat(self) -> Any:
        return self.on_fd(lambda fd: _looks(os.fstat(fd)), told="fstat")

    def do_stat(self) -> Any:
        return self.on_path(lambda path: _looks(path.stat()), told="stat")

    def do_truncate(self) -> Any:
        return self.on_path(lambda path: os.truncate(path, 77), told="truncate")

    def do_mkdir(self) -> Any:
        return self.on_path(lambda path: path.mkdir(), told="mkdir")

    def do_rmdir(self) -> Any:
        return self.on_path(lambda path: path.rmdir(), told="rmdir")

    def do_unlink(self) -> Any:
        return self.on_path(lambda path: path.unlink(), told="unlink")

    def do_symlink(self) -> Any:
        return self.on_path(lambda path: path.symlink_to("f1"), told="symlink")

    def do_readlink(self) -> Any:
        return self.on_path(os.readlink, told="readlink")

    def do_chmod(self) -> Any:
        return self.on_path(lambda path: path.chmod(0o600), told="chmod")

    def do_utime(self) -> Any:
        return self.on_path(lambda path: os.utime(path, ns=(5 * 10**9, 7 * 10**9 + 3)), told="ut")

    def do_list(self) -> Any:
        return self.on_path(lambda path: sorted(os.listdir(path.parent)), told="list")

    def do_rename(self) -> Any:
        return self.on_two(lambda one, two: one.rename(two) and None, told="rename")

    def do_link(self) -> Any:
        return self.on_two(lambda one, two: os.link(one, two), told="link")


def _mapped(fd: int) -> bytes:
    size = min(os.fstat(fd).st_size, 70_000)
    if size == 0:
        return b""
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as view:
        return bytes(view)


def _looks(found: os.stat_result) -> tuple[int, int, int]:
    size = found.st_size if stat.S_ISREG(found.st_mode) else 0
    return found.st_mode, found.st_nlink, size


def twins(shim: Shim, tmp_path: Path, name: str) -> tuple[Path, Path]:
    roots = (shim.root / name, tmp_path / "plain" / name)
    for root in roots:
        root.mkdir(parents=True)
    return roots


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_says_and_holds_what_a_plain_directory_does(
    shim: Shim, tmp_path: Path, seed: int
) -> None:
    Twins(twins(shim, tmp_path, "a"), seed).run(1200)
    wait_until(lambda: shim.ask("status")["handles"] == 0)


def test_several_processes_at_once_are_no_different(shim: Shim, tmp_path: Path) -> None:
    def work(parent: Parent, number: int) -> None:
        Twins(twins(shim, tmp_path, f"p{number}"), 100 + number).run(500)
        parent.say("same")

    with crowd(4, work) as children:
        assert [child.hear() for child in children] == ["same"] * 4


def test_times_and_owners_are_those_of_the_file_behind(shim: Shim) -> None:
    path = shim.root / "a"
    path.write_bytes(b"x" * 10_000)
    os.utime(path, ns=(3, 10**18 + 7))
    here, there = path.stat(), (shim.backing / "a").stat()
    same = ("st_ino", "st_size", "st_blocks", "st_atime_ns", "st_mtime_ns", "st_ctime_ns")
    assert [getattr(here, name) for name in same] == [getattr(there, name) for name in same]
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
        assert ((shim.backing / "a").stat().st_uid, path.stat().st_gid) == (1234, 4321)


def test_of_many_who_make_one_name_one_wins(shim: Shim) -> None:
    def work(parent: Parent, number: int) -> None:
        parent.hear()
        won = 0
        for round_number in range(30):
            with contextlib.suppress(FileExistsError):
                (shim.root / f"d{round_number}").mkdir()
                won += 1
        parent.say(won)

    with crowd(4, work) as children:
        for child in children:
            child.tell()
        assert sum(child.hear() for child in children) == 30


# -- locks ---------------------------------------------------------------------------


def takes(path: Path, operation: int) -> str:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
        return "granted"
    except OSError as exn:
        return errno.errorcode[exn.errno or 0]
    finally:
        with contextlib.suppress(OSError):  # closing asks the filesystem too
            os.close(fd)


def test_a_lock_that_works_excludes_others_until_its_holder_dies(shim: Shim) -> None:
    path = shim.root / "lock"

    def hold(parent: Parent, operation: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(fd, operation)
        parent.say("held")
        parent.hear()

    with forked(hold, fcntl.LOCK_EX) as child:
        child.hear()
        assert takes(path, fcntl.LOCK_EX) == takes(path, fcntl.LOCK_SH) == "EAGAIN"
    wait_until(lambda: takes(path, fcntl.LOCK_EX) == "granted")
    with forked(hold, fcntl.LOCK_SH) as child:
        child.hear()
        assert (takes(path, fcntl.LOCK_SH), takes(path, fcntl.LOCK_EX)) == ("granted", "EAGAIN")


def test_a_lock_lies_or_is_refused_when_told_to(shim: Shim) -> None:
    path = shim.root / "lock"
    shim.set(flock="lying")
    fds = [os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(3)]
    for fd in fds:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
    for number in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
        shim.set(flock="refused", flock_error=number)
        assert takes(path, fcntl.LOCK_EX) == errno.errorcode[number]
    shim.heal()
    assert takes(path, fcntl.LOCK_EX) == "granted"


@pytest.mark.parametrize("killable", [True, False])
def test_a_lock_that_hangs_is_answered_when_it_is_let_go(shim: Shim, killable: bool) -> None:
    shim.set(flock="hanging", killable=killable)

    def ask(parent: Parent) -> None:
        parent.say(takes(shim.root / "lock", fcntl.LOCK_EX))

    with forked(ask) as child:
        wait_until(lambda: shim.hanging() == 1)
        os.kill(child.pid, signal.SIGKILL)
        if killable:
            assert child.wait() == -signal.SIGKILL
            assert shim.hanging() == 0
        else:  # as with a dead server behind FUSE: not even a kill ends it
            time.sleep(0.3)
            assert os.waitpid(child.pid, os.WNOHANG) == (0, 0)
            shim.heal()
            child.wait()


def test_whatever_hangs_ends_with_the_mount(tmp_path: Path) -> None:
    def ask(parent: Parent, path: Path) -> None:
        parent.say(takes(path / "lock", fcntl.LOCK_EX))

    with mounted(tmp_path) as shim:
        shim.set(flock="hanging", killable=False)
        with contextlib.ExitStack() as stack:
            child = stack.enter_context(forked(ask, shim.root))
            wait_until(lambda: shim.hanging() == 1)
            shim.close()
            assert child.hear() in ("ENOTCONN", "ECONNABORTED", "EIO")
    assert os.listdir(shim.root) == []


# -- faults --------------------------------------------------------------------------


@pytest.mark.parametrize("times", [2, -1])
def test_a_stale_handle_is_seen_once_or_always(shim: Shim, times: int) -> None:
    path = shim.root / "d" / "a"
    path.parent.mkdir()
    path.write_bytes(b"data")
    rule = shim.fail("open", "d/*", error=errno.ESTALE, times=times)
    assert outcome(path.read_bytes) == "ESTALE"
    assert outcome(path.read_bytes) == (b"data" if times > 0 else "ESTALE")
    assert shim.struck(rule) == (2 if times > 0 else 4)  # the kernel asks twice


def test_an_error_of_a_read_reaches_the_reader_as_it_is(shim: Shim) -> None:
    (shim.root / "a").write_bytes(b"data")
    (shim.root / "b").write_bytes(b"data")
    for number in (errno.ESTALE, errno.EIO):
        shim.fail("read", "a", error=number)
        assert outcome((shim.root / "a").read_bytes) == errno.errorcode[number]
    assert (shim.root / "a").read_bytes() == (shim.root / "b").read_bytes() == b"data"


def test_what_is_done_stays_done_when_its_answer_is_lost(shim: Shim) -> None:
    root = shim.root
    (root / "file").write_bytes(b"x")
    deeds: dict[str, tuple[Callable[[], Any], Callable[[], bool]]] = {
        "mkdir": (lambda: (root / "d").mkdir(), lambda: (root / "d").is_dir()),
        "link": (lambda: os.link(root / "file", root / "l"), lambda: (root / "l").is_file()),
        "create": (lambda: (root / "c").write_bytes(b""), lambda: (root / "c").is_file()),
        "rename": (lambda: (root / "l").rename(root / "r"), lambda: (root / "r").is_file()),
        "unlink": (lambda: (root / "r").unlink(), lambda: not (root / "r").exists()),
        "rmdir": (lambda: (root / "d").rmdir(), lambda: not (root / "d").exists()),
    }
    for op, (deed, done) in deeds.items():
        shim.fail(op, error=errno.ETIMEDOUT, done=True)
        assert (outcome(deed), done()) == ("ETIMEDOUT", True), op
    wait_until(lambda: shim.ask("status")["handles"] == 0)


def test_a_fault_may_come_without_the_deed_and_after_a_while(shim: Shim) -> None:
    shim.fail("mkdir", "[bc]", error=errno.EEXIST, skip=1)
    for name in "abc":
        said = outcome((shim.root / name).mkdir)
        assert (said, (shim.root / name).exists()) == (
            ("EEXIST", False) if name == "c" else (None, True)
        )


# -- two nodes -----------------------------------------------------------------------


def test_what_another_node_makes_is_seen_late(shim: Shim) -> None:
    shim.set(delay=1.0)
    (shim.root / "ours").mkdir()
    assert (shim.root / "ours").is_dir()
    (shim.backing / "theirs").mkdir()
    assert not (shim.root / "theirs").exists()
    assert os.listdir(shim.root) == ["ours"]
    assert outcome((shim.root / "theirs").mkdir) == "EEXIST"  # and yet nobody can see it
    wait_until((shim.root / "theirs").exists)
    assert sorted(os.listdir(shim.root)) == ["ours", "theirs"]


def test_the_kernel_remembers_that_a_name_was_absent(shim: Shim) -> None:
    shim.set(negative=1.0)
    assert not (shim.root / "a").exists()
    (shim.backing / "a").touch()
    asked = shim.calls("lookup")
    assert not (shim.root / "a").exists()
    assert shim.calls("lookup") == asked
    wait_until((shim.root / "a").exists)


def test_what_another_node_removes_is_stale_and_what_this_one_removes_is_not(shim: Shim) -> None:
    fds = {}
    for name in ("ours", "theirs"):
        (shim.root / name).write_bytes(b"data")
        fds[name] = os.open(shim.root / name, os.O_RDONLY)
    shim.set(stale=True)
    (shim.root / "ours").unlink()
    (shim.backing / "theirs").unlink()
    assert os.pread(fds["ours"], 9, 0) == b"data" and os.fstat(fds["ours"]).st_nlink == 0
    assert outcome(lambda: os.pread(fds["theirs"], 9, 0)) == "ESTALE"
    assert outcome(lambda: os.fstat(fds["theirs"])) == "ESTALE"
    for fd in fds.values():
        os.close(fd)


def test_an_open_file_that_is_unlinked_keeps_a_silly_name_until_it_is_closed(shim: Shim) -> None:
    shim.set(silly=True)
    path = shim.root / "d" / "a"
    path.parent.mkdir()
    path.write_bytes(b"data")
    with open(path, "rb", buffering=0) as file:
        path.unlink()
        assert not path.exists() and file.read() == b"data"
        assert outcome(path.parent.rmdir) == "ENOTEMPTY"
        assert [name[:4] for name in os.listdir(path.parent)] == [".nfs"]
    wait_until(lambda: outcome(path.parent.rmdir) is None)


def test_two_mounts_are_two_nodes_of_one_filesystem(tmp_path: Path) -> None:
    with mounted(tmp_path, name="one") as one, mounted(tmp_path, name="two") as two:
        (one.root / "a").write_bytes(b"data")
        assert (two.root / "a").read_bytes() == b"data"
        fd = os.open(one.root / "a", os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert takes(two.root / "a", fcntl.LOCK_EX) == "EAGAIN"
        os.close(fd)
        wait_until(lambda: takes(two.root / "a", fcntl.LOCK_EX) == "granted")


# -- power ---------------------------------------------------------------------------


def written(root: Path, name: str, data: bytes, *, sync: bool) -> None:
    with open(root / name, "wb") as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def lost(tmp_path: Path, before: Callable[[Path], None], **failure: Any) -> dict[str, bytes]:
    """What is there after power failed."""
    with mounted(tmp_path, power=True) as shim:
        before(shim.root)
        shim.lose_power(**failure)
    with mounted(tmp_path) as shim:
        return {p.name: p.read_bytes() for p in shim.root.rglob("*") if p.is_file()}


def test_synced_bytes_survive_and_others_do_not(tmp_path: Path) -> None:
    def work(root: Path) -> None:
        written(root, "old", b"o" * 6000, sync=True)
        written(root, "new", b"n" * 6000, sync=False)
        with open(root / "old", "r+b") as file:
            file.write(b"x" * 9000)

    assert lost(tmp_path / "a", mkdir(tmp_path / "a", work)) == {
        "old": b"o" * 6000 + bytes(3000),
        "new": bytes(6000),
    }
    assert lost(tmp_path / "b", mkdir(tmp_path / "b", work), data="truncated") == {
        "old": b"o" * 6000,
        "new": b"",
    }
    kept = lost(tmp_path / "c", mkdir(tmp_path / "c", work), data="kept")
    assert kept == {"old": b"x" * 9000, "new": b"n" * 6000}
    torn = lost(tmp_path / "d", mkdir(tmp_path / "d", work), data="torn", seed=3)
    assert torn not in (kept, {"old": b"o" * 6000 + bytes(3000), "new": bytes(6000)})
    assert {len(data) for data in torn.values()} == {9000, 6000}


def mkdir(path: Path, work: Callable[[Path], None]) -> Callable[[Path], None]:
    path.mkdir()
    return work


def test_names_go_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    def work(root: Path) -> None:
        written(root, "first", b"1", sync=True)
        written(root, "second", b"2", sync=True)  # with it, the first's name
        (root / "d").mkdir()
        (root / "second").rename(root / "d" / "moved")
        (root / "first").unlink()
        written(root, "third", b"3", sync=False)
        (root / "d" / "moved").replace(root / "third")

    whole = {"third": b"2"}
    steps = [whole, {"moved": b"2", "third": b"3"}, {"moved": b"2"}, {"moved": b"2", "first": b"1"}]
    steps.append({"second": b"2", "first": b"1"})
    for names, expected in enumerate(steps):
        directory = tmp_path / str(names)
        found = lost(directory, mkdir(directory, work), data="kept", names=names)
        assert found == expected, names
    assert (tmp_path / "4" / "backing" / "d").is_dir()
    last = tmp_path / "all"
    assert lost(last, mkdir(last, work), data="kept", names=None) == steps[-1]
    assert not (last / "backing" / "d").exists()


def test_an_fsync_of_a_directory_keeps_names_and_no_bytes(tmp_path: Path) -> None:
    def work(root: Path) -> None:
        written(root, "a", b"data", sync=False)
        fd = os.open(root, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        (root / "a").rename(root / "b")

    assert lost(tmp_path, work, names=None) == {"a": bytes(4)}
