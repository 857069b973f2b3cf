"""What came out of the data of one `fit`, and how long it was waited for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Tally:
    """Samples that were handed to steps, and seconds that steps waited for them.

    >>> tally = Tally()
    >>> with tally.waiting():
    ...     tally.add(32)
    >>> tally.samples, tally.waited < 1
    (32, True)
    """

    def __init__(self) -> None:
        self.samples = 0
        self.waited = 0.0

    def add(self, samples: int) -> None:
        """Counts samples."""
        self.samples += samples

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.waited += time.monotonic() - began
