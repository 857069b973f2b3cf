"""Arrays on their way into a checkpoint and back, by Orbax.

Each process writes the parts of the arrays that it has, as they lie on its devices,
into a folder of its own. So no process waits for another while it writes, and a
checkpoint can be read on any other mesh, in any number of processes. Small parts are
joined into one array of bytes: one of their own costs Orbax as much as a megabyte.
"""

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.cluster.identity import process_index
from meshwright.train.checkpoint_manifest import (
    ARRAYS,
    DamageError,
    Entry,
    Manifest,
    Piece,
    dtype_of,
    leaf_file,
)

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from orbax.checkpoint import type_handlers

SMALL = 1 << 20
"""Parts of up to so many bytes are joined."""

JOINED = "joined"

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Copies:
    """What one process writes: arrays of bytes, and which parts of what they are."""

    leaves: Mapping[str, Bytes]
    arrays: Mapping[str, Entry]
    host: Mapping[str, Entry]


def copy_arrays(
    arrays: Mapping[str, jax.Array], host: Mapping[str, np.ndarray], process: int
) -> Copies:
    """Copies what this process has to write, so that the arrays may change or go."""
    for array in arrays.values():
        _start_copy(array)
    copier = _Copier(process)
    found = {name: copier.copy(array) for name, array in arrays.items()}
    beside = {name: copier.copy_whole(array) for name, array in host.items()}
    return Copies(copier.leaves(), found, beside)


def write_leaves(folder: Path, leaves: Mapping[str, Bytes]) -> None:
    """Writes arrays of bytes into a folder, which is there, down to the disk."""
    _orbax().save(epath.Path(folder), args=ocp.args.PyTreeSave(dict(leaves)))


class ArrayReader:
    """Reads the arrays of a checkpoint that was examined.

    Attributes:
        manifest: What it holds.

    Arguments:
        folder: The checkpoint.
        manifest: Its manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder.resolve()
        self.manifest = manifest
        self._joined: dict[int, Bytes] = {}

    def read(self, entry: Entry) -> np.ndarray:
        """A whole array."""
        return self._parts(entry).assemble(tuple(slice(0, n) for n in entry.shape))

    def place(self, entry: Entry, sharding: jax.sharding.Sharding) -> jax.Array:
        """An array on devices; only what this process has of it is put together."""
        parts = self._parts(entry)
        return jax.make_array_from_callback(
            entry.shape, sharding, parts.assemble, dtype=dtype_of(entry.dtype)
        )

    def _parts(self, entry: Entry) -> "_Parts":
        return _Parts(self, entry)

    def leaf(self, piece: Piece) -> Bytes:
        """The array of bytes that a part lies in."""
        if piece.leaf != JOINED:
            return self._read_leaf(piece.process, piece.leaf)
        if piece.process not in self._joined:
            self._joined[piece.process] = self._read_leaf(piece.process, JOINED)
        return self._joined[piece.process]

    def _read_leaf(self, process: int, leaf: str) -> Bytes:
        self._check_leaf(process, leaf)
        arguments = {leaf: ocp.RestoreArgs(restore_type=np.ndarray)}
        found = _orbax().restore(
            epath.Path(self._folder / ARRAYS / str(process)),
            args=ocp.args.PyTreeRestore(
                item={leaf: 0}, restore_args=arguments, partial_restore=True
            ),
        )
        return found[leaf]

    def _check_leaf(self, process: int, leaf: str) -> None:
        """Its header says the size that it has on the disk, so no more is allocated."""
        file = leaf_file(process, leaf)
        size = self.manifest.files[file].size
        folder = file.removesuffix("0")
        header = json.loads((self._folder / folder / ".zarray").read_bytes())
        others = [n for n in self.manifest.files if n.startswith(folder)]
        if not _header(size).items() <= dict(header).items() or len(others) != 2:
            raise DamageError(f"{folder}.zarray", "is not that of plain bytes")


class _Parts:
    """The parts of one array; each is read once, when it is needed."""

    def __init__(self, reader: ArrayReader, entry: Entry) -> None:
        self._reader = reader
        self._entry = entry
        self._dtype = dtype_of(entry.dtype)
        self._read: dict[Piece, np.ndarray] = {}

    def assemble(self, index: Index) -> np.ndarray:
        """A region of the array, out of the parts that it touches."""
        spans = [
            range(*s.indices(n)) for s, n in zip(index, self._entry.shape, strict=True)
        ]
        region = np.empty([len(span) for span in spans], self._dtype)
        for piece in self._entry.pieces if region.size else ():
            corners = [
                (max(span.start, start), min(span.stop, start + length))
                for span, start, length in zip(
                    spans, piece.start, piece.shape, strict=True
                )
            ]
            if all(low < high for low, high in corners):
                there = _shifted(corners, piece.start)
                here = _shifted(corners, [span.start for span in spans])
                region[here] = self._values(piece)[there]
        return region

    def _values(self, piece: Piece) -> np.ndarray:
        if piece not in self._read:
            count = math.prod(piece.shape)
            leaf = self._reader.leaf(piece)
            part = leaf[piece.offset : piece.offset + count * self._dtype.itemsize]
            self._read[piece] = part.view(self._dtype).reshape(piece.shape)
        return self._read[piece]


def _shifted(corners: Iterable[tuple[int, int]], by: Iterable[int]) -> Index:
    return tuple(
        slice(low - origin, high - origin)
        for (low, high), origin in zip(corners, by, strict=True)
    )


class _Copier:
    """Cuts arrays into the parts that a process writes, and copies these."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._own: dict[str, Bytes] = {}
        self._small: list[Bytes] = []
        self._offset = 0

    def copy(self, array: jax.Array) -> Entry:
        """The parts that this process has, each of them once over all processes."""
        pieces = [
            self._piece(shard.data, tuple(part.start or 0 for part in shard.index))
            for shard in array.addressable_shards
            if shard.replica_id == 0 and shard.data.size
        ]
        return Entry(array.shape, str(array.dtype), tuple(pieces))

    def copy_whole(self, array: np.ndarray) -> Entry:
        """An array of this process."""
        array = np.asarray(array)
        pieces = [self._piece(array, (0,) * array.ndim)] if array.size else []
        return Entry(array.shape, str(array.dtype), tuple(pieces))

    def leaves(self) -> dict[str, Bytes]:
        """What was copied."""
        if not self._small:
            return self._own
        return {JOINED: np.concatenate(self._small), **self._own}

    def _piece(self, data: Any, start: tuple[int, ...]) -> Piece:
        values = np.ascontiguousarray(data)
        flat = values.reshape(-1).view(np.uint8)
        if flat.size > SMALL:
            # On a CPU this is the memory of the array itself, which may be given away.
            leaf, offset = f"array{len(self._own)}", 0
            self._own[leaf] = flat.copy()
        else:
            leaf, offset = JOINED, self._offset
            self._small.append(flat)
            self._offset += flat.size
        return Piece(self._process, leaf, offset, start, np.shape(data))


