"""Memory that starting took goes back, and the process goes on as before."""

import sys

import psutil
import pytest
import torch

from edge_runtime.node.resident import _code_of, give_back

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
