"""What commands print as JSON: each field is declared here, once.

``"name": (kind, what it is)``. A kind is one of `forms.KINDS`, with ``?`` behind it where the value
may be null; a tuple of words; or a schema. `schemas` makes JSON Schemas of them.
"""

from __future__ import annotations

from forms import (
    Fields,
    Schema,
    closed,
    document,
    line,
    nullable,
    rows,
    summed_up,
    table,
    words,
)

from shardcache.cli.recipes import RECIPES
from shardcache.prewarm.report import Outcome, Stopped
from shardcache.space.eviction import Reason
from shardcache.stats.counters import COUNTERS, WAITS
from shardcache.stats.summary import Stats
from shardcache.store.verify import State

# -- fields that mean the same wherever they are ---------------------------------------

URL = ("url", "The shard: its canonical URL, without credentials.")
URL_OR_NONE = ("url?", f"{URL[1]} Null where the sidecar cannot be read.")
KEY = ("hex", "Key of the shard: what its URL is called in the cache.")
VERSION = ("hex", "Version of the object that was fetched.")
SIZE = ("bytes", "Bytes of the shard.")
TIER = ("number", "Number of the tier; 1 is filled first, the last one is `dir`.")
RANK = ("number?", "Rank in its job; null outside of any job.")
SECONDS = ("seconds", "How long it took.")
SOURCE = ("text", "Who set it: argument, a variable, a file, or default.")


def waits() -> Schema:
    """Of waits of one kind."""
    percentiles: Fields = {
        f"p{n}": ("seconds?", f"{n} % took at most so long; null without any.") for n in _SHARES
    }
    count: Fields = {
        "count": ("count", "How often."),
        "seconds": ("seconds", "All of them together."),
    }
    return closed({**count, **percentiles})


def stats_fields() -> Fields:
    """Of a sum of what was counted."""
    counters = [name for name in COUNTERS if not name.startswith("wait_us_")]
    each = {"$ref": "#/$defs/waits"}
    kinds = {name: "bytes" if name.startswith("bytes_") else "count" for name in counters}
    return {
        "since": ("time?", "When the first of it was counted; null if nothing was."),
        "until": ("time?", "When the last of it was counted."),
        "opens": ("count", "Shards that were asked for: the sum of hits to failed."),
        "hit_rate": ("share?", "Hits per open; null without opens."),
        **{name: (kinds[name], str(getattr(Stats, name).__doc__)) for name in counters},
        "bytes_saved": ("bytes", "Bytes that would have come from the origin without the cache."),
        "evicted": ("count", "Entries evicted or removed, for whatever reason."),
        "errors": ("count", "Errors of every kind."),
        "waits": (
            closed({name: (each, _WAITED[name]) for name in (*WAITS, "all")}),
            "How long readers waited before they had a shard.",
        ),
    }


_SHARES = (50, 90, 99)
_WAITED = {
    "disk": "For the disk.",
    "lock": "For somebody else's fetch.",
    "network": "For their own fetch.",
    "all": "For whatever it was.",
}

# -- commands --------------------------------------------------------------------------


PREWARM_SHARD: Fields = {
    "url": URL,
    "outcome": (tuple(Outcome), "What became of it."),
    "size": ("bytes?", f"{SIZE[1]} Null where that is not known."),
    "seconds": SECONDS,
    "received_bytes": ("bytes", "Bytes that came over the network for it."),
    "retries": ("count", "Requests that were repeated."),
    "error": ("text?", "Why it is not there."),
    "error_type": ("text?", "Class of that error."),
}
PREWARM_PLAN: Fields = {
    "shards": ("count", "Shards that were asked for."),
    "cached": ("count", "Shards that are there already."),
    "cached_bytes": ("bytes", "Bytes of those."),
    "to_fetch": ("count", "Shards to fetch."),
    "to_fetch_bytes": ("bytes", "Bytes of those whose size is known."),
    "unknown_sizes": ("count", "Shards to fetch whose size is not known."),
    "free_bytes": ("bytes", "Bytes that the cache may still take."),
    "evict_bytes": ("bytes", "Bytes of entries that are to make room."),
    "missing_bytes": ("bytes", "Bytes for which there is no room; 0 if all fits."),
    "left_out": ("count", "Shards left out for want of room."),
    "outdated": ("count", "Shards to fetch that the origin has replaced; with --refresh."),
}


def prewarm_totals() -> Fields:
    """What shards add up to."""
    return {
        **{each.value: ("count", f"Shards of which {_OUTCOMES[each]}.") for each in Outcome},
        "refreshed": ("count", "Shards that came anew as the origin had replaced them."),
        "retried": ("count", "Shards for which requests were repeated."),
        "bytes": ("bytes", "Bytes of shards that came into the cache."),
        "received_bytes": ("bytes", "Bytes that came over the network."),
    }


