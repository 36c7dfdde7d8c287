"""What the tests of training frameworks share: a data set on S3, and what reading it cost."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardcache.cli.demo import S3Server
from tests.support.proxy import Proxy
from tests.support.tars import sample_tar

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


class DataSet:
    """Shards in a bucket, ``train-0000.tar`` and so on, with so many samples each."""

    def __init__(
        self, server: S3Server, bucket: str, proxy: Proxy, shards: int = 4, members: int = 6
    ) -> None:
        for seed in range(shards):
            server.put(bucket, f"train-{seed:04d}.tar", sample_tar(seed, members))
        self.bucket = bucket
        self.spec = f"s3://{bucket}/train-{{0000..{shards - 1:04d}}}.tar"
        self.paths = [f"{bucket}/train-{seed:04d}.tar" for seed in range(shards)]
        self.urls = [f"s3://{path}" for path in self.paths]
        self.keys = [f"{seed:04d}-{n:05d}" for seed in range(shards) for n in range(members)]
        self._proxy = proxy
        proxy.reset()

    @property
    def fetches(self) -> Counter[str]:
        """How often each shard came over the network."""
        traffic = self._proxy.summary()
        return Counter({p: t.object_fetches for p, t in traffic.items() if t.object_fetches})

    def once(self) -> bool:
        """Whether each shard came over the network exactly once, and nothing else did."""
        assert self.fetches == Counter(self.paths), self.fetches
        return True

    def complete(self, seen: Iterable[str]) -> bool:
        """Whether these are all samples, each once."""
        assert Counter(seen) == Counter(self.keys)
        return True


def programs(directory: Path, **scripts: str) -> str:
    """A PATH whose ``shardcache``, ``torchrun`` and ``python`` are this interpreter's; and more."""
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


def run(
    command: list[str], patience: float = 300, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of the examples to its end; it must succeed."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        # Two ranks with a thread for each processor fight for them.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=patience)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{out}{err}"
    return subprocess.CompletedProcess(command, 0, out, err)


PAGE = ROOT / "docs" / "integrations.md"

#: What a section needs beside torch and webdataset, which are always there.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "DataLoader": (),
    "WebLoader and RandomMix": (),
    "wids": ("wids",),
    "Lightning": ("lightning",),
    "pandas": ("pandas", "pyarrow"),
    "Arrow": ("pyarrow",),
    "Ray Data": ("ray.data", "pyarrow"),
    "Hugging Face datasets": ("datasets",),
    "NVIDIA DALI": (),
}


@dataclass(frozen=True)
class Block:
    """One Python block of the page."""

    section: str  # its heading
    number: int  # of the section's blocks
    code: str  # what the user writes
    printed: str  # what stands below it; ``...`` is anything

    def __str__(self) -> str:
        return f"{self.section.split()[0]}-{self.number}"

    def here(self, directory: Path) -> str:
        """The code with the cache, and links to it, below ``directory``."""
        assert "/local/nvme/" in self.code or "shardcache" in self.code
        return self.code.replace("/local/nvme/", f"{directory}/")

    def check(self, printed: str) -> None:
        """Compare with what it really printed."""
        pattern = ".*".join(map(re.escape, self.printed.split("...")))
        assert re.fullmatch(pattern, printed), f"{self}: it printed\n{printed}"


def blocks() -> list[Block]:
    """Every Python block, with the text block that follows it."""
    found = []
    for part in re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        section = part.partition("\n")[0]
        pairs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", part, re.DOTALL)
        assert len(pairs) == part.count("```python"), f"{section}: a block prints nothing"
        found += [Block(section, n, code, text) for n, (code, text) in enumerate(pairs, 1)]
    return found
