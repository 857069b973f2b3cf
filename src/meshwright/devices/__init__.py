"""What hardware there is, how it is configured, and where work is placed."""

import os
import sys

# JAX sets this variable when it is imported; what the user said is known before only.
LOG_LEVEL_ASKED_FOR = (
    os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") if "jax" not in sys.modules else "0"
)
"""How little TensorFlow's C++ code shall log, as far as the user said so."""
