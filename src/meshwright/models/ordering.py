"""The order in which kernels run."""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from meshwright.models.formulations import Platform
from meshwright.models.operations import COLLECTIVES

if TYPE_CHECKING:
    from meshwright.models.kernels import Kernels


def in_order(
    kernels: "Kernels", platform: Platform, samples: int, *, is_inner: bool = False
) -> list[int]:
    """The numbers of kernels, in the order in which they run.

    Compilers for GPUs try several orders, and take the one that needs least memory.
    Where something can be copied or exchanged meanwhile, they then move to the end what
    nobody waits for, as gradients of weights.

    Arguments:
        kernels: The kernels, in any order.
        platform: What they are compiled for.
        samples: Of the batch on a device.
        is_inner: Whether they are what a loop repeats, which gets its data meanwhile.
    """
    if platform == "cpu":
        return breadth_first(kernels)
    graph = _Graph(kernels)
    orders = [graph.postorder(), depth_first(graph, samples), greedy(graph, samples)]
    best = min(orders, key=lambda order: _most_alive(graph, order, samples))
    is_hidden = is_inner or any(k.operation in COLLECTIVES for k in kernels.kernels)
    return late(graph, best) if is_hidden else best


def late(graph: "_Graph", order: list[int]) -> list[int]:
    """From the end back, breadth first: what is needed late runs late.

    Collectives come when nothing else can, so that much runs while they do.
    """
    place = {number: i for i, number in enumerate(order)}
    missing = [len(graph.after(number)) for number in range(len(graph.kernels))]
    ready, collectives = deque[int](), deque[int]()

    def add(number: int) -> None:
        is_collective = graph.kernels[number].operation in COLLECTIVES
        (collectives if is_collective else ready).append(number)

    for number in reversed(order):
        if not missing[number]:
            add(number)
    found: list[int] = []
    while ready or collectives:
        number = (ready or collectives).popleft()
        found.append(number)
        for other in sorted(graph.before(number), key=place.__getitem__, reverse=True):
            missing[other] -= 1
            if not missing[other]:
                add(other)
    return found[::-1]


def depth_first(graph: "_Graph", samples: int) -> list[int]:
    """From the results back; what many others need is computed first."""
    num_kernels = len(graph.kernels)
    users, sizes = [0] * num_kernels, [0.0] * num_kernels
    total = 0.0
    for number in graph.postorder():
        kernel = graph.kernels[number]
        own = sum(graph.size(b, samples) for b in kernel.makes)
        readers = {r for b in kernel.makes for r in graph.readers.get(b, ())}
        total += own
        before = graph.before(number)
        users[number] = max(len(readers) - 1, 0) + sum(users[n] for n in before)
        users[number] = min(users[number], num_kernels)
        sizes[number] = min(own + sum(sizes[n] for n in before), total)

    def place(number: int) -> tuple[int, float]:
        return -users[number], -sizes[number]

    return graph.postorder(place)


def greedy(graph: "_Graph", samples: int) -> list[int]:
    """Always what frees the most memory of what can run."""
    missing = [len(graph.before(n)) for n in range(len(graph.kernels))]
    left = {b: len(set(readers)) for b, readers in graph.readers.items()}
    kept = set(graph.returned)

    def gain(number: int) -> float:
        kernel = graph.kernels[number]
        freed = sum(
            graph.size(b, samples)
            for b in dict.fromkeys(kernel.reads)
            if b in graph.makers and left[b] == 1 and b not in kept
        )
        return freed - sum(graph.size(b, samples) for b in kernel.makes)

    ready = [(-gain(n), n) for n, count in enumerate(missing) if not count]
    heapify(ready)
    found: list[int] = []
    done = [False] * len(graph.kernels)
    while ready:
        worth, number = heappop(ready)
        if done[number]:
            continue
        now = -gain(number)
        if now > worth + 0.5:
            heappush(ready, (now, number))
            continue
        done[number] = True
        found.append(number)
        touched = set()
        for buffer in dict.fromkeys(graph.kernels[number].reads):
            left[buffer] -= 1
            if left[buffer] == 1:
                touched |= set(graph.readers[buffer])
        for reader in graph.after(number):
            missing[reader] -= 1
            touched.add(reader)
        for other in touched:
            if not done[other] and not missing[other]:
                heappush(ready, (-gain(other), other))
    return found


