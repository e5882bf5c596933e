"""Reads the golden files: tests/golden/README.md says what they hold."""

import json
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"


def read(name: str) -> tuple[dict[str, Tensor], dict]:
    """The tensors of a golden file and its metadata."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
        meta = {key: json.loads(value) for key, value in file.metadata().items() if key != "note"}
    return tensors, meta


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
