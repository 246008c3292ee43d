"""A container's memory limit is found in the files of control groups, and the room that it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from gba_hvd.shm import memory_limit
from gba_hvd.shm.memory_limit import MemoryLimit, n_kills, tightest
from gba_hvd.training.job_state import LocalHost

GIB = 1 << 30
Groups = dict[str, tuple[object, int]]
V1_NONE = 0x7FFFFFFFFFFFF000
V2 = "31 30 0:27 {} /sys/fs/cgroup rw - cgroup2 cgroup rw,nsdelegate"
V1 = (
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "33 31 0:30 {} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "34 31 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
)


def tree(root: Path, cgroup: str, mounts: str, groups: Groups) -> Path:
    """groups: folder -> (limit, use); of each use 2 GiB are pages of files."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text(f"20 1 0:5 / /proc rw - proc proc rw\n{mounts}\n")
    is_old = "unified" in mounts
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_old else ("memory.max", "memory.current")
    total = "total_" * is_old
    for name, values in groups.items():
        folder = root / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, value in zip(names, values, strict=True):
            (folder / file).write_text(f"{value}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{total}inactive_file {GIB}\n{total}active_file {GIB}\n")
    return root


@pytest.mark.parametrize(
    ("cgroup", "mounts", "groups", "expected"),
    [
        ("0::/", V2.format("/"), {".": (8 * GIB, 3 * GIB)}, (8, 1, ".")),
        ("0::/", V2.format("/"), {".": ("max", 3 * GIB)}, None),
        (
            "0::/pod/app", V2.format("/"),
            {"pod": (8 * GIB, 8 * GIB), "pod/app": (4 * GIB, 3 * GIB), "pod/other": (GIB, GIB)}, (8, 6, "pod"),
        ),
        ("0::/pod/app", V2.format("/"), {"pod": (8 * GIB, 6 * GIB), "pod/app": ("max", 0)}, (8, 4, "pod")),
        ("0::/docker/abc", V2.format("/docker/abc"), {".": (8 * GIB, 3 * GIB)}, (8, 1, ".")),
        ("0::/../../x", V2.format("/"), {".": (8 * GIB, 3 * GIB)}, (8, 1, ".")),
        ("4:memory:/a\n1:cpu:/b\n0::/", V1.format("/"), {"memory/a": (6 * GIB, 4 * GIB)}, (6, 2, "memory/a")),
        ("4:memory:/a\n1:cpu:/b\n0::/", V1.format("/"), {"memory/a": (V1_NONE, 4 * GIB)}, None),
        ("0::/", V2.format("/"), {}, None),
    ],
)  # fmt: skip
def test_the_limit_that_leaves_least_is_found_and_pages_of_files_count_as_free(
    tmp_path: Path,
    cgroup: str,
    mounts: str,
    groups: Groups,
    expected: tuple[int, int, str] | None,
) -> None:
    found = tightest(tree(tmp_path, cgroup, mounts, groups))
    if expected is None:
        assert found is None
        return
    limit, used, folder = expected
    file = "memory.limit_in_bytes" if "unified" in mounts else "memory.max"
    assert found == MemoryLimit(limit * GIB, used * GIB, tmp_path / "sys/fs/cgroup" / folder / file)
    assert found.free == (limit - used) * GIB


@pytest.mark.parametrize(
    ("cgroup", "mounts", "file"),
    [
        ("0::/pod/app", V2.format("/"), "pod/memory.events"),
        ("4:memory:/a\n0::/", V1.format("/"), "memory/a/memory.oom_control"),
    ],
)
def test_processes_that_were_killed_at_the_limit_are_counted_and_reported_once(
    tmp_path: Path, cgroup: str, mounts: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, limit = tree(tmp_path, cgroup, mounts, {}), MemoryLimit(4 * GIB, 0, Path("/sys/fs/cgroup/memory.max"))
    counts = root / "sys/fs/cgroup" / file
    counts.parent.mkdir(parents=True)
    monkeypatch.setattr(memory_limit, "n_kills", lambda: n_kills(root))
    monkeypatch.setattr(memory_limit, "tightest", lambda: limit)
    host = LocalHost(n_kills=0)
    assert host.killed_for_memory() == ""
    counts.write_text("oom 3\noom_kill 1\noom_group_kill 0\n")
    text = host.killed_for_memory()
    assert text.startswith("The kernel has killed 1 process of this container or service (status 137), probably at ")
    assert "max: 4.00 GiB): raise it" in text
    assert host.killed_for_memory() == ""
    monkeypatch.setattr(memory_limit, "tightest", lambda: None)
    counts.write_text("oom_kill 3\n")
    assert "has killed 2 processes" in (text := host.killed_for_memory()) and "for lack of memory" in text


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert tightest(tmp_path) is None and n_kills(tmp_path) == 0
