"""Sidecars: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shardcache.origins.base import Checksum, ObjectInfo
from shardcache.store.entry import DamagedError, Metadata
from tests.support.storetools import metadata_for

texts = st.text(max_size=30)
maybe = st.none() | texts
sizes = st.integers(0, 2**64 - 1)
infos = st.builds(
    ObjectInfo,
    size=st.none() | sizes,
    etag=maybe,
    version_id=maybe,
    modified=maybe,
    checksum=st.none() | st.builds(Checksum, texts, texts),
)
sidecars = st.builds(
    Metadata,
    url=texts,
    key=texts,
    info=infos,
    size=sizes,
    digest=texts,
    checked=maybe,
    fetched_at=st.integers(0, 4_000_000_000_000).map(lambda ms: ms / 1000),
    boot=texts,
    library=texts,
)


@given(sidecars)
def test_a_sidecar_says_what_was_written_into_it(written: Metadata) -> None:
    found = Metadata.decode(written.encode())
    assert found == replace(written, fetched_at=found.fetched_at)
    assert abs(found.fetched_at - written.fetched_at) <= 0.001
    assert found.info.version == written.info.version


@given(st.data())
def test_a_sidecar_with_bytes_changed_is_damage_or_says_something_valid(data) -> None:
    raw = bytearray(metadata_for(data=b"abc").encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    try:
        found = Metadata.decode(bytes(raw))
    except DamagedError:
        return
    assert Metadata.decode(found.encode()) == found
    assert isinstance(found.info.version, str)


def test_versions_tell_objects_apart() -> None:
    one = ObjectInfo(1, '"a"')
    others = [
        ObjectInfo(2, '"a"'),
        ObjectInfo(1, '"b"'),
        ObjectInfo(1, '"a"', version_id="v1"),
        ObjectInfo(1, '"a"', version_id="v2"),
        ObjectInfo(1, None, modified="monday"),
        ObjectInfo(1, None, modified="tuesday"),
        ObjectInfo(1, "monday"),
    ]
    assert len({info.version for info in (one, *others)}) == 8
    # Neither a null version, nor the time beside an ETag, makes another version.
    assert ObjectInfo(1, '"a"', version_id="null").version == one.version
    assert ObjectInfo(1, '"a"', modified="x").version == one.version
