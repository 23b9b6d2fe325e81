"""What a manifest holds of a shard and of a file, and the checks of what was read from one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from locant.errors import InputError
from locant.text.store.token_files import MAX_SIZE

__all__ = ["FaultError", "FileRecord", "ShardRecord", "count_of", "fields_of", "file_of", "hash_of", "is_hex"]


class FaultError(Exception):
    """What is wrong with a manifest, without its name."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """The size of a file and the SHA-256 of its content."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """What one shard holds, and its two files."""

    tokens: int
    documents: int
    bin: FileRecord
    idx: FileRecord

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> ShardRecord:
        """From what `to_json` gave.

        Raises:
            InputError: it is not that.
        """
        try:
            fields = fields_of(value, "a shard", ("tokens", "documents", "bin", "idx"))
            return cls(
                tokens=count_of(fields["tokens"], "tokens"),
                documents=count_of(fields["documents"], "documents"),
                bin=file_of(fields["bin"], "bin"),
                idx=file_of(fields["idx"], "idx"),
            )
        except FaultError as fault:
            raise InputError(
                f"got something that is no record of a shard: {fault}", "writing the shard again"
            ) from None


def file_of(value: Any, name: str) -> FileRecord:
    """A record of a file."""
    fields = fields_of(value, name, ("size", "sha256"))
    return FileRecord(size=count_of(fields["size"], "size"), sha256=hash_of(fields["sha256"]))


def fields_of(value: Any, name: str, expected: tuple[str, ...]) -> dict[str, Any]:
    """An object that has these fields, and may have others."""
    if not isinstance(value, dict) or not value.keys() >= {*expected}:
        raise FaultError(f"{name} is not an object{' with ' if expected else ''}{', '.join(expected)}")
    return value


def count_of(value: Any, name: str) -> int:
    """An integer from 0 to the largest size of a file; JSON's ``true`` and ``1.0`` are none."""
    if type(value) is not int or not 0 <= value <= MAX_SIZE:
        raise FaultError(f"{name} is {value!r}, expected a count")
    return value


def hash_of(value: Any) -> str:
    """A SHA-256 in lower-case hexadecimal digits."""
    if not isinstance(value, str) or len(value) != 64 or not is_hex(value):
        raise FaultError("a hash is none")
    return value


def is_hex(text: str) -> bool:
    """Whether there are only hexadecimal digits, lower-case ones."""
    return not text.strip("0123456789abcdef")
