"""Memory of this machine, read from files as Linux writes them."""

from pathlib import Path

import pytest

from moefold.plan.machine.this_machine import host_memory, this_machine

MEMINFO = "MemTotal:       24689632 kB\nMemFree:        19000000 kB\n"
PHYSICAL = 24_689_632 * 1024


def machine(root: Path, membership: str, limits: dict[str, str]) -> Path:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(MEMINFO)
    (root / "proc" / "self" / "cgroup").write_text(membership)
    for name, text in limits.items():
        file = root / "sys" / "fs" / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/\n", {}, PHYSICAL),
        ("0::/job\n", {"job/memory.max": "max\n"}, PHYSICAL),
        ("0::/job/step\n", {"job/memory.max": "1073741824\n", "job/step/memory.max": "max\n"}, 1 << 30),
        ("0::/unseen/from/here\n", {"memory.max": "2147483648\n"}, 2 << 30),
        ("4:memory:/box\n0::/\n", {"memory/box/memory.limit_in_bytes": "3221225472\n"}, 3 << 30),
        ("4:cpu,memory:/box\n", {"memory/box/memory.limit_in_bytes": "9223372036854771712\n"}, PHYSICAL),
    ],
)
def test_host_memory_is_that_of_the_machine_or_the_smallest_limit(
    membership: str, limits: dict[str, str], expected: int, tmp_path: Path
):
    assert host_memory(machine(tmp_path, membership, limits)) == expected


def test_a_system_without_proc_has_no_known_memory(tmp_path: Path):
    assert host_memory(tmp_path) is None


def test_this_machine_has_memory():
    found = this_machine()
    assert found.host is not None
    assert found.host > 1 << 28
