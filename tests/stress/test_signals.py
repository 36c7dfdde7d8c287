"""A signal at a random moment of a prewarm in two processes."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.stress.conftest import FAST, SLOW
from tests.support.clitools import Command, run_process
from tests.support.storetools import wait_until

SHARDS = 48


def is_running(pid: str) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("seed", range(1 if os.environ.get("FUZZ", "1") == "1" else 25))
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("target", ["owner", "helper", "both"])
def test_the_next_prewarm_completes_the_cache(far, tmp_path, target, number, seed):
    root, urls = tmp_path / "cache", [far.url(shard) for shard in range(SHARDS)]
    far.rate.value = SLOW
    with Command("prewarm", "--json", *urls, directory=root, start_new_session=True) as command:
        owner = str(command.process.pid)
        time.sleep(random.Random(f"{target} {number} {seed}").uniform(0.1, 1.3))
        helpers = Path(f"/proc/{owner}/task/{owner}/children").read_text().split()
        for pid in {"owner": [owner], "helper": helpers, "both": [owner, *helpers]}[target]:
            os.kill(int(pid), number)
        far.rate.value = FAST
        code, out, err = command.end()
    assert "Traceback" not in err
    wait_until(lambda: not any(map(is_running, helpers)))
    if target == "helper":
        outcomes = {shard["outcome"] for shard in json.loads(out)["shards"]}
        assert (code, outcomes | {"cached", "coalesced"}) == (0, {"fetched", "cached", "coalesced"})
    else:
        assert code in (0, -number, 128 + number)
    assert run_process("prewarm", *urls, directory=root)[0] == 0
    assert run_process("clean", "--orphans", directory=root)[0] == 0
    assert not list(root.glob("v1/partial/*"))
    with far.cache(root) as cache:
        assert all(far.read(cache, shard) for shard in range(SHARDS))
