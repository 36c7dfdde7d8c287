"""``--json``: the keys of every command that scripts rely on, and the types of their values."""

import json
import re

from shardcache.cache import Cache
from tests.support.storetools import damage

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00")
#: Command line, whose ``{0}`` and ``{1}`` are URLs of cached shards -> keys of the object, and of
#: the objects under ``key:``.
SHAPES = {
    "prewarm {0} s3://{bucket}/absent.tar": "shards: url outcome size seconds received retries; "
    "shards.error: type message; summary: fetched cached failed bytes received_bytes seconds "
    "stopped; summary.plan: to_fetch free_bytes needed_bytes missing_bytes",
    "import {dir} s3://{bucket} -n": "shards: url outcome size; summary: imported failed",
    "expand {0}": "urls",
    "index {0} -o {dir}/train.json": "shards: url nsamples; "
    "summary: shards samples failed wrong seconds",
    "ls": "shards: url state size used_at fetched_at key version path etag digest; summary: shards "
    "bytes disk_bytes max_size evictable_bytes matching shown not_cached",
    "ls --by prefix": "prefixes: url shards size used_at; summary: shards",
    "ls --partial": "partials: state key dir written_bytes; "
    "summary: partials live orphans written_bytes",
    "path {0}": "shards: url path",
    "pin {0} s3://lab/absent.tar --for 3d": "shards: url state; summary: pinned not_cached seconds",
    "unpin {0}": "shards: url state; summary: unpinned not_pinned",
    "verify": "findings: state url reason set_aside; findings.entry: key directory size; summary: "
    "verified verified_bytes ok damaged set_aside seconds interrupted",
    "stats": "opens hits misses coalesced streamed failed hit_rate bytes_origin bytes_opened "
    "bytes_saved evicted errors since until; waits.all: count mean",
    "stats --by hour": "hours: hour opens hits; summary: opens",
    "stats --by rank": "ranks: rank opens hits; summary: opens",
    "stats --zero": "zeroed",
    "top --interval 0.2": "at seconds processes ranks fetches; total: opens; "
    "tiers: dir bytes disk_bytes estimated max_size",
    "report -o {dir}/report.html": "path size",
    "config": "options: name value source default; summary: set",
    "dir": "dir",
    "doctor": "findings: level found fix; summary: fail",
    "clean -n --all": "freed kept kept_bytes missing dry_run job_limits; removed: name reason size",
    "rm -n {0} s3://lab/absent.tar": "shards: url state size; "
    "summary: dry_run removed removed_bytes in_use not_cached",
}
#: The exit codes that are not 0, by command.
CODES = {"import": 3, "prewarm": 3, "verify": 4, "rm": 1}


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
    with Cache(tmp_path / "cache") as cache:
        cache.open(warm[0]).read()
        damage(cache.entry(warm[3]).data)
    (tmp_path / "local.tar").touch()
    for line, shape in SHAPES.items():
        words = [word.format(*warm, bucket=bucket, dir=tmp_path) for word in line.split()]
        code, out, err = run(*words, "--json")
        assert code == CODES.get(words[0], 0), (line, err)
        found = json.loads(out)  # one object
        assert (found["schema"], found["command"]) == (1, words[0])
        for part in shape.split("; "):
            *path, names = part.split(": ")
            assert {".".join([*path, name]) for name in names.split()} <= keys(found), line
    _, out, _ = run("top", "--count", "2", "--interval", "0.2", "--json")
    assert [json.loads(line)["schema"] for line in out.splitlines()] == [1, 1]


def test_json_of_an_empty_cache(run, layout):
    for line in ("ls", "ls --partial", "clean", "verify", "stats", "top --interval 0.2"):
        assert run.json(*line.split())["schema"] == 1
