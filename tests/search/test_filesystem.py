from __future__ import annotations

from pathlib import Path

import pytest

from deepthin.engine.errors import DeepthinError
from deepthin.search import filesystem, folder
from deepthin.search.config import SearchConfig
from deepthin.search.filesystem import network_filesystem
from deepthin.search.folder import RunFolder

MOUNTS = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:40 / /net/home rw,relatime shared:9 - nfs4 server:/home rw,vers=4.2
31 30 254:2 / /net/home/local\\040disk rw - xfs /dev/vdb rw
40 22 0:50 / /mnt/phone rw - fuse.sshfs phone:/ rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp/run", ""),
        ("/net/home/me/run", "nfs4"),
        ("/net/homes/me", ""),
        ("/net/home/local disk/run", ""),
        ("/mnt/phone", "fuse.sshfs"),
    ],
)
def test_the_nearest_mount_decides(path: str, kind: str, tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert network_filesystem(Path(path), mounts) == kind


def test_without_a_list_of_mounts_nothing_is_said(tmp_path: Path) -> None:
    assert network_filesystem(tmp_path, tmp_path / "absent") == ""
    (tmp_path / "odd").write_text("no such line\n - \n")
    assert network_filesystem(tmp_path, tmp_path / "odd") == ""


def test_this_test_runs_on_a_local_disk_and_its_folder_is_taken(tmp_path: Path) -> None:
    assert filesystem.network_filesystem(tmp_path) == ""
    RunFolder(tmp_path / "run", SearchConfig(trials=3)).__exit__()


def test_run_folders_on_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "network_filesystem", lambda path: "nfs4")
    with pytest.raises(DeepthinError, match=r"run: lies on a network file system \(nfs4\), where .* a local disk"):
        RunFolder(tmp_path / "run", SearchConfig(trials=3))
    assert not (tmp_path / "run").exists()
