"""Locks: exclusive while held, free at death, never in the way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import stat
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from shardcache import files as descriptors
from shardcache.files import Modes, disown, dup_owned, open_owned
from shardcache.locks import flock as locks
from shardcache.locks.flock import (
    Holder,
    KeyLock,
    is_file,
    lock_exclusive,
    lock_shared,
    pin,
    read_holder,
    seize,
)
from tests.support.storetools import Parent, crowd, forked, no_descriptor_left, refusing, wait_until

ME = Holder.this_process(rank=3, job="job", now=12.5)


def free(path: Path) -> bool:
    """Whether somebody else could take the lock now."""
    lock = KeyLock(path)
    found = lock.try_acquire(ME)
    lock.release()
    return found


def unheld(path: Path) -> bool:
    """As `free`, for a file that is locked as a whole; creates and leaves nothing."""
    fd = os.open(path, os.O_RDWR)
    try:
        return lock_exclusive(fd)
    finally:
        os.close(fd)


# -- flock ---------------------------------------------------------------------


@pytest.mark.locks_work("flock")
def test_a_shared_lock_admits_readers_and_no_evictor(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.touch()
    fds = [os.open(path, os.O_RDONLY) for _ in range(3)]
    try:
        assert lock_shared(fds[0]) and lock_shared(fds[1])
        assert not lock_exclusive(fds[2])
        os.close(fds.pop(0))
        assert not lock_exclusive(fds[1])
        os.close(fds.pop(0))
        assert lock_exclusive(fds[0])
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.locks_work("flock")
def test_who_evicts_sees_at_once_that_somebody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    path = tmp_path / "data"
    path.touch()
    with open(path, "rb") as reader, open(path, "rb") as evictor:
        assert seize(evictor.fileno(), path) is True
        fcntl.flock(evictor, fcntl.LOCK_UN)
        assert pin(reader.fileno(), str(path))
        assert seize(evictor.fileno(), path) is False
        assert naps == []


@pytest.mark.locks_work("flock")
def test_who_meets_an_evictor_waits_for_a_moment_and_no_longer_than_there_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    path = tmp_path / "data"
    path.touch()
    with open(path, "rb") as evictor, open(path, "rb") as other:
        assert lock_exclusive(evictor.fileno())
        assert not pin(other.fileno(), str(path))
        assert 0 < sum(naps) < 0.1
        naps.clear()
        assert seize(other.fileno(), path) is False
        assert 0 < sum(naps) < 0.1
        naps.clear()
        path.unlink()
        assert not pin(other.fileno(), str(path))
        with pytest.raises(FileNotFoundError):
            seize(other.fileno(), path)
        assert naps == []


def test_a_file_is_that_of_a_path_only_while_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "entry" / "data"
    path.parent.mkdir()
    path.touch()
    with open(path, "rb") as file:
        assert is_file(path, file.fileno())
        path.unlink()
        assert not is_file(path, file.fileno())
        path.touch()
        assert not is_file(path, file.fileno())
        path.unlink()
        path.parent.rmdir()
        path.parent.touch()  # now it leads through a file
        assert not is_file(path, file.fileno())


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_filesystem_without_flock_grants_every_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(number, real=fcntl.flock))
    path = tmp_path / "aa" / "key.lock"
    one, other = KeyLock(path), KeyLock(path)
    with no_descriptor_left():
        assert one.try_acquire(ME) and other.try_acquire(ME)
        one.update(ME)
        one.release()
        other.release()
    assert lock_shared(0) and lock_exclusive(0)


@pytest.mark.parametrize("number", [errno.EWOULDBLOCK, errno.EACCES])
def test_contention_has_two_spellings(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(number, real=fcntl.flock))
    assert not lock_shared(0) and not lock_exclusive(0)


def test_any_other_answer_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(errno.EIO, real=fcntl.flock))
    for function in (lock_shared, lock_exclusive):
        with pytest.raises(OSError) as caught:
            function(0)
        assert caught.value.errno == errno.EIO
    with no_descriptor_left(), pytest.raises(OSError):
        KeyLock(tmp_path / "key.lock").try_acquire(ME)


# -- the lock of a key ---------------------------------------------------------


@pytest.mark.locks_work("flock")
def test_one_holds_a_key_and_the_next_after_release(tmp_path: Path) -> None:
    path = tmp_path / "aa" / "key.lock"
    one, other = KeyLock(path), KeyLock(path)
    with no_descriptor_left():
        assert one.try_acquire(ME)
        assert not other.try_acquire(ME)
        one.release()
        one.release()
        assert other.try_acquire(ME)
        assert not free(path)
        other.release()
        assert free(path)
    assert path.exists()


@pytest.mark.locks_work("flock")
def test_a_thread_frees_what_another_one_took(tmp_path: Path) -> None:
    """A fetch in the background may be begun and ended by different threads."""
    path = tmp_path / "key.lock"
    lock = KeyLock(path)
    taker = threading.Thread(target=lock.try_acquire, args=(ME,))
    taker.start()
    taker.join()
    assert not free(path)
    lock.release()
    assert free(path)


def test_a_lock_that_was_released_writes_into_no_file_with_its_old_number(tmp_path: Path) -> None:
    lock = KeyLock(tmp_path / "key.lock")
    assert lock.try_acquire(ME)
    number = lock._fds[-1] if lock._fds else -1
    lock.release()
    others = tmp_path / "others"
    others.write_bytes(b"theirs")
    fd = os.open(others, os.O_RDWR)
    try:
        assert number in (-1, fd)
        lock.update(ME)
        assert others.read_bytes() == b"theirs"
    finally:
        os.close(fd)


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "key.lock"
    inside, most, rounds = 0, 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most, rounds
        for _ in range(50):
            lock = KeyLock(path)
            if not lock.try_acquire(ME):
                continue
            with guard:
                inside += 1
                most = max(most, inside)
                rounds += 1
            with guard:
                inside -= 1
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and rounds > 0


@pytest.mark.locks_work("flock")
def test_a_killed_holder_frees_its_key_at_once(tmp_path: Path) -> None:
    path = tmp_path / "key.lock"

    def hold(parent: Parent) -> None:
        lock = KeyLock(path)
        parent.say(lock.try_acquire(Holder.this_process(rank=None, job=None, now=1.0)))
        parent.hear()

    with forked(hold) as child:
        assert child.hear()
        assert not free(path)
        holder = read_holder(path)
        assert holder is not None and holder.pid == child.pid
        child.kill(signal.SIGSTOP)
        assert not free(path)
        child.kill()
        assert free(path)


@pytest.mark.locks_work("flock")
def test_a_childs_copy_does_not_keep_a_dead_holders_key(tmp_path: Path) -> None:
    path = tmp_path / "key.lock"

    def hold(parent: Parent) -> None:
        lock = KeyLock(path)
        assert lock.try_acquire(ME)
        pid = os.fork()
        if pid == 0:
            lock.update(ME)  # must not write into whatever has that number now
            lock.release()
            parent.say("runs")
            signal.alarm(120)
            signal.pause()
        parent.hear()
        parent.say(pid)
        parent.hear()

    with forked(hold) as child:
        assert child.hear() == "runs"
        grandchild = child.ask()
        try:
            assert not free(path)  # the child's release was not the parent's
            child.kill()
            assert free(path)
            os.kill(grandchild, 0)  # lives
        finally:
            os.kill(grandchild, signal.SIGKILL)


@pytest.mark.locks_work("flock")
def test_a_stale_handle_in_a_child_touches_no_other_file(tmp_path: Path) -> None:
    path, victim = tmp_path / "key.lock", tmp_path / "victim"
    victim.write_text("mine" * 100)
    lock = KeyLock(path)
    assert lock.try_acquire(ME)
    number = lock._fds[-1]

    def reuse(parent: Parent) -> None:
        fd = os.open(victim, os.O_RDWR)
        if fd != number:
            os.dup2(fd, number)
        lock.update(ME)
        lock.release()
        parent.say(os.fstat(number).st_ino == victim.stat().st_ino)

    with forked(reuse) as child:
        assert child.hear()
    assert victim.read_text() == "mine" * 100
    assert not free(path)
    lock.release()


@pytest.mark.locks_work("answers")
def test_a_lock_file_unlinked_between_open_and_flock_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key.lock"
    path.touch()
    real = fcntl.flock

    def slow(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and path.exists():
            path.unlink()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    lock = KeyLock(path)
    assert not lock.try_acquire(ME)  # busy: the caller looks again
    monkeypatch.setattr(fcntl, "flock", real)
    assert lock.try_acquire(ME)
    assert path.exists()
    lock.release()


@pytest.mark.locks_work("files")
def test_the_directory_may_be_removed_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "aa" / "key.lock"
    stop = threading.Event()

    def sabotage() -> None:
        while not stop.wait(0.0002):
            for directory in (path.parent, path.parent.parent):
                with contextlib.suppress(OSError):
                    directory.rmdir()

    thread = threading.Thread(target=sabotage)
    taken = 0
    thread.start()
    try:
        for _ in range(300):
            lock = KeyLock(path)
            if lock.try_acquire(ME):
                taken += 1
                lock.release()
                path.unlink()
    finally:
        stop.set()
        thread.join()
    assert taken == 300  # nobody else wants it


def test_a_directory_made_and_removed_by_others_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # mkdir says that it is there, and when pathlib looks it is not.
    path = tmp_path / "aa" / "key.lock"
    real = os.mkdir
    answers = iter(range(3))

    def mkdir(target: object, *args: object, **kw: object) -> None:
        if str(target) == str(path.parent) and next(answers, None) is not None:
            raise FileExistsError(errno.EEXIST, "there", str(target))
        real(target, *args, **kw)

    monkeypatch.setattr(os, "mkdir", mkdir)
    lock = KeyLock(path)
    with no_descriptor_left():
        assert lock.try_acquire(ME)
        lock.release()


def test_a_directory_that_cannot_be_kept_is_an_error_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "mkdir", lambda self, **kw: None)
    monkeypatch.setattr(os, "makedirs", lambda *args, **kw: None)
    monkeypatch.setattr(locks, "_MAKE_ATTEMPTS", 3)
    with pytest.raises(FileNotFoundError):
        KeyLock(tmp_path / "aa" / "key.lock").try_acquire(ME)


@pytest.mark.parametrize("what", ["link", "pipe", "directory", "parent"])
def test_what_is_planted_is_not_locked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    (tmp_path / "victim").write_text("mine")
    path = tmp_path / "aa" / "key.lock"
    if what == "parent":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "aa").symlink_to(tmp_path / "elsewhere")
    else:
        path.parent.mkdir()
    if what == "link":
        path.symlink_to(tmp_path / "victim")
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    lock = KeyLock(path)
    with no_descriptor_left():
        assert lock.try_acquire(ME)  # a second fetch costs less than a failed read
        lock.update(ME)
        lock.release()
    assert "is no lock file" in caplog.text and str(path) in caplog.text
    assert (tmp_path / "victim").read_text() == "mine"
    assert what != "parent" or list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.locks_work("flock")
def test_a_file_that_was_linked_into_the_place_of_a_lock_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "key.lock").hardlink_to(tmp_path / "victim")
    lock = KeyLock(tmp_path / "key.lock")
    assert lock.try_acquire(ME)
    assert not KeyLock(tmp_path / "key.lock").try_acquire(ME)
    lock.release()
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.locks_work("flock")
def test_a_free_lock_is_taken_once_and_given_back_when_its_record_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []
    real = FileLock.acquire

    def acquire(self: FileLock, **options: object) -> object:
        taken.append(self)
        return real(self, **options)

    monkeypatch.setattr(FileLock, "acquire", acquire)
    path = tmp_path / "key.lock"
    lock = KeyLock(path)
    assert lock.try_acquire(ME)
    assert len(taken) == 1
    lock.release()
    assert free(path)  # while `taken` keeps filelock's object, which frees what it holds when lost

    def interrupted(self: KeyLock, holder: Holder) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KeyLock, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.try_acquire(ME)
    assert free(path)


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG]
)
@pytest.mark.locks_work("flock")
def test_a_full_disk_takes_the_record_and_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "key.lock"
    lock = KeyLock(path)
    monkeypatch.setattr(os, "pwrite", refusing(number, real=os.pwrite))
    assert lock.try_acquire(ME)
    assert not free(path)
    assert read_holder(path) is None
    lock.release()


def test_lock_files_that_are_closed_to_us_are_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [tmp_path / "a.lock", tmp_path / "b.lock"]
    for path in paths:
        path.touch()
    denied = refusing(errno.EACCES, real=None)
    monkeypatch.setattr(FileLock, "acquire", denied)
    monkeypatch.setattr(locks, "_closed", False)
    caplog.set_level("INFO")
    for path in paths * 2:
        assert KeyLock(path).try_acquire(ME)
    said = [record.levelname for record in caplog.records if "is closed" in record.message]
    assert said == ["WARNING", "INFO", "INFO", "INFO"]


@pytest.mark.locks_work("answers")
@pytest.mark.parametrize("name", ["locks/budget.lock", "locks/ab/key.lock"])
def test_a_namespace_that_is_gone_is_not_made_for_a_lock(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError):
        KeyLock(tmp_path / "v1" / name).try_acquire(ME)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "v1").mkdir()
    lock = KeyLock(tmp_path / "v1" / name)
    assert lock.try_acquire(ME)
    lock.release()


@pytest.mark.locks_work("answers")
def test_an_unexpected_failure_of_the_record_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = KeyLock(tmp_path / "key.lock")
    assert lock.try_acquire(ME)
    monkeypatch.setattr(os, "pwrite", refusing(errno.EBADF, real=os.pwrite))
    with pytest.raises(OSError):
        lock.update(ME)
    lock.release()


# -- who holds it --------------------------------------------------------------


@pytest.mark.locks_work("answers")
def test_the_record_says_who_and_what(tmp_path: Path) -> None:
    path = tmp_path / "key.lock"
    lock = KeyLock(path)
    long = Holder(1, "h" * 60, None, None, 1.0, "p" * 90, 10**12)
    assert lock.try_acquire(long)
    assert read_holder(path) == long
    lock.update(ME)  # shorter than what was there
    assert read_holder(path) == ME
    lock.release()
    assert str(ME) == f"process {os.getpid()} on {ME.host} (rank 3)"
    assert str(long) == f"process 1 on {'h' * 60}"


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["pid", "host", "started", "rank", "x"]), inner)
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_a_damaged_record_is_none(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.lock"
    path.write_bytes(data)
    assert read_holder(path) is None


@pytest.mark.parametrize("name", ["pid", "host", "rank", "job", "started", "partial", "size"])
@pytest.mark.parametrize("value", ["1e400", "-1e400", "NaN", "[]", "{}", "1" + "0" * 400])
def test_a_record_with_an_absurd_field_is_none(tmp_path: Path, name: str, value: str) -> None:
    record = {"pid": 1, "host": "h", "rank": 1, "job": "j", "started": 1.0, "partial": None}
    text = json.dumps({**record, "size": 3, name: "@"}).replace('"@"', value)
    path = tmp_path / "key.lock"
    path.write_text(text)
    holder = read_holder(path)
    if holder is not None:  # an integer is an integer, whatever its size
        assert name in ("pid", "rank", "size") and value.startswith("10")
        str(holder)


@pytest.mark.parametrize(
    ("field", "good"),
    [
        *[({name: value}, True) for name in ("rank", "size") for value in (None, 0, 2**63 - 1)],
        *[({name: value}, False) for name in ("rank", "size") for value in (-1, 2**63, 1.0, True)],
        *[({"pid": value}, value in (0, 2**63 - 1)) for value in (0, 2**63 - 1, -1, 2**63, None)],
        *[({"partial": value}, value != 1) for value in (None, "name", 1)],
        *[({"job": value}, value != 1) for value in (None, "name", 1)],
        *[({"host": value}, value == "name") for value in ("name", None, 1)],
    ],
)
def test_a_record_has_counts_that_are_counts_and_names_that_are_names(
    tmp_path: Path, field: dict[str, object], good: bool
) -> None:
    record = {"pid": 1, "host": "h", "rank": 1, "job": "j", "started": 1.0, "partial": None}
    path = tmp_path / "key.lock"
    path.write_text(json.dumps({**record, "size": 3, **field}))
    holder = read_holder(path)
    assert (holder is not None) == good
    if holder is not None:
        [(name, value)] = field.items()
        assert getattr(holder, name) == value


@pytest.mark.parametrize("data", [b"[" * 4096, b"{" * 9000, b'{"pid":' * 500, b""])
def test_a_record_that_is_deep_or_empty_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "key.lock").write_bytes(data)
    assert read_holder(tmp_path / "key.lock") is None


def test_a_huge_lock_file_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "key.lock"
    path.touch()
    os.truncate(path, 1 << 40)
    assert read_holder(path) is None
    assert read_holder(tmp_path / "absent") is None


# -- descriptors and forks -----------------------------------------------------


@pytest.mark.parametrize("unwinding", [True, False])
@pytest.mark.locks_work("flock")
def test_a_forked_child_does_not_keep_a_dead_writers_lock(tmp_path: Path, unwinding: bool) -> None:
    path = tmp_path / "data"

    def write(parent: Parent) -> None:
        fd = open_owned(path, os.O_RDWR | os.O_CREAT)
        assert lock_exclusive(fd)
        copy = dup_owned(fd)
        pid = os.fork()
        if pid == 0:
            if unwinding:
                disown(fd)
                disown(copy)
            parent.say("child")
            signal.alarm(120)
            signal.pause()
        parent.hear()
        parent.say(pid)
        parent.hear()

    with forked(write) as child:
        assert child.hear() == "child"
        assert not unheld(path)
        grandchild = child.ask()
        try:
            child.kill()
            assert unheld(path)
            os.kill(grandchild, 0)
        finally:
            os.kill(grandchild, signal.SIGKILL)


def test_no_fork_comes_between_open_and_registration(tmp_path: Path) -> None:
    # Children are forked in a loop while other threads open and close: none of
    # them may have a descriptor of the files.
    stop = threading.Event()

    def churn(number: int) -> None:
        path = tmp_path / f"writers-{number}"
        while not stop.is_set():
            fd = open_owned(path, os.O_RDWR | os.O_CREAT)
            disown(dup_owned(fd))
            disown(fd)

    threads = [threading.Thread(target=churn, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(150):
            pid = os.fork()
            if pid == 0:
                held = [os.readlink(f"/proc/self/fd/{n}") for n in _descriptors()]
                os._exit(any("writers-" in name for name in held))
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _descriptors() -> list[str]:
    return [n for n in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{n}")]


def test_a_child_that_closes_a_parents_handle_closes_nothing_of_its_own(tmp_path: Path) -> None:
    fd = open_owned(tmp_path / "data", os.O_RDWR | os.O_CREAT)

    def reuse(parent: Parent) -> None:
        own = os.open(tmp_path / "data", os.O_RDONLY)
        if own != fd:
            os.dup2(own, fd)
        disown(fd)
        parent.say(os.fstat(fd).st_size)

    with forked(reuse) as child:
        assert child.hear() == 0
    disown(fd)
    with pytest.raises(OSError):
        os.fstat(fd)


def test_a_descriptor_that_fails_to_close_in_a_child_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fds = [open_owned(tmp_path / f"{n}", os.O_RDWR | os.O_CREAT) for n in range(3)]
    for fd in fds:
        assert lock_exclusive(fd)
    real = os.close

    def close(fd: int) -> None:
        real(fd)
        if fd == fds[0]:
            raise OSError(errno.EIO, "close")

    monkeypatch.setattr(os, "close", close)

    def count(parent: Parent) -> None:
        parent.say([fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")])

    with forked(count) as child:
        assert child.hear() == []
    monkeypatch.undo()
    for fd in fds:
        disown(fd)


def test_only_what_is_made_is_given_its_mode(tmp_path: Path) -> None:
    shared = Modes(os.getegid(), 0o2770, 0o660, 0o440, 0o640)
    made, found = tmp_path / "made", tmp_path / "found"
    found.touch()
    found.chmod(0o600)
    before = os.umask(0o077)
    try:
        disown(open_owned(made, os.O_RDWR | os.O_CREAT | os.O_EXCL, shared))
        disown(open_owned(found, os.O_RDWR, shared))
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o660  # whatever the umask
    assert stat.S_IMODE(found.stat().st_mode) == 0o600  # whoever made it knows why


def test_a_child_remembers_no_files_of_its_parent(tmp_path: Path) -> None:
    fd = open_owned(tmp_path / "data", os.O_RDWR | os.O_CREAT)

    def work(parent: Parent) -> None:
        parent.say(len(descriptors._owned))

    with forked(work) as child:
        assert child.hear() == 0
    assert descriptors._owned
    disown(fd)


def test_an_owned_file_is_not_opened_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "data")
    (tmp_path / "data").touch()
    with no_descriptor_left(), pytest.raises(OSError) as caught:
        open_owned(tmp_path / "link", os.O_RDWR)
    assert caught.value.errno == errno.ELOOP


@pytest.mark.locks_work("flock")
def test_of_many_processes_one_holds_a_key_at_a_time(tmp_path: Path) -> None:
    path, inside = tmp_path / "key.lock", tmp_path / "inside"

    def work(parent: Parent, number: int) -> None:
        taken = 0
        parent.hear()
        while taken < 20:
            lock = KeyLock(path)
            if lock.try_acquire(ME):
                os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails if two are in
                os.unlink(inside)
                taken += 1
                lock.release()
        parent.say(taken)

    with crowd(4, work) as children:
        for child in children:
            child.tell()
        assert [child.hear() for child in children] == [20] * 4
    wait_until(lambda: free(path))
