"""A keeper holds what it was given, no more than it may, for its own ranks alone, and ends with its launcher."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moefold.checkpoint.format.storage import RemotePath, open_byte_source, write_synced_file
from moefold.checkpoint.keeper import files
from moefold.checkpoint.keeper.files import (
    KeeperAddress,
    ask_keeper,
    connect_to_keeper,
    empty_keeper,
    fetch_range,
    greet_keeper,
    keeper_name,
    parent_of,
    put_file,
)
from moefold.checkpoint.keeper.process import Keeper
from moefold.config.errors import UserError
from moefold.layout.axes import single_rank_world
from tests.support.launched import is_alive, wait_until
from tests.support.nodes import IN_MEMORY, idle_launcher, keeper_processes, kept_folder

MIB = 1 << 20


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    for name in ("MOEFOLD_LAUNCHER", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with idle_launcher() as pid:
        yield pid


@pytest.fixture
def folder(launcher: int) -> RemotePath:
    return kept_folder(single_rank_world(), [launcher])


def memory_file(raw: bytes) -> int:
    file = os.memfd_create("test")
    os.write(file, raw)
    return file


def test_a_keeper_is_nobodys_child_and_ends_with_its_launcher_however_that_ends(launcher: int):
    shared = set(Path("/dev/shm").iterdir())
    folder = kept_folder(single_rank_world(), [launcher])
    write_synced_file(folder / "a", b"x" * MIB)
    (keeper,) = keeper_processes(launcher)
    parent = Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) not in (os.getpid(), launcher)
    assert (folder / "a").read_bytes() == b"x" * MIB
    os.kill(launcher, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(keeper), 20)
    assert set(Path("/dev/shm").iterdir()) <= shared


def test_a_second_start_finds_what_the_first_one_left(launcher: int, folder: RemotePath):
    write_synced_file(folder / "a", b"first")
    again = kept_folder(single_rank_world(), [launcher])
    assert (again / "a").read_bytes() == b"first"
    assert len(keeper_processes(launcher)) == 1


def test_a_file_is_written_to_the_pages_of_the_one_before_and_has_its_own_content(folder: RemotePath):
    inodes = []
    for number, raw in enumerate([b"first" * MIB, b"second", b"third" * MIB]):
        path = folder / f"step-{number}" / "rank"
        write_synced_file(path, raw)
        folder.files.rm(parent_of(path.key), recursive=True)
        with os.fdopen(folder.files.take_spare(path.key)) as file:
            inodes.append(os.fstat(file.fileno()).st_ino)
            assert os.pread(file.fileno(), len(raw) + 1, 0) == raw
            keeper = folder.files.from_here()[0]
            again = os.dup(file.fileno())
            put_file(keeper, path.key, again, len(raw), 0)
        folder.files.rm(parent_of(path.key), recursive=True)
    assert len(set(inodes)) == 1


def test_pages_of_dropped_files_leave_where_room_is_needed():
    keeper = Keeper(limit=10)
    keeper.put("a/x", memory_file(b"1234567"), 0)
    keeper.remove("a/")
    assert keeper.held_bytes == 7
    keeper.put("b/y", memory_file(b"12345"), 0)
    assert keeper.held_bytes == 5
    assert keeper.take_spare("c/x") == []


def test_a_file_of_this_nodes_keeper_is_read_in_place_and_stays_while_it_is_read(launcher: int, folder: RemotePath):
    write_synced_file(folder / "a", bytes(range(100)))
    read = open_byte_source(folder / "a")
    empty_keeper(launcher)
    write_synced_file(folder / "b" / "a", bytes(100))  # to other pages than those that are read
    assert bytes(read(3, 9)) == bytes(range(3, 9))
    with pytest.raises(FileNotFoundError):
        open_byte_source(folder / "a")(0, 1)


def test_an_emptied_keeper_has_nothing_and_takes_more(launcher: int, folder: RemotePath):
    write_synced_file(folder / "a", b"wrong")
    empty_keeper(launcher)
    assert not folder.exists()
    write_synced_file(folder / "a", b"sound")
    assert (folder / "a").read_bytes() == b"sound"


def test_a_keeper_holds_no_more_than_it_may(folder: RemotePath):
    most = int(IN_MEMORY.memory_gib * (1 << 30))
    file = os.memfd_create("test")
    os.ftruncate(file, most)  # a hole: nothing is written
    keeper = folder.files.from_here()[0]
    put_file(keeper, "/run/whole", file, most, 0)
    with pytest.raises(UserError, match=r"does not fit beside .* raise checkpoint.memory_gib"):
        write_synced_file(folder / "more", b"x")
    put_file(keeper, "/run/whole", file, most, 0)  # it takes the place of the first
    ask_keeper(keeper, {"verb": "remove", "under": "/run/"})
    write_synced_file(folder / "more", b"x")
    os.close(file)


def test_requests_share_a_connection_and_one_that_the_keeper_has_closed_is_replaced(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch
):
    made: list[socket.socket] = []

    def connect(keeper: KeeperAddress) -> socket.socket:
        made.append(connect_to_keeper(keeper))
        return made[-1]

    monkeypatch.setattr(files, "connect_to_keeper", connect)
    monkeypatch.setattr(files, "IDLE", files.IdleConnections())
    for number in range(20):
        write_synced_file(folder / f"{number}", b"x")
    assert len(made) == 1
    made[0].sendall(b"\xff\xff\xff\xff")  # no message: the keeper ends the connection
    assert wait_until(lambda: not made[0].recv(1, socket.MSG_PEEK), 20)
    assert (folder / "7").read_bytes() == b"x"
    with pytest.raises(UserError, match="no file"):
        fetch_range(folder.files.from_here()[0], "/run/none", 0, 1)
    assert (folder / "8").read_bytes() == b"x"
    assert len(made) == 3


def test_room_is_counted_while_files_come_and_go():
    keeper = Keeper(MIB)

    def come_and_go(name: str) -> None:
        for _ in range(500):
            keeper.put(f"/run/{name}", memory_file(b"x"), 0)
            keeper.check_room(1)
            keeper.remove(f"/run/{name}")

    with ThreadPoolExecutor() as threads:
        list(threads.map(come_and_go, "abcd"))
    assert not keeper.files
    keeper.remove("")
    assert keeper.held_bytes == 0


def test_the_port_is_for_those_who_know_the_secret(launcher: int, tmp_path: Path):
    name = keeper_name(launcher)
    files.start_keeper(name, launcher, MIB, serves=True)
    known = greet_keeper(name)
    file = memory_file(bytes(range(256)))
    far = KeeperAddress(name, "127.0.0.1", known["port"], known["secret"])
    put_file(far, "/run/a", file, 256, 0)
    assert fetch_range(far, "/run/a", 3, 9) == fetch_range(KeeperAddress(name), "/run/a", 3, 9) == bytes(range(3, 9))
    with pytest.raises(UserError, match="secret"):
        fetch_range(KeeperAddress(name, "127.0.0.1", known["port"], "guess"), "/run/a", 0, 9)
    with pytest.raises(UserError, match="does not fit"):
        put_file(far, "/run/b", file, 2 * MIB, 0)
    os.close(file)


@pytest.mark.parametrize(
    "raw", [b"", b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\5{}", b'\0\0\0\7{"a":1}', b"\0\0\0\4\x80\x04N."]
)
def test_what_is_no_message_ends_its_connection_and_nothing_else(launcher: int, folder: RemotePath, raw: bytes):
    write_synced_file(folder / "a", b"kept")
    with socket.socket(socket.AF_UNIX) as odd:
        odd.settimeout(20)
        odd.connect(f"\0{keeper_name(launcher)}")
        odd.sendall(raw)
        odd.shutdown(socket.SHUT_WR)
        assert odd.recv(10) == b""
    assert (folder / "a").read_bytes() == b"kept"
