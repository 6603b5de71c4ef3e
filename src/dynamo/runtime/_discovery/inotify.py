"""Tells at once which names changed in a directory, where the system can: inotify.

Owns the one inotify descriptor of a liveness thread and the rule which directories it
may be trusted with.  Knows nothing of records, and asks for no news of file times: every
live record gets a new one each 3.3 s.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

if sys.platform == "linux":
    # 20 ms, which only processes pay that watch a file store; they are in the thread.
    from asyncinotify import Inotify, Mask

    _NEWS = Mask.CREATE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE
    _NEWS |= Mask.CLOSE_WRITE
    _LOST = Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.IGNORED | Mask.UNMOUNT
    _ASKED = _NEWS | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from asyncinotify import Event, Watch

    OnNames = Callable[[set[str] | None], None]

_MOUNTS = "/proc/self/mountinfo"
# What other hosts change in these the kernel here does not hear of.
_SHARED_KINDS = frozenset(
    (
        "9p",
        "acfs",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
    )
)


class NotFollowed(Exception):
    """This directory cannot be followed, at least now; the text says why."""


class Following:
    """A directory that is being followed, until `close` or until it is lost."""

    def __init__(
        self, notifier: Notifier, watch: Watch, inode: int, on_names: OnNames
    ) -> None:
        self._notifier = notifier
        self._watch = watch
        self.inode = inode
        self.on_names = on_names
        self.lost = False
        """The directory was deleted or moved: what has its name now is another one."""

    def close(self) -> None:
        self.lost = True
        self._notifier.drop(self._watch)


class Notifier:
    """Follows directories; to be used in one thread with a running loop.

    Raises:
        NotFollowed: there is no inotify here, or this user's share of it is used up.
    """

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise NotFollowed("this system has no inotify")
        self._loop = asyncio.get_running_loop()
        self._followed: dict[Watch, Following] = {}
        self._open = ExitStack()
        try:
            # So that iterating ends with what is there: its descriptors block, as the
            # package's flag NONBLOCK (4.4.4) has the value of CLOEXEC.
            self._inotify = self._open.enter_context(Inotify(sync_timeout=0))
        except OSError as error:
            raise NotFollowed(f"{error} (fs.inotify.max_user_instances?)") from error
        self._loop.add_reader(self._inotify.fd, self._read)

    def follow(self, path: Path, on_names: OnNames) -> Following:
        """Be told the names of what is put, written, moved or deleted in a directory.

        ``on_names`` gets None if anything may have changed: events were dropped, or the
        directory is lost.

        Raises:
            NotFollowed: the directory cannot be followed.
        """
        try:
            kind = shared_kind(path)
            if kind is not None:
                raise NotFollowed(f"other hosts may write in it, as it is on {kind}")
            watch = self._inotify.add_watch(path, _ASKED)
            inode = path.stat().st_ino
        except OSError as error:
            raise NotFollowed(f"{error} (fs.inotify.max_user_watches?)") from error
        following = Following(self, watch, inode, on_names)
        self._followed[watch] = following
        return following

    def drop(self, watch: Watch) -> None:
        if self._followed.pop(watch, None) is not None:
            # The kernel ends the watch of a deleted directory by itself.
            with suppress(OSError):
                self._inotify.rm_watch(watch)

    def close(self) -> None:
        """Follow nothing any more; to be called once."""
        for following in self._followed.values():
            following.lost = True
        self._followed.clear()
        self._loop.remove_reader(self._inotify.fd)
        self._open.close()

    def _read(self) -> None:
        news: dict[Following, set[str] | None] = {}
        # To the end: what the package has read ahead nothing would announce.
        for event in self._inotify:
            for following in self._concerned(event):
                names = news.setdefault(following, set())
                if Mask.Q_OVERFLOW in event.mask or event.mask & _LOST:
                    news[following] = None
                elif names is not None and event.name is not None:
                    names.add(str(event.name))
        for following, names in news.items():
            following.on_names(names)

    def _concerned(self, event: Event) -> Iterable[Following]:
        if Mask.Q_OVERFLOW in event.mask:
            return list(self._followed.values())
        following = None if event.watch is None else self._followed.get(event.watch)
        if following is None:
            return ()
        if event.mask & _LOST:
            following.close()
        return (following,)


def shared_kind(path: Path) -> str | None:
    """The kind of the file system if other hosts may write to it, else None."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            kind = kind_of_device(mounts, path.stat().st_dev)
    except FileNotFoundError:
        return None
    # Those behind a program are called fuse.NAME.
    return kind if kind.partition(".")[0] in _SHARED_KINDS else None


def kind_of_device(mounts: Iterable[str], device: int) -> str:
    """The file system of a device number in the kernel's list; "" if not there."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts:
        fields = line.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1]
    return ""
