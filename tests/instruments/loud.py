"""Checkpoints whose context matters, as a few updates do not make them; and what is measured of them."""

from pathlib import Path

import torch
from conftest import compose

from txl import archive
from txl import config as hydra_config
from txl.instruments.subject import Subject


def loud(run: Path, name: str, seed: int = 0) -> str:
    """A file with a run's checkpoint, its weights far from zero."""
    content = torch.load(run / "best.pt", weights_only=True)
    generator = torch.Generator().manual_seed(seed)
    for tensor in content["model"].values():
        tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
    archive.write(Path(name), content)
    return name


def subject_of(*overrides: str) -> Subject:
    """What `evaluate.py` with these overrides would measure."""
    return Subject.of(hydra_config.plain(compose(*overrides, config_name="evaluate")))


def measured(instrument, subject: Subject) -> dict:
    """What an instrument finds, run to the end."""
    found: dict = {}
    shares = list(instrument.run(subject, found, Path("out.json")))
    assert shares == sorted(shares) and shares[-1] == 1
    return found
