"""What a machine gives a job, judged from given facts."""

from __future__ import annotations

import dataclasses
import os
import resource

import pytest

from shardcache.cli.checkup import Finding
from shardcache.cli.machine import (
    Machine,
    check_clock,
    check_cpus,
    check_environment,
    check_files,
    check_skew,
)
from shardcache.config import Config

MACHINE = Machine(
    time=1_790_000_000.0,
    files=1024,
    cpus=64,
    allowed=64,
    quota=None,
    ranks=None,
    bound=False,
    pod=False,
    memory=None,
    memory_of="cgroup memory",
)


def with_(**facts: object) -> Machine:
    return dataclasses.replace(MACHINE, **facts)


def only(findings: object) -> Finding:
    (finding,) = findings
    return finding


def test_this_machine_is_what_the_kernel_says() -> None:
    found = Machine.now({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "LOCAL_WORLD_SIZE": "3"})
    assert found.files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert found.allowed == len(os.sched_getaffinity(0)) <= found.cpus
    assert (found.pod, found.ranks, found.bound) == (True, 3, False)
    assert found.memory is not None and 0 < found.memory.free <= found.memory.limit
    assert Machine.now({"LOCAL_WORLD_SIZE": "x"}).ranks is None


@pytest.mark.parametrize(
    ("facts", "level", "said"),
    [
        ({}, "ok", "64 usable"),
        ({"quota": 4.0}, "warn", "4 usable by a cgroup's quota, of 64; os.cpu_count() says 64"),
        ({"allowed": 8}, "warn", "8 usable by affinity, of 64"),
        ({"allowed": 40}, "ok", "40 usable by affinity"),
        ({"quota": 48.5}, "ok", "48.5 usable"),
        ({"quota": 100.0}, "ok", "64 usable"),
        ({"ranks": 8}, "ok", "8 ranks on this node: 8 each"),
        ({"ranks": 40}, "warn", "1.6 each, too few"),
        ({"ranks": 8, "allowed": 8, "bound": True}, "warn", "8 each; os.cpu_count()"),
        ({"ranks": 8, "allowed": 8}, "warn", "1 each, too few"),
    ],
)
def test_workers_need_cpus(facts: dict[str, object], level: str, said: str) -> None:
    finding = only(check_cpus(with_(**facts)))
    assert (finding.level, said in finding.found) == (level, True), finding


def test_the_number_of_workers_leaves_a_cpu_to_training() -> None:
    assert "at most 3 DataLoader workers" in only(check_cpus(with_(quota=4.0))).fix
    assert "at most 1 DataLoader workers" in only(check_cpus(with_(quota=0.5))).fix


def test_files_are_counted_for_connections_and_shards_ahead() -> None:
    small, large = Config("/x"), Config("/x", connections=256, prefetch=64)
    for files, config, level in (
        (None, large, "ok"),
        (1024, large, "ok"),
        (800, large, "warn"),
        (512, large, "fail"),
        (512, small, "ok"),
        (300, small, "warn"),
        (100, small, "fail"),
    ):
        assert only(check_files(with_(files=files), config)).level == level, files


def test_a_machine_that_does_not_know_the_time_is_told() -> None:
    assert only(check_clock(MACHINE)).level == "ok"
    finding = only(check_clock(with_(time=86400.0)))
    assert (finding.level, "1970-01-02" in finding.found) == ("fail", True)


@pytest.mark.parametrize(
    ("ahead", "level"),
    [(0, "ok"), (59, "ok"), (-61, "warn"), (899, "warn"), (901, "fail"), (-901, "fail")],
)
def test_what_s3_refuses_is_a_failure(ahead: float, level: str) -> None:
    assert only(check_skew(ahead, "https://s3")).level == level


def test_variables_are_judged_as_given() -> None:
    def levels(environ: dict[str, str]) -> list[tuple[str, str]]:
        return [(f.level, f.subject) for f in check_environment(environ, Config("/x"))]

    assert levels({}) == [("ok", "environment")]
    assert levels({"SHARDCACHE_PORT": "tcp://10.0.0.1:80"}) == [("ok", "environment")]
    assert levels({"SHARDCACHE_DIR": " "}) == [("warn", "SHARDCACHE_DIR")]
    assert levels({"WDS_CACHE": "/y"}) == [("warn", "WDS_CACHE")]
    assert levels({"WDS_CACHE": "/x"}) == [("ok", "environment")]
    assert levels({"AWS_ACCESS_KEY_ID": "x"}) == [("warn", "AWS_ACCESS_KEY_ID")]
    assert levels({"SHARDCACHE_RANK": "x"}) == [("fail", "SHARDCACHE_RANK")]
