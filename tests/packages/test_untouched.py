"""``shardcache run`` with the training of open_clip and the datasets of timm.

Runs in the environment that `make test-integrations` creates.
"""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from shardcache.units import format_bytes
from tests.support.tars import tar_of
from tests.support.trainingtools import run

PYTHON = str(Path(sys.prefix) / "open_clip" / "bin" / "python")
RUN = [PYTHON, "-m", "shardcache", "run", "--", PYTHON]

#: The smallest model of open_clip.
MODEL = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 64, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 8, "heads": 1, "layers": 1},
}

TIMM = """
import hashlib, multiprocessing, sys, timm.data, torch

def main(root, method):
    multiprocessing.set_start_method(method)
    dataset = timm.data.create_dataset("wds/pairs", root, split="{0000..0003}.tar|32")
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=2, persistent_workers=True)
    for epoch in range(2):
        for image, label in loader:
            print(hashlib.md5(image.tobytes()).hexdigest(), label)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def pairs(shard):
    """Return a shard of eight pictures of different colours, with captions and labels."""
    found = []
    for number in range(8):
        picture = io.BytesIO()
        Image.new("RGB", (16, 16), (shard, number, 0)).save(picture, "png")
        key = f"{shard:04d}{number:04d}"
        found += [(f"{key}.png", picture.getvalue()), (f"{key}.txt", b"one colour")]
        found.append((f"{key}.cls", b"%d" % number))
    return tar_of(found)


SHARDS = {f"pairs/{shard:04d}.tar": pairs(shard) for shard in range(4)}


@pytest.fixture
def local(bench, s3):
    """Store the shards as files and in the bucket; returns the directory."""
    directory = bench.directory / "pairs"
    directory.mkdir()
    for name, content in SHARDS.items():
        (bench.directory / name).write_bytes(content)
        s3.put("bucket", name, content)
    return directory


def check(bench, error):
    """Check that two epochs downloaded each shard once, and the figures in the last line."""
    assert bench.fetched() == set(SHARDS)
    size = format_bytes(sum(map(len, SHARDS.values())))
    last = r"shardcache: 8 shards opened, 4 of them from the cache in \S+; {} came from the origin"
    assert re.fullmatch(last.format(re.escape(size)), error.splitlines()[-1])


@pytest.mark.parametrize("url", ["s3://{}", "pipe:aws s3 cp s3://{} -"])
def test_open_clip_trains_two_epochs(url, bench, local):
    (bench.directory / "open_clip_config.json").write_text(json.dumps({"model_cfg": MODEL}))
    arguments = f"""
        --model local-dir:{bench.directory} --precision fp32 --logs {bench.directory} --name log
        --dataset-type webdataset --train-num-samples 32 --batch-size 8 --workers 2 --epochs 2
    """
    data = "--train-data", url.format("bucket/pairs/{0000..0003}.tar")
    check(bench, run([*RUN, "-m", "open_clip_train.main", *arguments.split(), *data]).stderr)
    assert (bench.directory / "log" / "checkpoints" / "epoch_2.pt").exists()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_timm_reads_the_same_as_from_local_files(method, bench, local):
    program = bench.directory / "program.py"
    program.write_text(TIMM)
    expected = run([PYTHON, str(program), str(local), "fork"]).stdout
    ended = run([*RUN, str(program), "s3://bucket/pairs", method])
    check(bench, ended.stderr)
    assert ended.stdout == expected and len(set(expected.split())) > 32
