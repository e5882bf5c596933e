"""A file of plain tensors and values beside its digest: written whole or not at all, checked before anything in it is read."""

import hashlib
import io
import pickletools
import shutil
import time
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from txl.runtime import write_whole

MARK = b"\ntxl-sha256:"  # behind torch's zip archive, which allows it: mark, 64 hexadecimal digits, a line end
TRAILER = len(MARK) + 65
ATTEMPTS, PAUSE = 3, 1.0  # to write a file; seconds before another
GLOBALS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    *(
        f"torch {kind}Storage"
        for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
    ),
}  # all that a pickle of dense tensors, numbers, strings, lists and dicts names


class Damaged(ValueError):
    """A file that is cut short, changed, or none of this kind."""


class _Hashing:
    """A file to write to, which knows the digest and the length of what was written, and the first error."""

    def __init__(self, file: BinaryIO):
        self._file, self.digest, self.size, self.error = file, hashlib.sha256(), 0, None

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.digest.update(data)
        self.size += len(data)
        return written

    def flush(self) -> None:
        self._file.flush()


def write(path: Path, content: Any) -> None:
    """Writes plain tensors and values and their sha256, beside, synced, renamed; an error that passes is outlived.

    Raises OSError, with the room that it takes and that there is, after the third attempt, and TypeError for a value that
    `read` would refuse.
    """
    tensors = list(_tensors(content))

    def fill(file: BinaryIO) -> None:
        hashing = _Hashing(file)
        try:
            torch.save(content, hashing)
        except RuntimeError as error:  # how torch tells that a disk is full, in words about positions
            raise hashing.error or OSError(str(error)) from error
        file.write(MARK + hashing.digest.hexdigest().encode() + b"\n")

    for attempt in range(1, ATTEMPTS + 1):
        try:
            return write_whole(path, fill)
        except OSError as error:
            if attempt == ATTEMPTS:
                needed = sum(tensor.nbytes for tensor in tensors)
                try:
                    room = f"{shutil.disk_usage(path.parent).free:,} are free there"
                except OSError:
                    room = f"{path.parent} is gone"
                words = f"it takes about {needed:,} bytes, {room} ({error})"
                raise OSError(f"name: {path} cannot be written: {words}") from error
        time.sleep(PAUSE)


def _tensors(value: Any, where: str = "") -> Iterator[torch.Tensor]:
    """All tensors inside plain values. Raises TypeError, with the place, for a value that is not plain."""
    if type(value) is dict:
        for key, item in value.items():
            yield from _tensors(item, f"{where}.{key}")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{where}.{index}")
    elif type(value) is torch.Tensor:
        yield value
    elif type(value) not in (str, int, float, bool, type(None)):
        raise TypeError(f"{where[1:]} is a {type(value).__name__}, which no checkpoint holds")


def read(path: Path) -> Any:
    """What was written, on the CPU, if every bit of it is still the same. Raises Damaged otherwise.

    The file is looked over before torch sees it: a zip archive of uncompressed records, together no larger than the file,
    whose one pickle names nothing but dense tensors. So a crafted one runs nothing and takes no more memory than its size.
    """
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _check_digest(file)
            _check_records(file)
            file.seek(0)
            return torch.load(file, weights_only=True, map_location="cpu")
    except OSError as error:
        raise Damaged(error.strerror or str(error)) from error
    except Damaged:
        raise
    except Exception as error:  # torch and zipfile tell damage in a dozen ways, from EOFError to KeyError
        raise Damaged(f"{type(error).__name__}") from error


def digest(path: Path) -> str:
    """The digest that a file carries, unchecked."""
    with path.open("rb") as file:
        return _trailer(file)[1]


def _trailer(file: BinaryIO) -> tuple[int, str]:
    """The length of the archive, and the digest behind it."""
    size = file.seek(0, io.SEEK_END) - TRAILER
    if size < 0:
        raise Damaged("cut short")
    file.seek(size)
    trailer = file.read(TRAILER)
    if not trailer.startswith(MARK) or not trailer.endswith(b"\n"):
        raise Damaged("cut short, or it has no checksum")
    return size, trailer[len(MARK) : -1].decode("ascii", "replace")


def _check_digest(file: BinaryIO) -> None:
    left, expected = _trailer(file)
    file.seek(0)
    found = hashlib.sha256()
    while left and (block := file.read(min(left, 1 << 20))):
        found.update(block)
        left -= len(block)
    if found.hexdigest() != expected:
        raise Damaged("its checksum is another")


def _check_records(file: BinaryIO) -> None:
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":  # else torch would read it in its older format
        raise Damaged("not a zip archive")
    size = file.seek(0, io.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        packed = [record for record in records if record.compress_type != zipfile.ZIP_STORED]
        if packed or sum(record.file_size for record in records) > size:
            raise Damaged("its records are larger than the file")
        names = [record.filename for record in records]
        pickles = [name for name in names if name.endswith(".pkl")]
        if len(set(names)) < len(names) or [name.rpartition("/")[2] for name in pickles] != ["data.pkl"]:
            raise Damaged("its records are not those of one pickle")
        for operation, argument, _ in pickletools.genops(archive.read(pickles[0])):
            named = operation.name in ("GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4")
            if named and argument not in GLOBALS:
                raise Damaged(f"it names {str(argument)[:80]!r}")
