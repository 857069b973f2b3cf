"""`tf.errors`: TensorFlow's names for what goes wrong.

What Meshwright raises elsewhere as a `RuntimeError` or `ValueError` is one here too.
"""

from meshwright.tf.absent import refuse


class OpError(Exception):
    """Base of TensorFlow's errors.

    >>> InvalidArgumentError(None, None, "no such device").message
    'no such device'
    """

    def __init__(self, node_def: object, op: object, message: str) -> None:
        super().__init__(message)
        self.node_def = node_def
        self.op = op
        self.message = message


class InvalidArgumentError(OpError, RuntimeError, ValueError):
    """An argument, or a device, that an operation cannot take."""


class NotFoundError(OpError, RuntimeError):
    """Something that is not there."""


class OutOfRangeError(OpError):
    """Data that has come to its end."""


class UnimplementedError(OpError, NotImplementedError):
    """Something that TensorFlow has, and Meshwright has not."""


__getattr__ = refuse("tf.errors", {})
