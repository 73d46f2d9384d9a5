"""The log of what is still open: batches of rows one after the other, each with its length and checksum.

A killed writer may leave a torn batch at the end. A reader sees that and stops before it.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pyarrow as pa

from open_instruct.record.schema import with_all_columns

_HEADER = struct.Struct("<4sII")
_MAGIC = b"OIr1"


def append(file: IO[bytes], batch: pa.RecordBatch) -> int:
    """Append rows to an unbuffered file. Returns the number of bytes."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as stream:
        stream.write_batch(batch)
    payload = sink.getvalue().to_pybytes()
    rest = memoryview(_HEADER.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload)
    num_bytes = len(rest)
    while rest:  # a full disk may take only a part
        rest = rest[file.write(rest) :]
    return num_bytes


def read(path: Path) -> Iterator[pa.RecordBatch]:
    """The batches that are whole. A torn batch and everything behind it is left out."""
    with open(path, "rb") as file:
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            magic, num_bytes, checksum = _HEADER.unpack(header)
            payload = file.read(num_bytes)
            if magic != _MAGIC or len(payload) < num_bytes or zlib.crc32(payload) != checksum:
                return
            with pa.ipc.open_stream(payload) as stream:
                yield from with_all_columns(stream.read_all()).to_batches()