def _start_copy(array: jax.Array) -> None:
    """Lets the parts of an array travel to the host while others do."""
    for shard in array.addressable_shards:
        if shard.replica_id == 0 and shard.device.platform != "cpu":
            shard.data.copy_to_host_async()


class _BytesHandler(type_handlers.NumpyHandler):
    """Lets Orbax write arrays of bytes in every process, each its own.

    Orbax' own handler writes them in the first process only.
    """

    async def serialize(
        self, values: Sequence[Bytes], infos: Sequence[Any], args: Any = None
    ) -> Sequence[Any]:
        """Begins to write; what is returned has a `result`."""
        opened = [
            tensorstore.open(
                {
                    "driver": "zarr",
                    "kvstore": {
                        "driver": "file",
                        "path": os.fspath(info.parent_dir / info.name),
                    },
                    "metadata": _header(value.size),
                },
                create=True,
                context=info.ts_context,
            )
            for value, info in zip(values, infos, strict=True)
        ]
        return [
            (await file).write(value, can_reference_source_data_indefinitely=True)
            for file, value in zip(opened, values, strict=True)
        ]


def _header(size: int) -> dict[str, Any]:
    """What the header of an array of bytes says."""
    return {
        "zarr_format": 2,
        "shape": [size],
        "chunks": [size],
        "dtype": "|u1",
        "order": "C",
        "compressor": None,
        "filters": None,
        "fill_value": None,
    }


class _Repetitions(logging.Filter):
    """Leaves out what Orbax logs of errors that it also raises, with their stacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is worth showing."""
        return "_SignalingThread.run() raised" not in record.getMessage()


@cache
def _orbax() -> ocp.PyTreeCheckpointHandler:
    """Orbax as if this process were the only one: others have folders of their own."""
    logging.getLogger("absl").addFilter(_Repetitions())
    alone = ocp.options.MultiprocessingOptions(primary_host=process_index())
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=False,
        type_handler_registry=type_handlers.create_type_handler_registry(
            (np.ndarray, _BytesHandler()),
            # Not used, but asked for where metadata is to be stored.
            (jax.Array, type_handlers.ArrayHandler(array_metadata_store=None)),
        ),
        multiprocessing_options=alone,
    )
