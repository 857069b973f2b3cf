"""Models that the planner is judged on; none of its rules was made with them in mind.

Each is a function without arguments that returns a compiled Keras model. They are as
small as models of their kind can be and still have a shape of their own.
"""

from collections.abc import Callable
from typing import Any

import keras

L = keras.layers


def reference_cnn() -> keras.Model:
    """The MNIST CNN that all measurements of this project start from."""
    layers: list[Any] = [keras.Input((28, 28, 1))]
    for filters in (32, 64):
        layers += [L.Conv2D(filters, 3, activation="relu") for _ in range(2)]
        layers += [L.MaxPooling2D(), L.BatchNormalization()]
    layers += [L.Flatten(), L.Dense(256, activation="relu"), L.BatchNormalization()]
    return _classifier(keras.Sequential([*layers, L.Dense(10)], name="reference_cnn"))


def gru_text() -> keras.Model:
    """Sentences of 80 words in, one of two classes out."""
    layers = [
        keras.Input((80,), dtype="int32"),
        L.Embedding(5000, 96),
        L.GRU(128, return_sequences=True),
        L.GRU(96),
        L.Dropout(0.3),
        L.Dense(2),
    ]
    return _classifier(keras.Sequential(layers, name="gru_text"))


def bert() -> keras.Model:
    """An encoder with the norms behind its blocks, and dropout, that guesses words."""
    words, width = 4000, 192
    tokens = keras.Input((96,), dtype="int32")
    x = L.Embedding(words, width)(tokens)
    x = x + L.Embedding(96, width)(keras.ops.arange(96))
    x = L.Dropout(0.1)(L.LayerNormalization()(x))
    for _ in range(4):
        h = L.MultiHeadAttention(6, width // 6, dropout=0.1)(x, x)
        x = L.LayerNormalization()(x + L.Dropout(0.1)(h))
        h = L.Dense(width)(L.Dense(4 * width, activation="gelu")(x))
        x = L.LayerNormalization()(x + L.Dropout(0.1)(h))
    return _classifier(keras.Model(tokens, L.Dense(words)(x), name="bert"), "adamw")


def decoder() -> keras.Model:
    """A language model with grouped queries and gated feed-forward layers."""
    words, width, length = 6000, 256, 128
    tokens = keras.Input((length,), dtype="int32")
    x = L.Embedding(words, width)(tokens)
    for _ in range(6):
        h = L.RMSNormalization()(x)
        x = x + L.GroupQueryAttention(32, 8, 4)(h, h, use_causal_mask=True)
        h = L.RMSNormalization()(x)
        gate = L.Dense(512, activation="silu", use_bias=False)(h)
        h = gate * L.Dense(512, use_bias=False)(h)
        x = x + L.Dense(width, use_bias=False)(h)
    x = L.RMSNormalization()(x)
    outputs = L.Dense(words, use_bias=False)(x)
    return _classifier(keras.Model(tokens, outputs, name="decoder"), "adamw")


def unet() -> keras.Model:
    """A U-Net with batch norms and transposed convolutions, on pictures of 64 x 64."""
    inputs = x = keras.Input((64, 64, 3))
    skips = []
    for filters in (24, 48, 96):
        x = _normed(L.Conv2D(filters, 3, padding="same", use_bias=False), x)
        x = _normed(L.Conv2D(filters, 3, padding="same", use_bias=False), x)
        skips.append(x)
        x = L.MaxPooling2D()(x)
    x = _normed(L.Conv2D(192, 3, padding="same", use_bias=False), x)
    for filters in (96, 48, 24):
        x = L.Conv2DTranspose(filters, 2, strides=2)(x)
        x = L.Concatenate()([skips.pop(), x])
        x = _normed(L.Conv2D(filters, 3, padding="same", use_bias=False), x)
    return _classifier(keras.Model(inputs, L.Conv2D(5, 1)(x), name="unet"))


def resnet50() -> keras.Model:
    """Keras' ResNet50, on pictures of 64 x 64."""
    make = keras.applications.ResNet50
    model = make(weights=None, input_shape=(64, 64, 3), classes=100)
    momentum = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer=momentum, loss="sparse_categorical_crossentropy")
    return model