def _most_alive(graph: "_Graph", order: list[int], samples: int) -> float:
    places = {number: i for i, number in enumerate(order)}
    changes = [0.0] * (len(order) + 1)
    for buffer, maker in graph.makers.items():
        if buffer in graph.returned:
            continue
        readers = graph.readers.get(buffer, [maker])
        size = graph.size(buffer, samples)
        changes[places[maker]] += size
        changes[max(places[n] for n in readers) + 1] -= size
    return max(accumulate(changes), default=0.0)


def breadth_first(kernels: "Kernels") -> list[int]:
    """Whatever is ready runs, first come, first served.

    This is how XLA keeps the cores of a CPU busy; memory comes second.
    """
    graph = _Graph(kernels)
    missing = [len(k.reads) + len(k.waits_for) for k in kernels.kernels]
    place = {number: i for i, number in enumerate(graph.postorder())}
    found: list[int] = []
    first = [n for n, count in enumerate(missing) if not count]
    ready = deque(sorted(first, key=place.__getitem__))

    def provide(buffers: Sequence[int]) -> None:
        for buffer in buffers:
            for reader in sorted(graph.waiting_for(buffer), key=place.__getitem__):
                missing[reader] -= 1
                if not missing[reader]:
                    ready.append(reader)

    provide([b for b in range(len(kernels.buffers)) if b not in graph.makers])
    while ready:
        number = ready.popleft()
        found.append(number)
        provide(kernels.kernels[number].makes)
    return found


class _Graph:
    """Who makes and who reads what."""

    def __init__(self, kernels: "Kernels") -> None:
        self.kernels = kernels.kernels
        self.returned = dict.fromkeys(kernels.returned)
        self._buffers = kernels.buffers
        pairs = [(b, i) for i, kernel in enumerate(self.kernels) for b in kernel.makes]
        self.makers = dict(pairs)
        self.readers: dict[int, list[int]] = {}
        self._waiting: dict[int, list[int]] = {}
        for number, kernel in enumerate(self.kernels):
            for buffer in kernel.reads:
                self.readers.setdefault(buffer, []).append(number)
            for buffer in kernel.waits_for:
                self._waiting.setdefault(buffer, []).append(number)

    def waiting_for(self, buffer: int) -> list[int]:
        """Who cannot run before it, as often as it is asked for."""
        return [*self.readers.get(buffer, ()), *self._waiting.get(buffer, ())]

    def size(self, buffer: int, samples: int) -> float:
        """Bytes of a buffer."""
        return self._buffers[buffer].bytes.at(samples)

    def before(self, number: int) -> list[int]:
        """The kernels whose results a kernel reads, or waits for."""
        kernel = self.kernels[number]
        wanted = (*kernel.reads, *kernel.waits_for)
        return list(dict.fromkeys(self.makers[b] for b in wanted if b in self.makers))

    def after(self, number: int) -> list[int]:
        """The kernels that read what a kernel makes, or wait for it."""
        users = [
            user
            for buffer in self.kernels[number].makes
            for of_kind in (self.readers, self._waiting)
            for user in of_kind.get(buffer, ())
        ]
        return list(dict.fromkeys(users))

    def postorder(self, place: Callable[[int], Any] | None = None) -> list[int]:
        """Each kernel after what it reads; what is returned first comes first.

        Arguments:
            place: Which of the kernels that one reads come first: those with the least.
        """
        found: dict[int, None] = {}
        ends = [self.makers[b] for b in self.returned if b in self.makers]
        ahead = [*range(len(self.kernels)), *ends[::-1]]
        entered: set[int] = set()
        while ahead:
            number = ahead[-1]
            if number in found:
                ahead.pop()
            elif number in entered:
                found[ahead.pop()] = None
            else:
                entered.add(number)
                before = [n for n in self.before(number) if n not in found]
                ahead += (before if place is None else sorted(before, key=place))[::-1]
        return list(found)
