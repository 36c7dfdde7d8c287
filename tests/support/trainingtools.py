"""Helpers for tests of training frameworks: a data set on S3, programs, and pages with code."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.proxy import Proxy
from tests.support.storetools import wait_until
from tests.support.tars import sample_tar

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def keys(samples: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys of samples, in their order."""
    return [sample["__key__"] for sample in samples]


class DataSet:
    """Shards ``train-0000.tar``, ``train-0001.tar`` ... in a bucket."""

    def __init__(self, s3, bucket: str, proxy: Proxy, shards: int = 4, members: int = 6) -> None:
        for seed in range(shards):
            s3.put(bucket, f"train-{seed:04d}.tar", sample_tar(seed, members))
        self.spec = f"s3://{bucket}/train-{{0000..{shards - 1:04d}}}.tar"
        self.paths = [f"{bucket}/train-{seed:04d}.tar" for seed in range(shards)]
        self.urls = [f"s3://{path}" for path in self.paths]
        self.keys = [f"{seed:04d}-{n:05d}" for seed in range(shards) for n in range(members)]
        self._proxy = proxy
        proxy.reset()

    @property
    def fetches(self) -> Counter[str]:
        """The number of downloads of each object that was downloaded."""
        return self._proxy.fetches()

    def once(self) -> bool:
        """Check that each shard was downloaded exactly once, and no other object."""
        assert self.fetches == Counter(self.paths), self.fetches
        return True

    def complete(self, seen: Iterable[str]) -> bool:
        """Check that these are the keys of all samples, each once."""
        assert Counter(seen) == Counter(self.keys)
        return True


def programs(directory: Path, **scripts: str) -> str:
    """Return a PATH with ``shardcache``, ``torchrun``, ``python`` and the given scripts."""
    directory.mkdir()
    python = f"exec '{sys.executable}'"
    scripts = {
        "python": f'{python} "$@"',
        "shardcache": f'{python} -m shardcache "$@"',
        "torchrun": f'{python} -m torch.distributed.run "$@"',
        **scripts,
    }
    for name, text in scripts.items():
        (directory / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (directory / name).chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def _kill_group(group: int) -> None:
    """Kill the processes of a group, but not multiprocessing's, which remove its semaphores."""
    os.killpg(group, signal.SIGSTOP)
    is_alive = True
    while is_alive:  # because a fork may have been under way
        is_alive = False
        for pid in sorted(int(each.name) for each in Path("/proc").glob("[0-9]*")):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended
                command = Path(f"/proc/{pid}/cmdline").read_bytes()  # a zombie has none
                if os.getpgid(pid) == group and command and b"resource_tracker" not in command:
                    os.kill(pid, signal.SIGKILL)
                    is_alive = True
    os.killpg(group, signal.SIGCONT)


def run(command: list[str], patience=300, cwd=ROOT, kill_when=None, **environment: str):
    """Run a program to its end, and check that it succeeds; or kill it and its children earlier."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        # With one thread per core each, two ranks slow each other down.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        start_new_session=True,
    )
    try:
        if kill_when is not None:
            wait_until(lambda: kill_when() or process.poll() is not None)
            _kill_group(process.pid)
        out, err = process.communicate(timeout=patience)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    expected = 0 if kill_when is None else -signal.SIGKILL
    assert process.returncode == expected, f"{command} ended with {process.returncode}:\n{out}{err}"
    return subprocess.CompletedProcess(command, 0, out, err)


#: Starts ranks without torchrun, whose ranks would survive it.
_RANKS = """
for rank in $(seq 0 $((WORLD_SIZE - 1))); do RANK=$rank LOCAL_RANK=$rank "$@" & done
wait -n && wait
"""


def run_ranks(ranks: int, command: list[str], kill_when=None, **environment: str):
    """Run a Python script as the ranks of one node; see `run`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    variables |= {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}"}
    command = ["bash", "-c", _RANKS, "-", sys.executable, *command]
    return run(command, kill_when=kill_when, **variables, **environment)


PAGE = ROOT / "docs" / "integrations.md"

#: The sections of the page that need only torch and webdataset; tests/packages runs the others.
PLAIN = {"DataLoader", "WebLoader and RandomMix", "NVIDIA DALI"}


@dataclass(frozen=True)
class Block:
    """A Python block of the page."""

    section: str  # its heading
    number: int  # within the section
    code: str
    printed: str  # the expected output, where ``...`` matches anything

    def __str__(self) -> str:
        return f"{self.section.split()[0]}-{self.number}"

    @property
    def resumes(self) -> bool:
        """Whether it is a program for several ranks that resumes an epoch."""
        return "ShardBatchSampler" in self.code

    def here(self, directory: Path) -> str:
        """Return the code with all its paths below ``directory``."""
        assert "/local/nvme/" in self.code or "shardcache" in self.code
        return self.code.replace("/local/nvme/", f"{directory}/")

    def check(self, printed: str) -> None:
        """Check the output against the page."""
        pattern = ".*".join(map(re.escape, self.printed.split("...")))
        assert re.fullmatch(pattern, printed), f"{self}: it printed\n{printed}"


def blocks() -> list[Block]:
    """Return every Python block with the text block that follows it."""
    found = []
    for part in re.split(r"^###? ", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        section = part.partition("\n")[0]
        pairs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", part, re.DOTALL)
        assert len(pairs) == part.count("```python"), f"{section}: a block prints nothing"
        found += [Block(section, n, code, text) for n, (code, text) in enumerate(pairs, 1)]
    return found
