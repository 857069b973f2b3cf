"""What a checkpoint says of itself: `manifest.json`, written last and sealed.

Everything else in the folder is listed here with its size and digest, and the manifest
carries the digest of its own content, so no bit of a checkpoint can change unseen.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np

FORMAT = 1
"""The version of the format that this Meshwright writes and reads."""

MANIFEST = "manifest.json"
FACTS = "facts.json"
ARRAYS = "arrays"

# What else a name of NumPy's could mean (objects, records) is not for files.
_DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
    *("int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
}
_LEAF = re.compile(r"[a-z]+[0-9]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class DamageError(Exception):
    """Something in the folder of a checkpoint is not as it was written.

    Arguments:
        file: Its path in the folder.
        what: What is wrong with it.
    """

    def __init__(self, file: str, what: str) -> None:
        super().__init__(f"{file} {what}")
        self.file = file


class OtherFormatError(Exception):
    """A sealed manifest in a version of the format that is not ours."""

    def __init__(self, version: Any) -> None:
        super().__init__(f"format {version!r}")
        self.version = version


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an array, and where its bytes lie."""

    process: int
    """The process that wrote it; the folder is `arrays/<process>`."""
    leaf: str
    """The array of bytes in that folder."""
    offset: int
    """The first of its bytes."""
    start: tuple[int, ...]
    """Where the part begins in the array."""
    shape: tuple[int, ...]
    """The shape of the part."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An array, and the parts that it was written in."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...] = ()

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def to_json(self) -> dict[str, Any]:
        """As `from_json` reads it."""
        pieces = [[p.process, p.leaf, p.offset, p.start, p.shape] for p in self.pieces]
        return {"shape": self.shape, "dtype": self.dtype, "pieces": pieces}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Entry":
        """Reads an entry; raises `ValueError` or `TypeError` for what is none."""
        pieces = [
            Piece(
                process=_count(process),
                leaf=_match(_LEAF, leaf),
                offset=_count(offset),
                start=_counts(start),
                shape=_counts(shape),
            )
            for process, leaf, offset, start, shape in content["pieces"]
        ]
        shape, dtype = _counts(content["shape"]), str(content["dtype"])
        dtype_of(dtype)
        return cls(shape, dtype, tuple(pieces))


@dataclass(frozen=True, slots=True)
class Seal:
    """How a file can be known again."""

    size: int
    sha256: str

    def to_json(self) -> list[Any]:
        """As `from_json` reads it."""
        return [self.size, self.sha256]

    @classmethod
    def from_json(cls, content: Iterable[Any]) -> "Seal":
        """Reads a seal; raises `ValueError` or `TypeError` for what is none."""
        size, sha256 = content
        return cls(_count(size), _match(_SHA256, sha256))


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    made_at: float
    """Seconds since the epoch, by the clock of the first process."""
    keep: bool
    """Whether retention leaves it alone."""
    versions: Mapping[str, str]
    """Of the packages that wrote it."""
    arrays: Mapping[str, Entry]
    host: Mapping[str, Entry]
    files: Mapping[str, Seal]

    @property
    def num_bytes(self) -> int:
        """The size of all files but the manifest's own."""
        return sum(seal.size for seal in self.files.values())

    def to_bytes(self) -> bytes:
        """The file `manifest.json`."""
        return _sealed(
            {
                "format": FORMAT,
                "step": self.step,
                "made_at": self.made_at,
                "keep": self.keep,
                "versions": dict(self.versions),
                "arrays": {k: entry.to_json() for k, entry in self.arrays.items()},
                "host": {k: entry.to_json() for k, entry in self.host.items()},
                "files": {k: seal.to_json() for k, seal in self.files.items()},
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Reads the file; nothing in it is believed before its seal was checked.

        Raises:
            DamageError: It is not what was written, or says what cannot be.
            OtherFormatError: It is whole, and of another version.
        """
        try:
            content = json.loads(data)["manifest"]
            is_whole = _sealed(content) == data
        except (ValueError, KeyError, TypeError, RecursionError):
            is_whole = False
        if not is_whole:
            raise DamageError(MANIFEST, "does not have the digest that it was given")
        version = content.get("format") if isinstance(content, dict) else None
        if version != FORMAT:
            raise OtherFormatError(version)
        try:
            return _manifest(content)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise DamageError(MANIFEST, "says what no checkpoint is") from None


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of a name, among those that arrays of numbers have."""
    if name not in _DTYPES:
        raise ValueError(name)
    extension = getattr(ml_dtypes, name, None)
    return np.dtype(name if extension is None else extension)


def _sealed(content: Any) -> bytes:
    """Content with its digest; the same content gives the same bytes."""
    text = _canonical(content)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"digest":"{digest}","manifest":{text}}}\n'.encode()


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _manifest(content: Mapping[str, Any]) -> Manifest:
    manifest = Manifest(
        step=_count(content["step"]),
        made_at=float(content["made_at"]),
        keep=bool(content["keep"]),
        versions={str(k): str(v) for k, v in content["versions"].items()},
        arrays={k: Entry.from_json(found) for k, found in content["arrays"].items()},
        host={k: Entry.from_json(found) for k, found in content["host"].items()},
        files={
            _path(k): Seal.from_json(found) for k, found in content["files"].items()
        },
    )
    if FACTS not in manifest.files:
        raise ValueError(FACTS)
    for entry in (*manifest.arrays.values(), *manifest.host.values()):
        _check_pieces(entry, manifest.files)
    return manifest


def leaf_file(process: int, leaf: str) -> str:
    """The file with the bytes of a leaf, as Orbax names it."""
    return f"{ARRAYS}/{process}/{leaf}/0"


def _check_pieces(entry: Entry, files: Mapping[str, Seal]) -> None:
    """Parts lie within their array and their file, and are together the whole.

    So no array is larger than the files that hold it, whatever its shape says.
    """
    dtype, elements = dtype_of(entry.dtype), 0
    for piece in entry.pieces:
        ends = [a + b for a, b in zip(piece.start, piece.shape, strict=True)]
        if any(end > dim for end, dim in zip(ends, entry.shape, strict=True)):
            raise ValueError(piece)
        count = math.prod(piece.shape)
        size = files[leaf_file(piece.process, piece.leaf)].size
        if piece.offset + count * dtype.itemsize > size:
            raise ValueError(piece)
        elements += count
    starts = {piece.start for piece in entry.pieces}
    if elements != math.prod(entry.shape) or len(starts) != len(entry.pieces):
        raise ValueError(entry)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(_count(value) for value in values)


def _match(pattern: re.Pattern[str], value: Any) -> str:
    if pattern.fullmatch(value) is None:
        raise ValueError(value)
    return str(value)


def _path(name: str) -> str:
    """A path that stays within the folder, spelled in the one way there is."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or name == ".":
        raise ValueError(name)
    return name
