"""Other people's pickles as plain data: whole objects are read, and nothing in them is executed.

A pickle is a program that names classes and functions and calls them. Here each name is looked up in a closed table: what
holds values becomes Python's own containers and tensors, an object of a class that is known by name becomes an `Inert`,
which keeps what it was given and does nothing; any other name ends the reading before it could be called.
"""

import collections
import functools
import io
import math
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    f"{kind}Storage": dtype
    for kind, dtype in {
        "Float": torch.float32,
        "Double": torch.float64,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}
VALUES = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "Counter"): dict,  # which it is made from
    ("torch", "Size"): tuple,
    **{(module, kind.__name__): kind for module in ("builtins", "__builtin__") for kind in (set, frozenset)},
}
LAYERS = "Linear Embedding Dropout LayerNorm ReLU Sequential ModuleList ParameterList"
SOFTMAX = "ProjectedAdaptiveLogSoftmax OptionalParameterList"
KNOWN = {
    "mem_transformer": (
        "MemTransformerLM AdaptiveEmbedding PositionalEmbedding PositionwiseFF MultiHeadAttn RelMultiHeadAttn "
        "RelPartialLearnableMultiHeadAttn RelLearnableMultiHeadAttn DecoderLayer RelLearnableDecoderLayer "
        "RelPartialLearnableDecoderLayer"
    ),
    "proj_adaptive_softmax": SOFTMAX,
    "utils.proj_adaptive_softmax": SOFTMAX,
    "utils.vocabulary": "Vocab OpenAIVocab",
    "vocabulary": "Vocab OpenAIVocab",
    "data_utils": "Corpus",
    "argparse": "Namespace",
    "torch": "device dtype float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool strided",
    "torch.nn.backends.thnn": "_get_thnn_function_backend",
    **{
        f"torch.nn.modules.{module}": LAYERS
        for module in ("linear", "sparse", "dropout", "normalization", "activation", "container")
    },
    **{core: "scalar _reconstruct" for core in ("numpy.core.multiarray", "numpy._core.multiarray")},
    "numpy": "dtype ndarray",
    "tokenizers": "AddedToken",
    "transformers.tokenization_utils": "Trie AddedToken",
    "transformers.tokenization_utils_base": "AddedToken",
    "sacremoses.tokenize": "MosesTokenizer MosesDetokenizer",
    "sacremoses.normalize": "MosesPunctNormalizer",
    "re": "_compile",
}
LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # how a file begins that torch.save wrote before 1.6
AHEAD = 2**20  # how far a pickle may number values beyond their count, see `_check`
TUPLES = 50_000  # a pickle of 10,000 tensors has so many


class Unreadable(ValueError):
    """A file that is no pickle, is damaged, or names what is in none of our tables."""


class Inert:
    """An object of a class that is known by name alone: its attributes. What it was made from is passed over."""

    def __new__(cls, *arguments: Any) -> "Inert":
        self = object.__new__(cls)
        self.attributes = {}
        return self

    def __init__(self, *arguments: Any):
        """Does nothing."""

    def __setstate__(self, state: Any) -> None:
        self.attributes = state if isinstance(state, dict) else {"state": state}

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, or the default."""
        return self.attributes.get(name, default)


def is_a(value: Any, name: str) -> bool:
    """Whether a value stands for an object of the class of this name."""
    return isinstance(value, Inert) and type(value).__name__ == name


class _Unpickler(pickle.Unpickler):
    """Calls nothing but what the tables of this file name; `storage` finds the numbers of a tensor."""

    def __init__(self, file: io.BufferedIOBase, storage: Callable[[str, torch.dtype, int], Tensor | None]):
        super().__init__(file, encoding="utf-8", errors="surrogateescape")
        self._storage, self._classes = storage, {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in VALUES:
            return VALUES[module, name]
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor")):
            return self._tensor
        if (module, name) in (("torch._utils", "_rebuild_parameter"), ("torch.nn.parameter", "Parameter")):
            return self._parameter
        if (module, name) == ("_codecs", "encode"):
            return self._bytes
        if name in KNOWN.get(module, "").split():
            return self._classes.setdefault((module, name), type(name, (Inert,), {}))
        words = "which no model or vocabulary is made of: refused, and nothing in it was run"
        raise Unreadable(f"it names {f'{module}.{name}'[:100]!a}, {words}")

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module":  # a class, and its source, of old
            return pid[1]
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or any(pid[5:]):
            raise Unreadable(f"it holds {str(pid)[:60]!r} where a tensor's numbers should be")
        _, dtype, key, _, numel = pid[:5]
        if not isinstance(dtype, torch.dtype) or not isinstance(numel, int) or numel < 0:
            raise Unreadable("it describes a tensor's numbers in a way that is not understood")
        return self._storage(str(key), dtype, numel)

    @staticmethod
    def _bytes(text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise Unreadable(f"it holds bytes as {str(encoding)[:20]!r}")
        return text.encode("latin1")

    @staticmethod
    def _parameter(data: Any = None, *_: Any) -> Any:
        return data

    @staticmethod
    def _tensor(storage: Tensor | None, offset: int, size: Iterable[int], stride: Iterable[int], *_: Any) -> Any:
        if storage is None:
            return None
        size, stride = tuple(size), tuple(stride)
        if not isinstance(storage, Tensor) or min((*size, *stride, offset)) < 0 or len(size) != len(stride):
            raise Unreadable("it describes a tensor in a way that is not understood")
        stop = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else 0
        if stop > storage.numel() or math.prod(size) > storage.numel():
            raise Unreadable("it describes a tensor larger than its numbers")
        return storage.as_strided(size, stride, storage.storage_offset() + offset)


def _check(file: io.BufferedIOBase) -> None:
    """Reads over a pickle for what would end Python itself.

    A number for a value far beyond how many it has would take gigabytes, and tuples inside each other, as a dict's key, the
    whole stack.
    """
    tuples = 0
    for count, (operation, argument, _) in enumerate(pickletools.genops(file)):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and argument > count + AHEAD:
            raise Unreadable("it numbers its values beyond their count")
        tuples += operation.name.startswith("TUPLE")
        if tuples > TUPLES:
            raise Unreadable(f"it holds more than {TUPLES} tuples")


def _load(file: io.BufferedIOBase, storage: Callable[[str, torch.dtype, int], Tensor | None]) -> Any:
    start = file.tell()
    _check(file)
    file.seek(start)
    return _Unpickler(file, storage).load()


def _no_tensor(key: str, dtype: torch.dtype, numel: int) -> Tensor | None:
    raise Unreadable("it holds a tensor, but not its numbers")


def read(path: Path) -> Any:
    """What torch.save, old or new, or pickle wrote to a file: values, tensors (mapped, on the CPU) and `Inert` objects.

    Raises Unreadable for a file that is something else, is damaged, or names anything that is in none of the tables.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(LEGACY))
            file.seek(0)
            if start.startswith(b"PK\x03\x04"):
                return _read_zip(path, file)
            if start == LEGACY:
                return _read_legacy(path, file)
            if start[:1] == b"\x80":
                return _load(file, _no_tensor)
    except (OSError, Unreadable):
        raise
    except Exception as error:  # a damaged pickle can raise anything that a call of ours with wrong arguments can
        words = (str(error).splitlines() or [""])[0]
        raise Unreadable(f"it is damaged ({type(error).__name__}: {words[:100]})") from error
    raise Unreadable("it is neither a file of torch.save nor a pickle")


