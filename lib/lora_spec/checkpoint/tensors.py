"""A bounded safetensors reader: the header is checked whole, tensors are read one at a time with pread.

Format: https://github.com/huggingface/safetensors (8-byte little-endian header length, JSON header, data
without holes). Nothing is mapped into memory, because a whole-file map counts fully in the resident size.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lora_spec.checkpoint.folder import AdapterFolder, parse_json_object
from lora_spec.checkpoint.reasons import shown
from lora_spec.errors import CheckpointError

MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 200_000
MAX_NAME = 512
CHUNK_BYTES = 1 << 20

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")

# Storage type, and the bits that are all set exactly when a 16-bit number is NaN or infinite.
_STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_EXPONENT_16 = {"F16": np.uint16(0x7C00), "BF16": np.uint16(0x7F80)}


@dataclass(frozen=True)
class TensorInfo:
    """Place of one tensor: ``start`` counts bytes from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsFile:
    """One safetensors file of an untrusted folder.

    Args:
        folder: the folder it lies in.
        file_name: its bare name.

    Attributes:
        tensors: name → :class:`TensorInfo`, in file order.

    Raises:
        CheckpointError: ``truncated``, ``too_large``, ``bad_header``, ``bad_json``, ``outside_folder``,
            ``unreadable``.
    """

    def __init__(self, folder: AdapterFolder, file_name: str) -> None:
        self.folder = folder
        self.file_name = file_name
        descriptor = folder.open(file_name)
        try:
            self._identity = _identity(descriptor)
            self.tensors = self._read_header(descriptor)
        finally:
            os.close(descriptor)

    def where(self, tensor: str | None = None) -> str:
        """How messages name this file, or one tensor of it."""
        return self.folder.where(self.file_name, tensor)

    def _read_header(self, descriptor: int) -> dict[str, TensorInfo]:
        size = os.fstat(descriptor).st_size
        prefix = os.pread(descriptor, 8, 0)
        if len(prefix) < 8:
            raise CheckpointError(
                "file too short for a safetensors header", where=self.where(), code="truncated"
            )
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"safetensors header claims {length} bytes, more than {MAX_HEADER_BYTES}",
                where=self.where(),
                code="too_large",
                fix="The file is damaged or not safetensors.",
            )
        data_start = 8 + length
        if data_start > size:
            raise CheckpointError("file ends inside its header", where=self.where(), code="truncated")
        header = parse_json_object(self._pread(descriptor, length, 8), self.where())
        header.pop("__metadata__", None)
        if len(header) > MAX_TENSORS:
            raise CheckpointError(f"more than {MAX_TENSORS} tensors", where=self.where(), code="too_large")
        tensors = {name: self._tensor(name, entry, data_start) for name, entry in header.items()}
        # In order of place, each tensor must begin where the one before ends: no overlap, no hole, no rest.
        end = data_start
        for info in sorted(tensors.values(), key=lambda info: (info.start, info.nbytes)):
            if info.start != end:
                fault = "overlaps the tensor before it" if info.start < end else "leaves a hole before it"
                raise CheckpointError(f"tensor {fault}", where=self.where(info.name), code="bad_header")
            end = info.start + info.nbytes
            if end > size:
                raise CheckpointError(
                    f"tensor ends at byte {end} of a file of {size}",
                    where=self.where(info.name),
                    code="truncated",
                    fix="Download or copy the file again.",
                )
        if end != size:
            raise CheckpointError(
                f"{size - end} bytes after the last tensor", where=self.where(), code="bad_header"
            )
        return tensors

    def _tensor(self, name: str, entry: Any, data_start: int) -> TensorInfo:
        def fail(what: str) -> CheckpointError:
            return CheckpointError(what, where=self.where(name), code="bad_header")

        if not name.isprintable() or len(name) > MAX_NAME:
            raise fail("tensor name is too long or holds control characters")
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise fail("tensor entry does not consist of dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            raise fail(f"unknown dtype {shown(dtype)}")
        if not _sizes(shape) or len(shape) > 8:
            raise fail("shape is not a list of sizes")
        if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise fail("data_offsets is not a pair of positions in order")
        count = 1
        for extent in shape:
            count *= extent
        nbytes = offsets[1] - offsets[0]
        if count * DTYPE_BYTES[dtype] != nbytes:
            raise fail(f"{nbytes} bytes cannot hold {dtype}{shape}")
        return TensorInfo(name, dtype, tuple(shape), data_start + offsets[0], nbytes)

    def _open_same(self) -> int:
        descriptor = self.folder.open(self.file_name)
        if _identity(descriptor) != self._identity:
            os.close(descriptor)
            raise CheckpointError("the file changed while being read", where=self.where(), code="unreadable")
        return descriptor

    def _pread(self, descriptor: int, length: int, offset: int, tensor: str | None = None) -> bytearray:
        buffer = bytearray(length)
        view = memoryview(buffer)
        done = 0
        while done < length:
            try:
                got = os.preadv(descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"cannot read: {error.strerror}", where=self.where(tensor), code="unreadable"
                ) from error
            if got == 0:
                raise CheckpointError("file ends early", where=self.where(tensor), code="truncated")
            done += got
        return buffer

    def chunks(self, name: str, size: int = CHUNK_BYTES) -> Iterator[bytearray]:
        """The bytes of one tensor in pieces of at most ``size`` bytes (a multiple of 8)."""
        info = self.tensors[name]
        descriptor = self._open_same()
        try:
            for offset in range(0, info.nbytes, size):
                yield self._pread(descriptor, min(size, info.nbytes - offset), info.start + offset, name)
        finally:
            os.close(descriptor)

    def matrix(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """Read a 2-D weight, or its rows ``rows[0]:rows[1]``.

        Returns:
            float32 (float64 for F64), shape (rows, columns). bf16 and fp16 are widened exactly.

        Raises:
            CheckpointError: ``bad_dtype``, ``truncated``, ``unreadable``.
        """
        info = self.tensors[name]
        if info.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"LoRA weight stored as {info.dtype}",
                where=self.where(name),
                code="bad_dtype",
                fix="Supported are F32, F16, BF16 and F64.",
            )
        first, last = rows or (0, info.shape[0])
        row_bytes = info.nbytes // info.shape[0]
        descriptor = self._open_same()
        try:
            raw = self._pread(descriptor, (last - first) * row_bytes, info.start + first * row_bytes, name)
        finally:
            os.close(descriptor)
        return widen(raw, info.dtype).reshape(last - first, *info.shape[1:])


def widen(raw: bytes | bytearray, dtype: str) -> np.ndarray:
    """Little-endian bytes of a weight dtype → flat float32 (float64 for F64); exact."""
    stored = np.frombuffer(raw, dtype=_STORED[dtype])
    if dtype == "BF16":  # bf16 is the upper half of a float32
        bits = stored.astype(np.uint32)
        np.left_shift(bits, 16, out=bits)
        return bits.view(np.float32)
    return stored.astype(np.float32) if dtype == "F16" else stored


def all_finite(raw: bytes | bytearray, dtype: str) -> bool:
    """Whether no number in ``raw`` is NaN or infinite (formats no LoRA weight may have count as finite)."""
    if dtype not in WEIGHT_DTYPES:
        return True
    stored = np.frombuffer(raw, dtype=_STORED[dtype])
    if (mask := _EXPONENT_16.get(dtype)) is None:
        return bool(np.isfinite(stored).all())
    bits = stored.view(np.uint16)
    return not bool(((bits & mask) == mask).any())


def any_nonzero(raw: bytes | bytearray, dtype: str) -> bool:
    """Whether a number in ``raw`` is not zero (minus zero is; other formats are compared by bytes)."""
    if dtype not in WEIGHT_DTYPES:
        return bool(raw.strip(b"\0"))
    stored = np.frombuffer(raw, dtype=_STORED[dtype])
    return bool((stored & np.uint16(0x7FFF)).any() if dtype == "BF16" else stored.any())


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)


def _identity(descriptor: int) -> tuple[int, int, int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
