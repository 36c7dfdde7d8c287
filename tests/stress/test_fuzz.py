"""Random damage on the disk."""

import os
import random
import sys
from pathlib import Path

import pytest

from shardcache import Cache
from tests.support.tars import make_tar

#: A factor for the number of examples.
TRIES = int(os.environ.get("FUZZ", "1"))


SHARDS = {f"{number}.tar": make_tar(number, 2 + 2 * number, 200) for number in range(3)}
SHARDS["big.tar"] = make_tar(9, 700, 1500)  # of several blocks
KINDS = ["flip", "flip", "flip", "cut", "grow", "noise", "gone", "link", "pipe", "directory"]


def spoil(path, kind, draw):
    """Damage a file, or put something else in its place."""
    content = bytearray(path.read_bytes())
    path.unlink()
    if kind == "flip" and content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    make = {
        "flip": lambda: path.write_bytes(content),
        "cut": lambda: path.write_bytes(content[: draw.randrange(len(content) + 1)]),
        "grow": lambda: path.write_bytes(content + draw.randbytes(draw.randrange(1, 2000))),
        "noise": lambda: path.write_bytes(draw.randbytes(draw.randrange(2000))),
        "gone": lambda: None,
        "link": lambda: path.symlink_to("/nowhere"),
        "pipe": lambda: os.mkfifo(path),
        "directory": path.mkdir,
    }
    make[kind]()


@pytest.mark.parametrize("seed", range(25 * TRIES))
def test_reads_from_a_damaged_cache_are_right_and_repair_it(seed, tmp_path, monkeypatch):
    draw, root, origin = random.Random(seed), tmp_path / "cache", tmp_path / "origin"
    origin.mkdir()
    for name, data in SHARDS.items():
        (origin / name).write_bytes(data)
    modules = [each for name, each in sys.modules.items() if name.startswith("shardcache")]
    for step in range(12):
        # As after a reboot: entries must be verified.
        for module in [each for each in modules if hasattr(each, "boot_id")]:
            monkeypatch.setattr(module, "boot_id", lambda step=step: f"boot-{seed}-{step}")
        with Cache(root, min_free=0, attempts=1, cache_local=True) as cache:
            for name in draw.sample(sorted(SHARDS), 2):
                with cache.open(f"file://{origin}/{name}") as stream:
                    most = draw.choice((-1, 1000))
                    assert stream.read(most) == SHARDS[name][: most if most > 0 else None]
            if draw.random() < 0.2 and (root / "manifest.json").is_file():
                try:
                    cache.clean(everything=draw.random() < 0.5)
                except OSError as exn:  # a link or a directory in place of the lock file
                    lock = Path(exn.filename)
                    assert lock.parent.name == "locks" and (lock.is_symlink() or lock.is_dir())
        assert sorted(os.listdir(tmp_path)) == ["cache", "origin"]
        files = sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink())
        if draw.random() < 0.6:  # of an entry
            files = [path for path in files if "objects" in path.parts]
        path, kind = draw.choice([*files, None]), draw.choice(KINDS)
        # The cache refuses other kinds of manifests.
        if path and (path.name != "manifest.json" or kind not in ("link", "pipe", "directory")):
            spoil(path, kind, draw)