class _Mapped:
    """The bytes of a file as tensors, read when they are used."""

    def __init__(self, path: Path):
        self._size = path.stat().st_size
        self._bytes = torch.from_file(str(path), shared=False, size=self._size, dtype=torch.uint8)

    def part(self, start: int, dtype: torch.dtype, numel: int) -> Tensor:
        stop = start + numel * dtype.itemsize
        if stop > self._size:
            raise Unreadable("it is cut short")
        part = self._bytes[start:stop]
        return (part.clone() if start % dtype.itemsize else part).view(dtype)


def _read_zip(path: Path, file: io.BufferedIOBase) -> Any:
    """The format of torch.save since 1.6: a zip archive of a pickle and, as they are, the numbers of each storage."""
    mapped = _Mapped(path)
    with zipfile.ZipFile(file) as archive:
        records = {record.filename: record for record in archive.infolist()}
        found = [name for name in records if name.endswith("/data.pkl")]
        if len(found) != 1 or any(record.compress_type != zipfile.ZIP_STORED for record in records.values()):
            raise Unreadable("it is a zip archive, but not one of torch.save")
        root = found[0].removesuffix("data.pkl")
        if f"{root}byteorder" in records and archive.read(f"{root}byteorder") != b"little":
            raise Unreadable("its numbers are big-endian")
        program = archive.read(found[0])

    @functools.cache  # one storage of several tensors stays one
    def storage(key: str, dtype: torch.dtype, numel: int) -> Tensor:
        record = records[f"{root}data/{key}"]
        if record.file_size < numel * dtype.itemsize:
            raise Unreadable("it is cut short")
        file.seek(record.header_offset)
        name, extra = struct.unpack("<HH", file.read(30)[26:])
        return mapped.part(record.header_offset + 30 + name + extra, dtype, numel)

    return _load(io.BytesIO(program), storage)


def _read_legacy(path: Path, file: io.BufferedIOBase) -> Any:
    """The format of torch.save before 1.6: pickles one after the other, then the storages, each behind its length."""
    for _ in ("magic number", "version of the format"):
        _load(file, _no_tensor)
    if _load(file, _no_tensor).get("little_endian") is not True:
        raise Unreadable("its numbers are big-endian")
    start, kinds = file.tell(), {}

    def note(key: str, dtype: torch.dtype, numel: int) -> None:
        kinds[key] = (dtype, numel)

    _load(file, note)  # a first time only to learn how long each storage is
    places = {}
    for key in _load(file, _no_tensor):
        places[key], (dtype, numel) = file.tell() + 8, kinds[key]
        if struct.unpack("<q", file.read(8))[0] != numel:
            raise Unreadable("it is damaged (the length of a storage)")
        file.seek(numel * dtype.itemsize, io.SEEK_CUR)
    mapped = _Mapped(path)
    tensors = {key: mapped.part(places[key], *kinds[key]) for key in places}
    file.seek(start)
    return _Unpickler(file, lambda key, *_: tensors[key]).load()
