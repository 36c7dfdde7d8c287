"""Histories of storms told by hand, for the tests of their judge."""

from __future__ import annotations

from collections.abc import Sequence

from tests.stress.storm.history import History
from tests.stress.storm.judge import Verdict, judge
from tests.stress.storm.rules import Rules

RULES = Rules(
    max_size=1000,
    lock_timeout=10.0,
    keys={"key-a": "a", "key-b": "b", "a" * 32: "a"},
    urls={"s3://storm/a": "a", "s3://storm/b": "b"},
)
LYING = Rules(max_size=1000, lock_timeout=10.0, lying=True, keys=RULES.keys, urls=RULES.urls)
#: What killed evictors leave, of shards a and b.
HALF = f"evict.{'a' * 32}.{'0' * 32}"
#: Of the worker that does everything unless told otherwise.
WHO = "0.0"


class Tale:
    """A history, told event by event; times are seconds."""

    def __init__(self) -> None:
        self.boss: list[dict] = []
        self.workers: list[dict] = []
        self._n = 0

    def boss_saw(self, event: str, at: float = 5.0, **facts: object) -> Tale:
        self.boss.append({"event": event, "at": at, "who": "boss", **facts})
        return self

    def put(self, name: str = "a", version: int = 0, at: float = 0.0) -> Tale:
        facts = {"name": name, "version": version, "size": 10}
        self.boss_saw("put", at, phase="begin", digest=f"{name}{version}", **facts)
        return self.boss_saw("put", at + 0.1, phase="end", **facts)

    def begin(
        self,
        op: str,
        name: str | None,
        at: float,
        who: str = WHO,
        calls: int = 1,
        ahead: Sequence[str] = (),
    ) -> int:
        self._n += 1
        self.workers.append(
            {"event": "begin", "at": at, "who": who, "n": self._n, "op": op, "name": name}
            | {"calls": calls, "ahead": list(ahead)}
        )
        return self._n

    def call(
        self,
        op: str = "read",
        name: str | None = "a",
        began: float = 1.0,
        ended: float = 2.0,
        who: str = WHO,
        calls: int = 1,
        **told: object,
    ) -> Tale:
        number = self.begin(op, name, began, who, calls)
        facts: dict[str, object] = {"outcome": "ok", "place": "cache", "gone": 0}
        if op in ("read", "hold", "pinned", "plain", "opener"):
            facts |= {"version": 0, "digest": f"{name}0", "size": 10}
        self.workers.append(
            {"event": "end", "at": ended, "who": who, "n": number, "op": op, "name": name}
            | facts
            | told
        )
        return self

    def error(self, error: str, op: str = "read", text: str = "", **told: object) -> Tale:
        facts = {"family": [error], "errno": None, **told}
        return self.call(op, outcome="error", error=error, text=text, **facts)

    def log(self, logger: str, template: str, *args: str, who: str = WHO) -> Tale:
        self.workers.append(
            {"event": "log", "at": 1.5, "who": who, "logger": f"shardcache.{logger}"}
            | {"template": template, "args": list(args)}
        )
        return self

    def served(self, fetches: int, name: str = "a") -> Tale:
        return self.boss_saw("served", 100.0, name=name, fetches=fetches)

    def unlock(self, *files: str, at: float = 5.0) -> Tale:
        return self.boss_saw("unlock", at, files=list(files), held=list(files))

    def present(self, entries: int, name: str = "a") -> Tale:
        return self.boss_saw("present", 100.0, name=name, entries=entries)

    def kill(self, worker: str = WHO, number: int = 9, at: float = 5.0) -> Tale:
        return self.boss_saw("kill", at, worker=worker, signal=number)

    def judged(self, rules: Rules = RULES) -> Verdict:
        return judge(History.of(self.boss, self.workers), rules)


def good() -> Tale:
    """One of everything that may happen."""
    tale = Tale().put().put(version=1, at=3.0).put("b")
    tale.call().call("hold", links=1).call("pinned", same=True).call("plain").call("opener")
    tale.call("plain", outcome="absent")
    tale.call(began=2.9, ended=4.0, version=1, digest="a1")
    tale.call("remove", gone=1).call("clean", None).call("fetch", "b")
    sample = {"name": "a", "wrong": None, "inode": 7}
    tale.boss_saw("sample", path="p/0", version=0, digest="a0", **sample)
    tale.boss_saw("sample", path="p/0", version=0, digest="a0", **sample)
    tale.boss_saw("sample", path="p/1", version=1, digest="a1", **sample)
    tale.boss_saw("budget", occupied=1000, dead=0)
    tale.kill().boss_saw("died", 5.1, worker=WHO, status=-9)
    tale.served(2).present(1).served(1, "b").present(1, "b")
    tale.boss_saw("swept", left=[], occupied=1000).boss_saw("emptied", left=[], entries=0)
    tale.boss_saw("clean-command", status=0, said="").boss_saw("read-all", status=0, said="")
    return tale


def broken(tale: Tale, rules: Rules = RULES) -> list[str]:
    """The invariants that a history breaks."""
    return [violation.invariant for violation in tale.judged(rules).violations]