def prewarm() -> list[Schema]:
    shard, plan = PREWARM_SHARD, PREWARM_PLAN
    summary: Fields = {
        **prewarm_totals(),
        "seconds": SECONDS,
        "stopped": (nullable(words(Stopped)), "Why it ended early; null if it did not."),
        "interrupted": ("bool", "Whether somebody asked for that."),
    }
    whole = {"plan": (closed(plan), "What was to be done."), **summary}
    return [
        document("prewarm", {"shards": (rows(shard), "One for each."), **summed_up(whole)}),
        line("plan", plan, "What is to be done, before anything is fetched."),
        line("shard", shard, "A shard that is done, as it happens."),
        line("summary", summary, "The last line."),
    ]


_OUTCOMES = {
    Outcome.CACHED: "it was there already",
    Outcome.FETCHED: "this call fetched it",
    Outcome.COALESCED: "another process fetched it meanwhile",
    Outcome.LINKED: "the copy of another rank or job was taken",
    Outcome.FAILED: "it could not be had",
    Outcome.CANCELLED: "the fetch was called off",
    Outcome.NOT_STARTED: "nothing was tried",
    Outcome.LEFT_OUT: "there was no room",
    Outcome.MISSING: "it is not there, after --check or --dry-run",
}


def ls() -> list[Schema]:
    shard: Fields = {
        "url": URL_OR_NONE,
        "size": SIZE,
        "used_at": ("time", "When it was last used, to ten minutes."),
        "fetched_at": ("time?", "When it was fetched."),
        "state": (
            ("ok", "in_use", "pinned", "damaged"),
            "in_use: being read. damaged: will be fetched again.",
        ),
        "tier": TIER,
        "key": KEY,
        "version": VERSION,
        "path": ("path?", "The file; null where the entry has none."),
        "etag": ("text?", "ETag of the object."),
        "digest": ("text?", "Digest of its bytes."),
        "checked": ("text?", "Checksum of the origin that they were compared with."),
    }
    summary: Fields = {
        "shards": ("count", "Shards in the cache."),
        "bytes": ("bytes", "Bytes of those."),
        "max_size": ("bytes?", "Most that it may hold; null where free space limits it."),
        "evictable_bytes": ("bytes", "Bytes that could make room for others."),
        "matching": ("count", "Shards that pass the filters."),
        "shown": ("count", "Shards that are listed."),
    }
    partial: Fields = {
        "url": URL_OR_NONE,
        "size": ("bytes?", f"{SIZE[1]} Null where that is not known yet."),
        "written_bytes": ("bytes", "Bytes on disk."),
        "share": ("share?", "Of its bytes that are on disk."),
        "state": (("live", "orphan"), "orphan: left by a dead process."),
        "begun_at": ("time?", "When the fetch began."),
        "holder": ("text?", "Who fetches it, in words."),
        "pid": ("number?", "Process that fetches it."),
        "rank": RANK,
        "tier": TIER,
        "key": KEY,
        "dir": ("path", "Directory of the partial."),
    }
    partials: Fields = {
        "partials": ("count", "Fetches in flight, and what dead ones left."),
        "live": ("count", "Those in flight."),
        "orphans": ("count", "The others."),
        "written_bytes": ("bytes", "Bytes of all of them."),
        "matching": ("count", "Those that pass the filters."),
        "shown": ("count", "Those that are listed."),
    }
    return [
        *table("ls", "shard", shard, summary),
        *table("ls", "partial", partial, partials, about="With --partial."),
    ]


def path() -> list[Schema]:
    return [document("path", {"url": URL, "path": ("path", "The file.")})]


def rm() -> list[Schema]:
    shard: Fields = {
        "url": URL,
        "size": ("bytes", "Bytes that were freed."),
        "state": (("removed", "in_use", "not_cached"), "What became of it."),
    }
    summary: Fields = {
        "dry_run": ("bool", "Whether it was only said."),
        "removed": ("count", "Shards that were removed."),
        "removed_bytes": ("bytes", "Bytes of those."),
        "in_use": ("count", "Shards that stay: pinned, or being read."),
        "not_cached": ("count", "Shards that were not there."),
    }
    return table("rm", "shard", shard, summary)


def pin() -> list[Schema]:
    shard: Fields = {
        "url": URL,
        "state": (("cached", "not_cached"), "not_cached: kept as soon as it is fetched."),
    }
    summary: Fields = {
        "pinned": ("count", "Shards that are pinned now."),
        "not_cached": ("count", "Those of them that are not there yet."),
        "seconds": ("seconds?", "For how long; null: until they are unpinned."),
    }
    return table("pin", "shard", shard, summary)


