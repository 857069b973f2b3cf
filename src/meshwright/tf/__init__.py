"""TensorFlow's device and distribution API on Meshwright: `from meshwright import tf`.

It is a thin layer: every call ends in functions of Meshwright's, JAX's or Keras'.
`docs/tf.md` says what is covered; anything else raises an `AttributeError` that names
Meshwright's way to do it.
"""

from types import SimpleNamespace

from meshwright.tf import (
    config,
    data,
    debugging,
    distribute,
    errors,
    nn,
    random,
)

from meshwright.tf import operations as math
from meshwright.tf.absent import refuse
from meshwright.tf.data import TensorSpec
from meshwright.tf.dtypes import (
    DType,
    as_dtype,
    bfloat16,
    complex64,
    double,
    float16,
    float32,
    float64,
    half,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from meshwright.tf.dtypes import bool_ as bool
from meshwright.tf.functions import function
from meshwright.tf.gradients import GradientTape
from meshwright.tf.manners import teach_keras
from meshwright.tf.operations import (
    abs,
    add,
    add_n,
    argmax,
    argmin,
    cast,
    concat,
    constant,
    convert_to_tensor,
    cos,
    divide,
    equal,
    executing_eagerly,
    exp,
    expand_dims,
    fill,
    floor,
    gather,
    greater,
    group,
    identity,
    is_tensor,
    less,
    log,
    logical_and,
    logical_not,
    logical_or,
    matmul,
    maximum,
    minimum,
    multiply,
    negative,
    no_op,
    not_equal,
    one_hot,
    ones,
    ones_like,
    pow,
    range,
    rank,
    reduce_all,
    reduce_any,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_prod,
    reduce_sum,
    reshape,
    round,
    shape,
    sigmoid,
    sign,
    sin,
    size,
    split,
    sqrt,
    square,
    squeeze,
    stack,
    stop_gradient,
    subtract,
    tanh,
    tile,
    transpose,
    where,
    zeros,
    zeros_like,
)
from meshwright.tf.operations import print_ as print
from meshwright.tf.placement import device
from meshwright.tf.tensors import Tensor, TensorShape
from meshwright.tf.variables import (
    Variable,
    VariableAggregation,
    VariableSynchronization,
)

import keras

config.use_environment()
teach_keras()

linalg = SimpleNamespace(matmul=matmul)
newaxis = None

__getattr__ = refuse(
    "tf",
    {
        "Session": "call functions directly; nothing has to be run later",
        "compat": "TensorFlow 2's names, without compat.v1",
        "saved_model": "model.export, or meshwright ckpt export",
        "train": "checkpoints of meshwright train, or model.save",
        "summary": "the metrics.jsonl of a run",
        "profiler": "jax.profiler",
        "tpu": "TPUs that JAX sees need no initialization",
        "lite": "model.export",
        "image": "keras.ops.image, or layers of keras.layers",
        "io": "Python's open, or keras.utils",
        "while_loop": "a Python loop, or jax.lax.while_loop",
        "cond": "Python's if, or jax.lax.cond",
        "vectorized_map": "jax.vmap",
        "map_fn": "jax.lax.map",
        "py_function": "call the function",
        "numpy_function": "call the function",
        "custom_gradient": "jax.custom_vjp",
    },
)
