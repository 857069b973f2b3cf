"""`strategy.run`: a function once for each replica, each on its own device.

Replicas run as TensorFlow's do: in threads that take turns. One goes on until it needs
the others (`merge_call`), then the next one does; when all are there, what they wanted
is done across them, and each goes on with its part. So Python code in the function
behaves as everywhere, and an error is raised as it is.
"""

import contextvars
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from meshwright.devices.placement import device as device_scope
from meshwright.tf.distribute.contexts import entering
from meshwright.tf.distribute.updates import ReplicaScope, settle
from meshwright.tf.distribute.values import is_leaf, part_of, regroup
from meshwright.tf.tensors import Tensor, raw, wrap

import jax

if TYPE_CHECKING:
    from meshwright.tf.distribute.strategy import Strategy


class _Abandoned(BaseException):
    """Ends a replica whose run is over because another one failed."""


class Replica:
    """One replica, while its function runs.

    Attributes:
        strategy: Whose replica it is.
        index: Its number among all replicas.
        position: Its number among those of this process.
        device: JAX's device of it.
        values: By the id of a variable: the variable and its value here.
        written: Of these, the variables of Keras' that were assigned.
        parted: By their ids, other variables of which only this copy was assigned.
    """

    def __init__(
        self, strategy: "Strategy", position: int, index: int, device: jax.Device
    ) -> None:
        self.strategy = strategy
        self.position = position
        self.index = index
        self.device = device
        self.values: dict[int, tuple[Any, Any]] = {}
        self.written: dict[int, tuple[Any, Any]] = {}
        self.parted: dict[int, Any] = {}
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self.wish: Callable[[list[Any]], Any] | None = None
        self.offer: Any = None
        self.answer: Any = None
        self._is_abandoned = False
        self._may_go_on = threading.Event()
        self._has_paused = threading.Event()
        self._thread: threading.Thread | None = None

    def meet(self, across: Callable[[list[Any]], Any], offer: Any) -> Any:
        """Waits for the others; `across` gets what all offered, and is called once.

        What it returns is each replica's, or is one value per replica.
        """
        self.wish, self.offer = across, offer
        if self._thread is None:
            return self._meet_alone()
        self._has_paused.set()
        self._wait(self._may_go_on)
        if self._is_abandoned:
            raise _Abandoned
        return self.answer

    def once_for_all(self, make: Callable[[], Any]) -> Any:
        """What a function that makes something makes, once for all replicas."""
        return self.meet(lambda _: make(), None)

    def _meet_alone(self) -> Any:
        assert self.wish is not None
        across, self.wish = self.wish, None
        context = contextvars.copy_context()
        return part_of(context.run(self.strategy.across, across, [self.offer]), 0)

    def start(self, call: Callable[[], Any]) -> None:
        """Begins the function in a thread, which waits for its turn."""
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run, call), daemon=True
        )
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        self._wait(self._may_go_on)
        try:
            if not self._is_abandoned:
                self.result = call()
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        self.is_done = True
        self._has_paused.set()

    def go_on(self) -> None:
        """Lets the replica run until it is done or waits for the others."""
        self.wish = None
        self._has_paused.clear()
        self._may_go_on.set()
        self._has_paused.wait()

    def _wait(self, event: threading.Event) -> None:
        event.wait()
        event.clear()

    def abandon(self) -> None:
        """Ends the replica, if it waits."""
        if self.is_done:
            return
        self._is_abandoned = True
        self.go_on()

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the function as this replica."""
        own_args, own_kwargs = (
            part_of(args, self.position),
            part_of(kwargs, self.position),
        )
        name = self.strategy.name_of(self.device)
        with (
            entering(self.strategy, self),
            device_scope(name),
            ReplicaScope(self),
        ):
            return wrap(fn(*own_args, **own_kwargs))


def run_on_replicas(
    strategy: "Strategy", fn: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Runs a function on all replicas of this process; see `Strategy.run`."""
    replicas = strategy.make_replicas()
    if len(replicas) == 1:
        replicas[0].result = replicas[0].call(fn, args, kwargs)
    else:
        _take_turns(strategy, replicas, fn, args, kwargs)
    settle(strategy, replicas)
    return regroup([replica.result for replica in replicas])


def _take_turns(
    strategy: "Strategy", replicas: Sequence[Replica], fn: Any, args: Any, kwargs: Any
) -> None:
    for replica in replicas:
        replica.start(partial(replica.call, fn, args, kwargs))
    try:
        while not all(replica.is_done for replica in replicas):
            for replica in replicas:
                replica.go_on()
                if replica.error is not None:
                    raise replica.error
            _answer(strategy, replicas)
    finally:
        for replica in replicas:
            replica.abandon()


def _answer(strategy: "Strategy", replicas: Sequence[Replica]) -> None:
    """Does what the replicas wait for, once, and gives each its part."""
    waiting = [replica for replica in replicas if not replica.is_done]
    if not waiting:
        return
    if len(waiting) < len(replicas):
        raise RuntimeError(
            f"Replica {waiting[0].index} waits for the others in merge_call, "
            "all_reduce "
            "or an aggregated assignment, and some of them have returned. All replicas "
            "must make the same calls."
        )
    across = waiting[0].wish
    assert across is not None
    answer = strategy.across(across, [replica.offer for replica in waiting])
    for replica in waiting:
        replica.answer = _bring(part_of(answer, replica.position), replica.device)


def _bring(tree: Any, device: jax.Device) -> Any:
    """A tree whose tensors are on a replica's device."""

    def bring(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return Tensor(jax.device_put(raw(leaf), device))
        return jax.device_put(leaf, device) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(bring, tree, is_leaf=is_leaf)
