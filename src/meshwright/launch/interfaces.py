"""Names and addresses of hosts, and where this one may listen."""

import ipaddress
import os
import queue
import socket
import threading

from meshwright.errors import RendezvousError

import psutil

VARIABLE = "MESHWRIGHT_INTERFACE"
"""The environment variable that chooses an interface (`eth1`) or an address of it."""

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
    addresses = {
        entry.address.partition("%")[0]
        for entries in found.values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
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


def chosen_address(peer: str | None, *, allow_public_bind: bool = False) -> str:
    """Where this host listens for others of its run.

    Arguments:
        peer: The address of one of them, or None if no address is known yet.
        allow_public_bind: Whether it may be every interface.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted:
        address = address_of_interface(wanted)
    elif peer is not None:
        address = address_towards(peer)
    else:
        address = _own_address()
    return check_may_listen(address, allow_public_bind=allow_public_bind)


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


def _own_address() -> str:
    """What the host's own name stands for, or else what leads out of it."""
    try:
        address = find_address(socket.gethostname())
    except RendezvousError:
        address = "127.0.0.1"
    if not is_loopback(address):
        return address
    for route in ("192.0.2.1", "2001:db8::1"):  # reserved: nobody is there
        try:
            return address_towards(route)
        except RendezvousError:
            continue
    return address
