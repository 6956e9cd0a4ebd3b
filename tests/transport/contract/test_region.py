"""Properties of the descriptors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmarpc.transport import RemoteAccessError, RemoteRegion

u64 = st.integers(0, (1 << 64) - 1)
u32 = st.integers(0, (1 << 32) - 1)
regions = st.builds(
    RemoteRegion, owner=u64, epoch=u32, region=u32, key=u64, offset=st.integers(0, 1 << 62), nbytes=st.integers(0, 1 << 50)
)


@given(regions)
def test_dump_and_load(region: RemoteRegion) -> None:
    blob = region.dump()
    assert len(blob) == RemoteRegion.WIRE_SIZE
    assert RemoteRegion.load(blob) == region
    assert RemoteRegion.load(bytearray(blob)) == region == RemoteRegion.load(memoryview(blob))


@given(st.binary(max_size=100))
def test_any_other_bytes_are_refused(blob: bytes) -> None:
    try:
        region = RemoteRegion.load(blob)
    except RemoteAccessError:
        return
    assert region.dump() == blob


@given(regions, st.data())
def test_slices_stay_inside(region: RemoteRegion, data: st.DataObject) -> None:
    low = data.draw(st.integers(0, region.nbytes))
    high = data.draw(st.integers(low, region.nbytes))
    part = region[low:high]
    assert (part.offset, part.nbytes) == (region.offset + low, high - low)
    assert (part.owner, part.epoch, part.region, part.key) == (region.owner, region.epoch, region.region, region.key)
    assert part[:] == part and region[:] == region
    assert region[low:][: high - low] == part
    if region.nbytes:
        assert region[-1:].nbytes == 1 and region[: -region.nbytes].nbytes == 0


@given(regions)
def test_slices_outside_are_refused(region: RemoteRegion) -> None:
    n = region.nbytes
    for part in (slice(0, n + 1), slice(n + 1, None), slice(n + 5, n + 9), slice(2, 1), slice(0, n, 2)):
        with pytest.raises(RemoteAccessError):
            region[part]
