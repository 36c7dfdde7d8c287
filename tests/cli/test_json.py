"""``--json``: the keys of every command that scripts rely on, and the types of their values."""

import json
import os
import re

from shardcache.cache import Cache

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00")
#: Command line -> exit code, and paths of keys; ``{0}`` and ``{1}`` are URLs of cached shards.
SHAPES: dict[str, tuple[int, str]] = {
    "prewarm {0} s3://{bucket}/absent.tar": (
        3,
        "shards.url shards.outcome shards.size shards.seconds shards.received shards.retries "
        "shards.error.type shards.error.message summary.fetched summary.cached summary.failed "
        "summary.bytes summary.received_bytes summary.seconds summary.stopped "
        "summary.plan.to_fetch summary.plan.free_bytes summary.plan.needed_bytes "
        "summary.plan.missing_bytes",
    ),
    "index {0} -o {dir}/train.json": (
        0,
        "shards.url shards.nsamples summary.shards summary.samples summary.failed summary.wrong "
        "summary.seconds",
    ),
    "ls": (
        0,
        "shards.url shards.state shards.size shards.used_at shards.fetched_at shards.key "
        "shards.version shards.path shards.etag shards.digest summary.shards "
        "summary.bytes summary.disk_bytes summary.max_size summary.evictable_bytes "
        "summary.matching summary.shown summary.not_cached",
    ),
    "ls --partial": (
        0,
        "partials.state partials.key partials.dir partials.written_bytes summary.partials "
        "summary.live summary.orphans summary.written_bytes",
    ),
    "path {0}": (0, "shards.url shards.path"),
    "pin {0} s3://lab/absent.tar --for 3d": (
        0,
        "shards.url shards.state summary.pinned summary.not_cached summary.seconds",
    ),
    "unpin {0}": (0, "shards.url shards.state summary.unpinned summary.not_pinned"),
    "verify": (
        4,
        "findings.state findings.url findings.reason findings.set_aside findings.entry.key "
        "findings.entry.directory findings.entry.size summary.verified summary.verified_bytes "
        "summary.ok summary.damaged summary.set_aside summary.seconds summary.interrupted",
    ),
    "stats": (
        0,
        "opens hits misses coalesced streamed failed hit_rate bytes_origin bytes_opened "
        "bytes_saved evicted errors since until waits.all.count waits.all.mean",
    ),
    "stats --by hour": (0, "hours.hour hours.opens hours.hits summary.opens"),
    "stats --by rank": (0, "ranks.rank ranks.opens ranks.hits summary.opens"),
    "stats --zero": (0, "zeroed"),
    "top --interval 0.2": (
        0,
        "at seconds processes total.opens ranks fetches waits tiers.dir tiers.bytes "
        "tiers.disk_bytes tiers.estimated tiers.max_size",
    ),
    "report -o {dir}/report.html": (0, "path size"),
    "config": (0, "options.name options.value options.source options.default summary.set"),
    "dir": (0, "dir"),
    "doctor": (0, "findings.level findings.found findings.fix summary.fail"),
    "clean -n --all": (
        0,
        "removed.name removed.reason removed.size freed kept kept_bytes missing dry_run job_limits",
    ),
    "rm -n {0} s3://lab/absent.tar": (
        1,
        "shards.url shards.state shards.size summary.dry_run summary.removed "
        "summary.removed_bytes summary.in_use summary.not_cached",
    ),
}


def keys(found, path=""):
    """Return the paths of all keys, without list positions, and check the types of values."""
    if isinstance(found, list):
        return {path}.union(*(keys(each, path) for each in found))
    if isinstance(found, dict):
        inner = (keys(value, f"{path}.{name}".lstrip(".")) for name, value in found.items())
        return {path}.union(*inner)
    name = path.rpartition(".")[2]
    if found is not None and (name.endswith("_at") or name in ("at", "since", "until", "hour")):
        assert TIME.fullmatch(found), (path, found)
    if found is not None and (name.endswith("bytes") or name in ("size", "max_size", "received")):
        assert type(found) is int, (path, found)
    return {path}


def test_json_has_the_keys_that_scripts_rely_on(run, warm, orphan, bucket, tmp_path):
    with Cache(tmp_path / "cache", min_free=0) as cache:
        cache.open(warm[0]).read()
        damaged = cache.entry(warm[3]).data
    damaged.chmod(0o600)
    damaged.write_bytes(b"y" * damaged.stat().st_size)
    for line, (expected, shape) in SHAPES.items():
        words = [word.format(*warm, bucket=bucket, dir=tmp_path) for word in line.split()]
        code, out, err = run(*words, "--json")
        assert code == expected, (line, err)
        found = json.loads(out)  # one object
        assert {"schema", "command", *shape.split()} <= keys(found), line
        assert (found["schema"], found["command"]) == (1, words[0])
        assert os.environ["AWS_SECRET_ACCESS_KEY"] not in out + err
    _, out, _ = run("top", "--count", "2", "--interval", "0.2", "--json")
    assert [json.loads(line)["schema"] for line in out.splitlines()] == [1, 1]


def test_json_of_an_empty_cache(run, tmp_path):
    for line in ("ls", "ls --partial", "clean", "verify", "stats", "top --interval 0.2"):
        code, out, _ = run(*line.split(), "--json")
        assert code == 0 and json.loads(out)["schema"] == 1, line
    assert not (tmp_path / "cache").exists()
