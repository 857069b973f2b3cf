"""Names and addresses of hosts, and where this one may listen."""

import ipaddress
import os
import queue
import socket
import threading
from contextlib import suppress

from meshwright.errors import RendezvousError

import psutil

VARIABLE = "MESHWRIGHT_INTERFACE"
"""The environment variable that chooses an interface (`eth1`) or an address of it."""

LOOPBACK = "127.0.0.1"
PATIENCE_SECONDS = 5.0


def find_address(host: str, seconds: float = PATIENCE_SECONDS) -> str:
    """The address of a host; whoever does not answer in time is not found.

    >>> find_address("127.0.0.2")
    '127.0.0.2'
    """
    answers: queue.Queue[str | OSError] = queue.Queue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found.sort(key=lambda entry: entry[0] != socket.AF_INET)
            answers.put(str(found[0][4][0]))
        except OSError as error:
            answers.put(error)

    # The system's resolver cannot be given a time limit, and takes up to minutes.
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        answer = TimeoutError(f"no answer in {seconds:g} s")
    if isinstance(answer, str):
        return answer
    raise RendezvousError(
        f"No address is known for the host {host!r}: {answer.strerror or answer}.",
        "Every host of a run has a name that the others can look up.",
        f"Check the spelling, try `getent hosts {host}` here, or write its address "
        "instead of its name.",
    ) from answer


def address_towards(address: str) -> str:
    """The address of this host that others see when it talks to `address`.

    Nothing is sent.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise RendezvousError(
                f"There is no way from here to {address}: {error.strerror}.",
                "The launcher and its hosts are in one network.",
                f"Look at `ip route get {address}`, or choose an interface with "
                f"{VARIABLE}.",
            ) from error
        return str(probe.getsockname()[0])


def address_of_interface(text: str) -> str:
    """The address of an interface of this host, or the address itself if it is one."""
    found = psutil.net_if_addrs()
    addresses = _addresses()
    if text in found:
        for family in (socket.AF_INET, socket.AF_INET6):
            for entry in found[text]:
                if entry.family == family:
                    return str(entry.address.partition("%")[0])
    if text in addresses or is_loopback(text) or is_wildcard(text):
        return text
    raise RendezvousError(
        f"The chosen interface is {text!r}.",
        "A launcher listens on an interface or an address of its own host.",
        f"Choose one of: {', '.join(sorted(found))}; {', '.join(sorted(addresses))}.",
    )


def check_may_listen(address: str, *, allow_public_bind: bool = False) -> str:
    """Refuses addresses that stand for every interface, unless they are asked for."""
    if is_wildcard(address) and not allow_public_bind:
        raise RendezvousError(
            f"The launcher was to listen on {address!r}, which is every interface.",
            "What JAX sends between hosts is neither signed nor encrypted, so a run "
            "listens on loopback or on one chosen interface.",
            f"Set {VARIABLE} to the interface of the trusted network, or pass "
            "--allow-public-bind.",
        )
    return address


def chosen_address() -> str | None:
    """The address of the interface that the environment names, if it names one."""
    wanted = os.environ.get(VARIABLE)
    return address_of_interface(wanted) if wanted else None


def address_towards_host(host: str, *, allow_public_bind: bool = False) -> str:
    """Where this host listens for another one, which ssh calls `host`."""
    if chosen := chosen_address():
        return check_may_listen(chosen, allow_public_bind=allow_public_bind)
    try:
        return address_towards(find_address(host.rpartition("@")[2]))
    except RendezvousError:
        return own_address()  # ssh may know it by a name of its own, or say why not


def address_of_head(name: str | None, *, allow_public_bind: bool = False) -> str:
    """Where this host listens for others, which may know it by a name."""
    if chosen := chosen_address():
        return check_may_listen(chosen, allow_public_bind=allow_public_bind)
    try:
        address = find_address(name) if name else ""
    except RendezvousError:
        address = ""
    return address if address in _addresses() - {LOOPBACK} else own_address()


def own_address() -> str:
    """What the host's own name stands for, or else what leads out of it."""
    try:
        address = find_address(socket.gethostname())
    except RendezvousError:
        address = LOOPBACK
    if not is_loopback(address):
        return address
    for route in ("192.0.2.1", "2001:db8::1"):  # reserved: nobody is there
        with suppress(RendezvousError):
            return address_towards(route)
    return address


def is_wildcard(text: str) -> bool:
    """Whether an address stands for all interfaces."""
    try:
        return text in ("", "*") or ipaddress.ip_address(text).is_unspecified
    except ValueError:
        return False


def is_loopback(text: str) -> bool:
    """Whether an address can be reached from its own host only."""
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


def joined(address: str, port: int) -> str:
    """`address:port`, as JAX and people write it.

    >>> joined("::1", 80)
    '[::1]:80'
    """
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _addresses() -> set[str]:
    return {
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