def unpin() -> list[Schema]:
    shard: Fields = {
        "url": URL,
        "state": (("unpinned", "not_pinned"), "What became of it."),
    }
    summary: Fields = {
        "unpinned": ("count", "Shards that are no longer pinned."),
        "not_pinned": ("count", "Shards that were not."),
    }
    return table("unpin", "shard", shard, summary)


def clean() -> list[Schema]:
    removal: Fields = {
        "dir": ("path", "Directory that was removed, or would be."),
        "size": ("bytes", "Bytes of it."),
        "reason": (tuple(each for each in Reason if each is not Reason.ASKED), "Why."),
    }
    summary: Fields = {
        "dry_run": ("bool", "Whether it was only said."),
        "removed": ("count", "Directories removed."),
        "removed_bytes": ("bytes", "Bytes of those."),
        "kept": ("count", "Shards that stay."),
        "kept_bytes": ("bytes", "Bytes of those."),
        "missing_bytes": ("bytes", "Bytes that ought to go, but are in use."),
        "missing_inodes": ("count", "Inodes that ought to go, but are in use."),
    }
    return table("clean", "removal", removal, summary)


def verify() -> list[Schema]:
    finding: Fields = {
        "state": (tuple(each for each in State if each is not State.OK), "What is wrong."),
        "url": URL_OR_NONE,
        "reason": ("text", "What is wrong, in a sentence."),
        "size": SIZE,
        "set_aside": ("bool", "Whether it was, so that its next reader fetches it anew."),
        "key": KEY,
        "version": VERSION,
        "dir": ("path", "Directory of the entry."),
    }
    summary: Fields = {
        "quick": ("bool", "Whether sizes only were compared."),
        "remote": ("bool", "Whether origins were asked."),
        "repair": ("bool", "Whether damaged shards were to be set aside."),
        "dry_run": ("bool", "Whether that was only said."),
        "sample": ("share", "Share of the shards that was looked at."),
        "interrupted": ("bool", "Whether somebody ended it early."),
        "verified": ("count", "Shards that were verified."),
        "verified_bytes": ("bytes", "Bytes of those."),
        "seconds": SECONDS,
        **{each.value: ("count", f"Shards: {_STATES[each]}.") for each in State},
        "set_aside": ("count", "Shards that were set aside."),
    }
    return table("verify", "finding", finding, summary)


_STATES = {
    State.OK: "as they were fetched",
    State.DAMAGED: "damaged on this disk",
    State.UNCHECKED: "that could not be checked",
    State.CHANGED: "of which the origin has another version",
    State.GONE: "that are gone from the origin",
    State.UNREACHABLE: "whose origin could not be asked",
}


def stats() -> list[Schema]:
    row: Fields = {
        name: stats_fields()[name]
        for name in ("opens", "hit_rate", "hits", "coalesced", "linked", "misses", "bypassed")
    }
    row |= {
        name: stats_fields()[name]
        for name in ("failed", "bytes_origin", "bytes_saved", "evicted", "errors")
    }
    row["wait_p99_seconds"] = ("seconds?", "99 % waited at most so long; null without any.")
    summary = stats_fields()
    return [
        document("stats", summary),
        *table("stats", "rank", {"rank": RANK, **row}, summary, about="With --by rank."),
        *table(
            "stats",
            "hour",
            {"hour": ("time", "Beginning of the hour."), **row},
            summary,
            about="With --by hour.",
        )[:2],
        document("stats", {"zeroed": ({"const": True}, "It counts anew.")}, about="With --zero."),
    ]


TIER_USE: Fields = {
    "tier": ("number", TIER[1]),
    "dir": ("path", "Directory of it."),
    "shards": ("count", "Shards in it."),
    "bytes": ("bytes", "Bytes of those."),
    "max_size": ("bytes?", "Most that it may hold; null where free space limits it."),
}


def _use() -> Fields:
    ranks = rows({"rank": RANK, **stats_fields()})
    return {
        "ranks": (ranks, "What was counted, by rank."),
        "tiers": (rows(TIER_USE), "How full they are."),
    }


def top() -> list[Schema]:
    fetch: Fields = {
        "url": ("url", f"{URL[1]} Its key where the URL is not known."),
        "size": ("bytes?", f"{SIZE[1]} Null where that is not known yet."),
        "written_bytes": ("bytes", "Bytes on disk."),
        "bytes_per_second": ("rate?", "Since the last look; null where there was none."),
        "pid": ("number?", "Process that fetches it."),
        "rank": RANK,
    }
    who: Fields = {
        "pid": ("number", "The process."),
        "host": ("text", "Name of its machine."),
        "rank": RANK,
        "job": ("text?", "The job that it belongs to; null outside of any."),
    }
    wait: Fields = {
        "url": URL,
        **who,
        "since": ("time", "When the wait began."),
        "seconds": ("seconds", "How long it has lasted."),
        "holder": (nullable(closed(who)), "Who fetches the shard; null where that is not known."),
        "written_bytes": ("bytes?", "Bytes on disk so far; null where that is not known."),
        "size": ("bytes?", f"{SIZE[1]} Null where that is not known."),
    }
    activity: Fields = {
        "at": ("time", "When this was seen."),
        "seconds": ("seconds", "Over which rates are taken."),
        "processes": ("count", "Processes that use the cache."),
        "total": (closed(stats_fields()), "What was counted meanwhile."),
        "fetches": (rows(fetch), "Fetches in flight."),
        "waits": (rows(wait), "Who waits for another process's fetch."),
        **_use(),
    }
    return [document("top", activity), line("activity", activity, "One look.")]


