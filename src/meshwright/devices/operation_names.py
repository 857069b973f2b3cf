"""TensorFlow's names for operations, by JAX's names for them."""

_TENSORFLOW_NAMES = {
    "abs": "Abs",
    "add": "AddV2",
    "add_any": "AddN",
    "add_n": "AddN",
    "all": "All",
    "any": "Any",
    "argmax": "ArgMax",
    "argmin": "ArgMin",
    "broadcast_in_dim": "BroadcastTo",
    "broadcast_to": "BroadcastTo",
    "ceil": "Ceil",
    "clip": "ClipByValue",
    "concatenate": "ConcatV2",
    "convert_element_type": "Cast",
    "copy": "Identity",
    "cos": "Cos",
    "cumsum": "Cumsum",
    "device_put": "Copy",
    "div": "RealDiv",
    "divide": "RealDiv",
    "equal": "Equal",
    "exp": "Exp",
    "expand_dims": "ExpandDims",
    "floor": "Floor",
    "floor_divide": "FloorDiv",
    "gather": "GatherV2",
    "greater": "Greater",
    "greater_equal": "GreaterEqual",
    "integer_pow": "Pow",
    "iota": "Range",
    "less": "Less",
    "less_equal": "LessEqual",
    "log": "Log",
    "log1p": "Log1p",
    "logical_and": "LogicalAnd",
    "logical_not": "LogicalNot",
    "logical_or": "LogicalOr",
    "logistic": "Sigmoid",
    "max": "Max",
    "maximum": "Maximum",
    "mean": "Mean",
    "min": "Min",
    "minimum": "Minimum",
    "mul": "Mul",
    "multiply": "Mul",
    "neg": "Neg",
    "negative": "Neg",
    "normal": "RandomStandardNormal",
    "not_equal": "NotEqual",
    "pad": "PadV2",
    "power": "Pow",
    "prod": "Prod",
    "reduce_max": "Max",
    "reduce_min": "Min",
    "reduce_prod": "Prod",
    "reduce_sum": "Sum",
    "relu": "Relu",
    "reshape": "Reshape",
    "rsqrt": "Rsqrt",
    "select_n": "SelectV2",
    "sigmoid": "Sigmoid",
    "sign": "Sign",
    "sin": "Sin",
    "slice": "StridedSlice",
    "softmax": "Softmax",
    "sort": "Sort",
    "sqrt": "Sqrt",
    "square": "Square",
    "squeeze": "Squeeze",
    "stack": "Pack",
    "stage": "_EagerConst",
    "sub": "Sub",
    "subtract": "Sub",
    "sum": "Sum",
    "take": "GatherV2",
    "tanh": "Tanh",
    "tile": "Tile",
    "transpose": "Transpose",
    "true_divide": "RealDiv",
    "uniform": "RandomUniform",
    "where": "SelectV2",
}
_PRODUCTS = {"dot", "dot_general", "matmul"}


def operation_name(jax_name: str, num_dims: int) -> str:
    """TensorFlow's name for a common operation, JAX's own for any other.

    Arguments:
        jax_name: The primitive, or the function that was compiled as one operation.
        num_dims: The number of dims of its result.

    >>> operation_name("matmul", 2), operation_name("add", 2), operation_name("fft", 1)
    ('MatMul', 'AddV2', 'fft')
    """
    name = jax_name.removeprefix("_")
    if name in _PRODUCTS:
        return "MatMul" if num_dims <= 2 else "BatchMatMulV2"
    if name == "conv_general_dilated":
        return "Conv3D" if num_dims > 4 else "Conv2D"
    return _TENSORFLOW_NAMES.get(name, jax_name)
