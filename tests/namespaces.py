"""Hosts of a network of their own: namespaces, on a bridge of this machine."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Host:
    """A network namespace, and the interface by which it hangs on the bridge."""

    name: str
    address: str
    link: str

    def cut(self) -> None:
        """Nothing goes to it or comes from it any more."""
        ip("link", "set", self.link, "down")

    def mend(self) -> None:
        ip("link", "set", self.link, "up")


@dataclass(frozen=True)
class Network:
    """A bridge, on which this machine has an address too."""

    bridge: str
    address: str
    hosts: tuple[Host, ...]


@contextmanager
def network_of(num_hosts: int) -> Iterator[Network]:
    """Makes a network; skips the test where that is not permitted."""
    unique = os.getpid() % 65536
    net = f"10.213.{unique % 256}"
    hosts = tuple(
        Host(f"mwns{unique}x{n}", f"{net}.{n + 2}", f"mwl{unique}x{n}")
        for n in range(num_hosts)
    )
    network = Network(f"mwb{unique}", f"{net}.1", hosts)
    try:
        _make(network)
        yield network
    finally:
        for host in hosts:
            _try("netns", "del", host.name)
            _try("link", "del", host.link)
            (_names_of(host) / "hosts").unlink(missing_ok=True)
            if _names_of(host).exists():
                _names_of(host).rmdir()
        _try("link", "del", network.bridge)


def _make(network: Network) -> None:
    ip("link", "add", network.bridge, "type", "bridge")
    ip("addr", "add", f"{network.address}/24", "dev", network.bridge)
    ip("link", "set", network.bridge, "up")
    for host in network.hosts:
        ip("netns", "add", host.name)
        veth = ("type", "veth", "peer", "up0", "netns", host.name)
        ip("link", "add", host.link, *veth)
        ip("link", "set", host.link, "master", network.bridge, "up")
        ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "up0")
        for link in ("up0", "lo"):
            ip("-n", host.name, "link", "set", link, "up")
        # `ip netns exec` shows it in the place of /etc/hosts.
        _names_of(host).mkdir(parents=True)
        words = f"127.0.0.1 localhost\n{host.address} {socket.gethostname()}\n"
        (_names_of(host) / "hosts").write_text(words)


def ip(*words: str) -> None:
    """Runs `ip`."""
    try:
        subprocess.run(["ip", *words], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")


def _try(*words: str) -> None:
    if shutil.which("ip"):
        subprocess.run(["ip", *words], check=False, capture_output=True)


def _names_of(host: Host) -> Path:
    return Path("/etc/netns", host.name)