def report() -> list[Schema]:
    refetched: Fields = {
        "url": URL,
        "fetches": ("count", "How often it was fetched."),
        "bytes": ("bytes", "Bytes of all those fetches."),
    }
    settings: Fields = {
        "option": ("text", "Name of an option that is set."),
        "value": ("text", "Its value; secrets are not shown."),
        "source": SOURCE,
    }
    interval = {
        "at": ("time", "Beginning of the interval."),
        **stats_fields(),
        "cached_bytes": ("bytes", "Bytes in the cache at its end."),
    }
    return [
        document(
            "report",
            {
                "node": ("text", "Name of the machine."),
                "at": ("time", "When it was made."),
                "total": (closed(stats_fields()), "All that was counted."),
                "over_time": (rows(interval), "The same by intervals of equal length."),
                "cached_bytes": ("bytes", "Bytes in the cache, in all tiers."),
                "refetched": (rows(refetched), "Shards fetched more than once, worst first."),
                "settings": (rows(settings), "Options that are set."),
                **_use(),
            },
        )
    ]


def recipe() -> list[Schema]:
    file: Fields = {
        "name": ("text", "Name of the file."),
        "path": ("path?", "Where it was written; null without --output."),
        "text": ("text", "What is in it."),
    }
    fields: Fields = {
        "kind": (tuple(RECIPES), "What it is for."),
        "files": (rows(file), "The files."),
    }
    return [document("recipe", fields)]


def config() -> list[Schema]:
    option: Fields = {
        "option": ("text", "Name."),
        "value": ("text", "Value in force; secrets are not shown."),
        "source": SOURCE,
        "default": ("text", "Value where nobody sets it."),
        "help": ("text", "What it does."),
    }
    summary: Fields = {
        "options": ("count", "How many there are."),
        "set": ("count", "How many are set."),
    }
    return table("config", "option", option, summary)


def dir() -> list[Schema]:
    return [document("dir", {"dir": ("path", "Directory of the cache; it need not exist.")})]


def doctor() -> list[Schema]:
    finding: Fields = {
        "level": (("ok", "warn", "fail"), "warn: it works, but not well or not for long."),
        "check": ("text", "What was asked."),
        "subject": ("text", "What was looked at."),
        "found": ("text", "What was found."),
        "fix": ("text", "What to do, in one sentence; empty where nothing is."),
    }
    summary: Fields = {
        "ok": ("count", "Findings that are as they should be."),
        "warn": ("count", "Warnings."),
        "fail": ("count", "Failed checks."),
    }
    return table("doctor", "finding", finding, summary)


def completion() -> list[Schema]:
    fields: Fields = {
        "shell": (("bash", "zsh", "fish"), "For which shell."),
        "script": ("text", "What it is to run."),
    }
    return [document("completion", fields)]


def demo() -> list[Schema]:
    step: Fields = {
        "step": ("text", "What was done."),
        "object_fetches": ("count", "Shards that came over the network."),
        "most_fetches": ("count", "The most of any one shard."),
        "origin_bytes": ("bytes", "Bytes that came over the network."),
        "origin_halves": ("share", "The same as a multiple of half the data."),
        "expected_bytes": ("bytes", "Bytes that should have."),
        "samples": ("count?", "Samples seen; null where nothing was read."),
        "seconds": SECONDS,
        "complete": ("bool", "Whether every sample was seen exactly once."),
    }
    summary: Fields = {
        "ok": ("bool", "Whether it is as promised."),
        "shards": ("count", "Shards that were made."),
        "shard_bytes": ("bytes", "Bytes of one."),
        "fewest_fetches": ("count", "Fetches of the shard with the fewest."),
        "most_fetches": ("count", "Fetches of the shard with the most."),
        "dir": ("path?", "Where everything was kept; null where it was removed."),
    }
    return table("demo", "step", step, summary)


COMMANDS = {
    found.__name__.replace("_", "-"): found
    for found in (
        *(prewarm, ls, path, rm, pin, unpin, clean, verify, stats, top, report),
        *(recipe, config, dir, doctor, completion, demo),
    )
}
