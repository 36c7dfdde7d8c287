"""The output and exit codes of ``shardcache verify``."""

import os
import re
import signal
import threading
import time
from pathlib import Path

from shardcache.cache import Cache
from shardcache.store import digest
from tests.support.storetools import damage


def test_damage_is_a_line_and_exit_4_until_it_is_repaired(run, warm, data, proxy):
    proxy.reset()
    sound = r"verified 4 shards, [\d.]+ KB in [\d.]+ m?s: nothing is wrong\n"
    code, out, err = run("verify")
    assert (code, err) == (0, "") and re.fullmatch(sound, out)
    assert run("verify", "-q") == (0, "", "") and proxy.requests() == []
    damage(Cache().entry(warm[1]).data)
    code, out, err = run("verify")
    line, summary = out.splitlines()
    assert code == 4 and re.fullmatch(r"verified 4 shards, .*: 1 damaged", summary)
    assert re.fullmatch(rf"damaged +{warm[1]} +its bytes changed since they were downloaded", line)
    assert "--repair" in err and run("verify", "-q")[:2] == (4, f"{line}\n")
    assert "verified 1 shard," in run("verify", "train-0002.tar")[1]
    assert run("verify", "train-0001.tar", "train-0002.tar")[0] == 4
    assert run.out("verify", "--quick").startswith("compared the sizes of 4 shards, ")
    assert run.out("verify", "--repair", "-n", code=4).endswith(": 1 damaged, to be set aside\n")
    code, out, err = run("verify", "--repair")
    line, summary = out.splitlines()
    assert (code, err) == (4, "") and line.endswith(" (set aside)")
    assert summary.endswith(": 1 damaged, 1 set aside")
    path = run("path", "--fetch", warm[1])[1].strip()
    assert Path(path).read_bytes() == data["train-0001.tar"]
    run.out("verify")
    os.truncate(path, 1)
    for options in ([], ["--quick"], ["--quick", "--repair"]):  # an entry that cannot be opened
        out = run.out("verify", *options, code=4)
        assert "1 bytes, not" in out and ("set aside" in out) == (len(options) == 2)
    assert run("verify")[1].startswith("verified 3 shards, ")


def test_an_interrupted_verify_prints_its_progress(run, warm, monkeypatch):
    sent = threading.Lock()

    def endless(fd):
        if sent.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            time.sleep(0.01)
            yield b""

    monkeypatch.setattr(digest, "read_blocks", endless)
    assert run.out("verify", code=130).startswith("interrupted: verified 0 shards")
