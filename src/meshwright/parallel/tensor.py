"""Which dim of which kernel is split over the axis `tensor`, by following the graph.

A kernel is split by *columns* (its output features) when its input is whole, and by
*rows* (its input features) when its input arrives split because the layer before it was
split by columns: the pair then needs one all-reduce. Between the two may stand only
layers that treat features one by one. Attention is split by heads. The
choice decides what travels, not what is computed.
"""

from dataclasses import dataclass
from typing import Any

from meshwright.parallel.plan import Spec

_FEATURE_WISE = {
    *("Activation", "ReLU", "LeakyReLU", "PReLU", "ELU", "Dropout", "SpatialDropout1D"),
    *("SpatialDropout2D", "BatchNormalization", "MaxPooling1D", "MaxPooling2D"),
    *("AveragePooling1D", "AveragePooling2D", "GlobalAveragePooling1D", "UpSampling2D"),
    *("GlobalAveragePooling2D", "GlobalMaxPooling1D", "GlobalMaxPooling2D"),
    *("ZeroPadding1D", "ZeroPadding2D", "Cropping2D", "DepthwiseConv2D", "Rescaling"),
}
_CONVOLUTIONS = {"Conv1D", "Conv2D", "Conv3D"}
_ATTENTION = {"MultiHeadAttention", "GroupedQueryAttention"}
_RECURRENT = {"LSTM", "GRU", "SimpleRNN", "LSTMCell", "GRUCell", "SimpleRNNCell"}


@dataclass(frozen=True, slots=True)
class TensorChoice:
    """The split of one variable, and the reason."""

    spec: Spec
    because: str


def choose_tensor_specs(model: Any, degree: int) -> dict[int, TensorChoice]:
    """The choice for every variable that has one, by the variable's `id`."""
    chooser = _Chooser(degree)
    for layer, inputs in _layers_in_order(model):
        chooser.visit(layer, inputs)
    return chooser.choices


def _layers_in_order(model: Any) -> list[tuple[Any, list[Any]]]:
    """Leaf layers with the layers before them, as far as the graph is known."""
    ordered: list[tuple[Any, list[Any]]] = []
    previous: list[Any] = []
    for layer in _walk(model):
        known = _inputs_of(layer)
        # A subclassed model has no graph; its layers follow each other as created.
        ordered.append((layer, previous if known is None else known))
        previous = [layer]
    return ordered


def _walk(layer: Any) -> list[Any]:
    """Layers without those that only hold others; attention counts as one."""
    inner = layer._layers
    if not inner or type(layer).__name__ in _ATTENTION | _RECURRENT:
        return [layer]
    return [leaf for child in inner for leaf in _walk(child)]


def _inputs_of(layer: Any) -> list[Any] | None:
    nodes = getattr(layer, "_inbound_nodes", None)
    if not nodes:
        return None
    return [
        tensor._keras_history.operation
        for tensor in nodes[0].input_tensors
        if hasattr(tensor, "_keras_history")
    ]


class _Chooser:
    """Walks the layers and remembers whose output features are split."""

    def __init__(self, degree: int) -> None:
        self._degree = degree
        self._split_outputs: set[int] = set()
        self.choices: dict[int, TensorChoice] = {}

    def visit(self, layer: Any, inputs: list[Any]) -> None:
        kind = type(layer).__name__
        arrives_split = bool(inputs)
        arrives_split &= all(id(before) in self._split_outputs for before in inputs)
        if kind in _ATTENTION:
            self._attention(layer)
        elif kind in _RECURRENT:
            self._whole(layer, "recurrent kernels stay whole for now")
        elif kind == "Embedding":
            self._embedding(layer)
        elif kind in ("Dense", "EinsumDense") or kind in _CONVOLUTIONS:
            self._kernel(layer, arrives_split)
        elif kind in _FEATURE_WISE and arrives_split:
            self._split_outputs.add(id(layer))
            self._features(layer)

    def _divides(self, size: int) -> bool:
        return size > 0 and size % self._degree == 0

    def _choose(self, variable: Any, dim: int | None, because: str) -> None:
        spec = tuple("tensor" if d == dim else None for d in range(len(variable.shape)))
        self.choices[id(variable)] = TensorChoice(spec, because)

    def _whole(self, layer: Any, because: str) -> None:
        for variable in layer.variables:
            self._choose(variable, None, f"whole over tensor: {because}")

    def _kernel(self, layer: Any, arrives_split: bool) -> None:
        kernel = getattr(layer, "_kernel", None)
        if kernel is None or len(kernel.shape) < 2:
            return
        rows, columns = len(kernel.shape) - 2, len(kernel.shape) - 1
        grouped = getattr(layer, "groups", 1) != 1
        if arrives_split and self._divides(kernel.shape[rows]) and not grouped:
            self._choose(kernel, rows, "tensor splits rows: its input arrives split")
            return
        if grouped or not self._divides(kernel.shape[columns]):
            size = kernel.shape[columns]
            self._whole(layer, f"{size} features do not divide by {self._degree}")
            return
        self._choose(kernel, columns, "tensor splits columns: its input is whole")
        bias = getattr(layer, "bias", None)
        if bias is not None:
            self._choose(bias, len(bias.shape) - 1, "tensor splits it as its kernel")
        self._split_outputs.add(id(layer))

    def _features(self, layer: Any) -> None:
        for variable in layer.variables:
            if len(variable.shape) == 1 and self._divides(variable.shape[0]):
                self._choose(variable, 0, "tensor splits it as the features it scales")

    def _embedding(self, layer: Any) -> None:
        table = layer._embeddings
        if self._divides(table.shape[1]):
            self._choose(table, 1, "tensor splits the features of the table")
        else:
            self._whole(
                layer, f"{table.shape[1]} features do not divide by {self._degree}"
            )

    def _attention(self, layer: Any) -> None:
        for inner, heads_dim in _projections(layer):
            kernel = inner._kernel
            heads = kernel.shape[heads_dim]
            if not self._divides(heads):
                self._whole(inner, f"{heads} heads do not divide by {self._degree}")
                continue
            self._choose(kernel, heads_dim, "tensor splits the heads")
            bias = getattr(inner, "bias", None)
            if bias is not None and len(bias.shape) == 2:
                self._choose(bias, 0, "tensor splits the heads")


def _projections(attention: Any) -> list[tuple[Any, int]]:
    """The projections of an attention layer, each with the dim of its heads."""
    inputs = ("_query_dense", "_key_dense", "_value_dense")
    found = [(getattr(attention, name, None), 1) for name in inputs]
    found.append((getattr(attention, "_output_dense", None), 0))
    return [(layer, dim) for layer, dim in found if layer is not None and layer.built]