def mobilenet() -> keras.Model:
    """Inverted bottlenecks with depthwise convolutions, on pictures of 48 x 48."""
    inputs = keras.Input((48, 48, 3))
    x = _normed(L.Conv2D(16, 3, strides=2, padding="same", use_bias=False), inputs)
    for filters, strides in ((16, 1), (24, 2), (24, 1), (48, 2), (48, 1), (96, 2)):
        before, wide = x, 6 * x.shape[-1]
        x = _normed(L.Conv2D(wide, 1, use_bias=False), x, "relu6")
        depthwise = L.DepthwiseConv2D(
            3, strides=strides, padding="same", use_bias=False
        )
        x = _normed(depthwise, x, "relu6")
        x = L.BatchNormalization()(L.Conv2D(filters, 1, use_bias=False)(x))
        if strides == 1 and before.shape[-1] == filters:
            x = x + before
    x = L.Dropout(0.2)(L.GlobalAveragePooling2D()(x))
    return _classifier(keras.Model(inputs, L.Dense(20)(x), name="mobilenet"))


def autoencoder() -> keras.Model:
    """Dense layers that become narrow and wide again."""
    layers: list[Any] = [keras.Input((1200,))]
    layers += [L.Dense(n, activation="elu") for n in (768, 256, 32, 256, 768)]
    layers += [L.Dense(1200, activation="sigmoid")]
    model = keras.Sequential(layers, name="autoencoder")
    model.compile(optimizer="adam", loss="mse")
    return model


def mixer() -> keras.Model:
    """An MLP-Mixer on pictures of 32 x 32 in patches of 4 x 4."""
    width = 160
    inputs = keras.Input((32, 32, 3))
    x = L.Conv2D(width, 4, strides=4)(inputs)
    x = L.Reshape((64, width))(x)
    for _ in range(5):
        h = L.Permute((2, 1))(L.LayerNormalization()(x))
        h = L.Dense(64)(L.Dense(96, activation="gelu")(h))
        x = x + L.Permute((2, 1))(h)
        h = L.LayerNormalization()(x)
        x = x + L.Dense(width)(L.Dense(4 * width, activation="gelu")(h))
    x = L.GlobalAveragePooling1D()(L.LayerNormalization()(x))
    return _classifier(keras.Model(inputs, L.Dense(10)(x), name="mixer"))


def seq2seq() -> keras.Model:
    """An LSTM that reads a sentence, and one that writes its translation."""
    words, width = 3000, 128
    source = keras.Input((30,), dtype="int32")
    target = keras.Input((36,), dtype="int32")
    encoder = L.LSTM(width, return_state=True)
    _, *state = encoder(L.Embedding(words, 64)(source))
    writer = L.LSTM(width, return_sequences=True)
    x = writer(L.Embedding(words, 64)(target), initial_state=state)
    model = keras.Model([source, target], L.Dense(words)(x), name="seq2seq")
    return _classifier(model, "rmsprop")


def tabular() -> keras.Model:
    """A network for tables: batch norms and dropout between wide layers."""
    layers: list[Any] = [keras.Input((96,))]
    for units in (2048, 2048, 1024):
        layers += [L.Dense(units), L.BatchNormalization(), L.ReLU(), L.Dropout(0.2)]
    model = keras.Sequential([*layers, L.Dense(1)], name="tabular")
    momentum = keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(optimizer=momentum, loss="mse")
    return model


MODELS: dict[str, Callable[[], keras.Model]] = {
    make.__name__: make
    for make in (
        reference_cnn,
        gru_text,
        bert,
        decoder,
        unet,
        resnet50,
        mobilenet,
        autoencoder,
        mixer,
        seq2seq,
        tabular,
    )
}


def _normed(layer: Any, x: Any, activation: str = "relu") -> Any:
    return L.Activation(activation)(L.BatchNormalization()(layer(x)))


def _classifier(model: keras.Model, optimizer: str = "adam") -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss)
    return model
