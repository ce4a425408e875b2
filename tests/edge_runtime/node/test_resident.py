"""Memory that starting took goes back, and the process goes on as before."""

import sys
from pathlib import Path

import psutil
import pytest
import torch

from edge_runtime.node.resident import _code_of, give_back, memory_room

MAPS = """\
7f0000000000-7f0000001000 r-xp 00000000 08:01 1 /opt/torch/lib/libtorch_cpu.so
7f0000001000-7f0000002000 rw-p 00001000 08:01 1 /opt/torch/lib/libtorch_cpu.so
7f0000003000-7f0000004000 r-xp 00000000 08:01 2 /usr/lib/libc.so.6
7f0000005000-7f0000009000 rw-p 00000000 00:00 0
7f000000a000-7f000000c000 r-xp 00000000 08:01 3 /my folder/libtorch_python.so
"""


def test_only_code_of_the_named_libraries_is_given_back():
    assert list(_code_of(MAPS, ("libtorch",))) == [
        (0x7F0000000000, 0x7F0000001000),
        (0x7F000000A000, 0x7F000000C000),
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process its mappings")
def test_giving_back_lowers_what_is_resident_and_torch_still_computes():
    torch.randn(8, 8) @ torch.randn(8, 8)
    before = psutil.Process().memory_info().rss
    give_back()
    assert psutil.Process().memory_info().rss < before
    assert torch.equal(torch.ones(3, 3) @ torch.ones(3, 3), torch.full((3, 3), 3.0))


def group_at(folder: Path, limit: tuple[str, str], used: tuple[str, str], cached: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit[0]).write_text(limit[1])
    (folder / used[0]).write_text(used[1])
    (folder / "memory.stat").write_text(f"anon 1\n{cached}\n")


def test_the_room_of_a_process_is_what_the_tightest_group_above_it_leaves(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("0::/a/b\n")
    group_at(tmp_path / "a" / "b", ("memory.max", "max\n"), ("memory.current", "300\n"), "inactive_file 100")
    assert memory_room(own, tmp_path) is None
    group_at(tmp_path / "a", ("memory.max", "1000\n"), ("memory.current", "700\n"), "inactive_file 100")
    assert memory_room(own, tmp_path) == 400
    group_at(tmp_path / "a" / "b", ("memory.max", "500\n"), ("memory.current", "300\n"), "inactive_file 100")
    assert memory_room(own, tmp_path) == 300


def test_the_older_groups_are_read_too_and_what_cannot_be_read_is_no_limit(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("5:cpu:/x\n4:memory:/x\n0::/\n")
    limit, used = ("memory.limit_in_bytes", "800"), ("memory.usage_in_bytes", "900")
    assert memory_room(own, tmp_path) is None
    group_at(tmp_path / "memory" / "x", limit, used, "total_inactive_file 20")
    assert memory_room(own, tmp_path) == 0
    group_at(tmp_path / "memory" / "x", (limit[0], str(2**63 - 4096)), used, "total_inactive_file 20")
    assert memory_room(own, tmp_path) is None
    assert memory_room(tmp_path / "nothing", tmp_path) is None
