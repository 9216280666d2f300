"""Reading a log again after a break gives every line once, in order."""

from hypothesis import given
from hypothesis import strategies as st

from d2plm.launch.logs import _Place

STAMPS = ["2026-01-02T03:04:05.1Z", "2026-01-02T03:04:05.12Z", "2026-01-02T03:04:06Z"]


@given(
    st.lists(st.sampled_from(range(3)), max_size=12).map(sorted),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4),
)
def test_every_line_comes_once_however_often_the_connection_breaks(
    stamps: list[int], breaks: list[tuple[int, int]]
) -> None:
    log = [f"{STAMPS[stamp]} line {number}" for number, stamp in enumerate(stamps)]
    place, read = _Place(), []
    for asked_again_from, broken_at in [*breaks, (0, len(log))]:
        seconds = sorted({stamps.index(s) for s in stamps[:asked_again_from]}, reverse=True)
        # Whole time stamps are sent again, and none that has not been read is left out.
        first = next((s for s in seconds if s <= len(read)), 0)
        read += list(place.new(iter(log[first : max(first, broken_at)])))
    assert read == [f"line {number}" for number in range(len(log))]
