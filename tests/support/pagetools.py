"""docs/integrations.md, as code: its blocks, what they need, and what they should print."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.trainingtools import ROOT

PAGE = ROOT / "docs" / "integrations.md"

#: What a section needs beside torch and webdataset, which are always there.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "DataLoader": (),
    "WebLoader and RandomMix": (),
    "open_clip": (),
    "wids": ("wids",),
    "Lightning": ("lightning",),
    "pandas": ("pandas", "pyarrow"),
    "Arrow": ("pyarrow",),
    "Ray Data": ("ray.data", "pyarrow"),
    "Hugging Face datasets": ("datasets",),
}

#: What a section reads, of the bucket; the others read all four shards.
TABLES: Mapping[str, set[str]] = {
    "pandas": {"table.csv", "table/part-0.parquet", "table/part-1.parquet"},
    "Arrow": {"table/part-0.parquet", "table/part-1.parquet"},
    "Ray Data": {"table/part-0.parquet", "table/part-1.parquet"},
    "Hugging Face datasets": {"table.csv"},
}
NO_SHARDS = {"pandas", "Arrow"}


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

    @property
    def objects(self) -> set[str]:
        """What it reads."""
        shards = set() if self.section in NO_SHARDS else {f"train-{n:04d}.tar" for n in range(4)}
        return shards | TABLES.get(self.section, set())


def blocks() -> list[Block]:
    """Every Python block, with the text block that follows it."""
    found = []
    for part in re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        section = part.partition("\n")[0]
        pairs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", part, re.DOTALL)
        assert len(pairs) == part.count("```python"), f"{section}: a block prints nothing"
        found += [Block(section, n, code, text) for n, (code, text) in enumerate(pairs, 1)]
    return found
