"""Units: what people write becomes one number, and what we write can be read back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology import units

POSITIVE = st.floats(min_value=1e-9, max_value=1e15, allow_nan=False)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8 GiB", 8 * 2**30),
        ("512 MB", 512_000_000),
        ("366MiB", 366 * 2**20),
        ("1.5 kB", 1500),
        (" 7 B ", 7),
        ("0.3 B", 0),
    ],
)
def test_sizes_become_whole_bytes(text: str, num_bytes: int) -> None:
    assert units.parse_bytes(text) == num_bytes


def test_rates_become_bits_per_second_whether_written_in_bits_or_bytes() -> None:
    assert units.parse_rate("100 Mbit/s") == 100e6
    assert units.parse_rate("1 Gbit/s") == 1e9
    assert units.parse_rate("12.5 MB/s") == 100e6


def test_memory_bandwidth_becomes_bytes_per_second() -> None:
    assert units.parse_byte_rate("8 GB/s") == 8e9


def test_compute_becomes_operations_per_second() -> None:
    assert units.parse_flops("1.2 TFLOP/s") == 1.2e12


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2 ms", 0.002), ("10 s", 10.0), ("150 us", 0.00015), ("2 min", 120.0), ("40 ns", 4e-8)],
)
def test_durations_become_seconds(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["8", "GiB", "", "-8 GiB", "8 GiB GiB", "1e3 B", "8,5 GiB", "8 gib", "8 Gbit/s"]
)
def test_what_is_no_size_is_refused_with_the_text_and_the_units_there_are(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: write a number and one of B, KiB, MiB") as error:
        units.parse_bytes(text)
    assert f'"{text}"' in str(error.value) and '"8 GiB"' in str(error.value)


@pytest.mark.parametrize(
    ("parse", "text", "meant"),
    [
        (units.parse_bytes, "8 gib", "8 GiB"),
        (units.parse_rate, "1 Gbits", "1 Gbit/s"),
        (units.parse_byte_rate, "8 GB", "8 GB/s"),
        (units.parse_duration, "5 sec", "5 s"),
    ],
)
def test_a_unit_that_is_nearly_right_is_answered_with_the_one_that_was_meant(
    parse, text: str, meant: str
) -> None:
    with pytest.raises(ValueError, match=f'did you mean "{meant}"'):
        parse(text)


def test_the_shortest_exact_form_of_a_size_is_written() -> None:
    assert units.format_bytes(350 * 2**20) == "350 MiB"
    assert units.format_bytes(8_000_000_000) == "8 GB"
    assert units.format_bytes(1025) == "1025 B"
    assert units.format_bytes(0) == "0 B"


def test_the_rounded_form_is_for_reading() -> None:
    assert units.format_bytes_rounded(6_710_886) == "6.4 MiB"
    assert units.format_bytes_rounded(-2048) == "-2.0 KiB"
    assert units.format_bytes_rounded(17) == "17 B"
    assert units.format_bytes_rounded(0) == "0 B"


def test_sizes_of_one_sentence_have_one_unit_in_which_they_differ() -> None:
    MIB = 2**20
    assert units.in_one_unit(100 * MIB, 104_333_312, 0) == ["100.0 MiB", "99.5 MiB", "0.0 MiB"]
    assert units.in_one_unit(8192 * MIB, 350 * MIB) == ["8.0 GiB", "0.3 GiB"]
    assert units.in_one_unit(8192 * MIB, 8191 * MIB) == ["8.000 GiB", "7.999 GiB"]
    assert units.in_one_unit(8192 * MIB, 8192 * MIB - 1) == ["8589934592 B", "8589934591 B"]
    assert units.in_one_unit(24_000, 8_000, 1_000, 999)[2:] == ["0.977 KiB", "0.976 KiB"]
    assert units.in_one_unit(0, 0) == ["0 B", "0 B"]


def test_the_largest_unit_that_fits_is_written() -> None:
    assert units.format_rate(100e6) == "100 Mbit/s"
    assert units.format_byte_rate(8e9) == "8 GB/s"
    assert units.format_flops(1.2e11) == "120 GFLOP/s"
    assert units.format_duration(0.00015) == "150 us"
    assert units.format_duration(90.0) == "90 s"


@given(st.integers(0, 2**63))
def test_sizes_round_trip(num_bytes: int) -> None:
    assert units.parse_bytes(units.format_bytes(num_bytes)) == num_bytes


@given(st.integers(0, 2**20), st.sampled_from(sorted(units.BYTES)))
def test_whole_counts_of_every_unit_round_trip(count: int, unit: str) -> None:
    num_bytes = count * units.BYTES[unit]
    assert (
        units.parse_bytes(f"{count} {unit}") == num_bytes == units.parse_bytes(units.format_bytes(num_bytes))
    )


@given(POSITIVE)
def test_rates_speeds_and_durations_round_trip(value: float) -> None:
    assert units.parse_rate(units.format_rate(value)) == value
    assert units.parse_byte_rate(units.format_byte_rate(value)) == value
    assert units.parse_flops(units.format_flops(value)) == value
    assert units.parse_duration(units.format_duration(value)) == value
