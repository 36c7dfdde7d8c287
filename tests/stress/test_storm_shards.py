"""Shards that say what they are: any wrong byte is seen and named."""

from __future__ import annotations

import io
import re
import tarfile

import pytest

from tests.stress.storm import shards

NAME, SIZE = shards.name(3), 40_960 + 512


def size_of(name: str, version: int) -> int:
    return SIZE + 512 * version


def examine(data: bytes) -> tuple[int | None, str | None]:
    return shards.examine(NAME, data, size_of)


def make(version: int = 0, name: str = NAME) -> bytes:
    return shards.make(name, version, size_of(name, version))


def test_every_version_is_recognised() -> None:
    for version in (0, 1, 17):
        assert examine(make(version)) == (version, None)


def test_a_shard_is_a_tar_archive() -> None:
    with tarfile.open(fileobj=io.BytesIO(make(4)), mode="r|*") as archive:
        (member,) = list(archive)
    assert member.name == "shard-0003.v000004.txt"
    assert member.size == size_of(NAME, 4) - 1536


BLOCK = shards.BLOCK
DAMAGES = {
    "a splice of two versions": (
        make()[: 2 * BLOCK] + make(1)[2 * BLOCK : SIZE],
        "version 1 offset 8192",
    ),
    "a hole": (make()[:BLOCK] + bytes(BLOCK) + make()[2 * BLOCK :], "at 4096: zeros"),
    "a lost tail": (make()[: 3 * BLOCK], "at 12288: nothing"),
    "half a block lost": (make()[: SIZE - 700], "at 40960: nothing|at 36864"),
    "another shard": (make(name=shards.name(9)), "shard-0009.tar version 0 offset 4096"),
    "another place": (make()[:BLOCK] + make()[4 * BLOCK :], "at 4096: .*offset 16384"),
    "bytes too many": (make() + b"x", "at 40960"),
    "one wrong byte": (make()[:5000] + b"!" + make()[5001:], "at 4096: among others"),
    "a page of a web server": (b"<html>" * 2000, "first block holds"),
    "nothing": (b"", "0 bytes; the first block holds nothing"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_wrong_bytes_say_what_they_are(what: str) -> None:
    data, said = DAMAGES[what]
    wrong = examine(data)[1]
    assert wrong is not None and re.search(said, wrong)
