"""What a run takes part in while `fit` goes through its data."""

from typing import Any, NamedTuple

from meshwright.cluster.channel import channel

import jax


class Start(NamedTuple):
    """Where an epoch starts."""

    step: int = 0
    """Steps of the epoch that were done before."""
    taken: int = 0
    """Batches that were taken from the data's current pass before."""
    logs: Any = None
    """What the last of these steps returned, on the host."""
    num_batches: int | None = None
    """Batches of the data, if that is known."""


class Course:
    """How one `fit`, `evaluate` or `predict` goes through its steps, as a run sees it.

    This one only tells a launcher, if there is one, that work goes on.

    Attributes:
        hears_nothing: Whether callbacks are not told of the batch that Keras is at,
            because they have heard of it before.
    """

    hears_nothing = False

    def __init__(self) -> None:
        self._channel = channel()
        self._logs: Any = None

    def see_arrays(self, arrays: Any) -> None:
        """Called with the data before `begin`, if it is arrays."""

    def begin(self, arguments: dict[str, Any]) -> None:
        """Called before Keras' method runs; may change its arguments."""

    def end(self) -> None:
        """Called when Keras' method has returned."""

    def enter_epoch(self, num_steps: int | None, num_batches: int | None) -> Start:
        """Called before the first step of an epoch; says where it starts.

        Arguments:
            num_steps: Steps of the epoch, if that is known.
            num_batches: Batches of the data, if that is known.
        """
        return Start(num_batches=num_batches)

    def begin_data(self, adapter: Any) -> None:
        """Lets the data begin an epoch, through Keras' adapter of it."""
        adapter.on_epoch_begin()

    def end_data(self, adapter: Any) -> None:
        """Lets the data end an epoch."""
        adapter.on_epoch_end()

    def begin_pass(self) -> None:
        """Called before the first batch of a pass through the data is drawn."""

    def pass_over(self, draws_at_once: bool) -> None:
        """Called when batches that were used before have been left out.

        Arguments:
            draws_at_once: Whether a pass draws its whole order when it begins.
        """

    def before_steps(self, first: int, num_steps: int) -> None:
        """Called before steps are dispatched.

        Arguments:
            first: The number of the first of them in the epoch, from 0.
            num_steps: How many these are.
        """
        self._channel.enter("step")

    def see(self, logs: Any) -> None:
        """Called with what a dispatch returned."""
        self._logs = logs

    def after_steps(self, step: int, taken: int) -> None:
        """Called when steps have been dispatched, and callbacks have heard of them.

        Arguments:
            step: Steps of the epoch so far.
            taken: Batches of the data's pass so far.
        """
        self._channel.live()

    def leave_epoch(self) -> None:
        """Called after the last step of an epoch, however it came to that."""
        if self._channel.is_heard:
            # While the devices are at work, it is steps that take the time.
            jax.block_until_ready(self._logs)
        self._channel.enter("script")
