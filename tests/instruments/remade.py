"""A checkpoint of another model than the one that its run trained, its weights far from zero."""

import json
from pathlib import Path

import torch
from conftest import TINY_MODEL, compose

from txl import archive, checkpoint
from txl import config as hydra_config

SCHEMES = {
    "relative": [],
    "same_length": ["model.same_length=true"],
    "no_memory": ["model/memory=none"],
    "compressive": ["model/memory=compressive", "model.memory.compressed_len=4"],
    "shaw": ["model/position=shaw"],
    "rotary": ["model/position=rotary"],
    "alibi": ["model/position=alibi"],
    "absolute": ["model/position=absolute"],
    "absolute_per_layer": ["model/position=absolute_per_layer"],
}


def remade(run: Path, name: str, *overrides: str) -> str:
    """A file with a run's checkpoint, in which stands the tiny model of these overrides."""
    content = torch.load(run / "best.pt", weights_only=True)
    config = json.loads(content["config"])
    mem_len = [] if "model/memory=none" in overrides else ["model.memory.mem_len=16"]
    made = hydra_config.plain(compose(*TINY_MODEL, *mem_len, *overrides).model)
    config["model"] = {**made, "n_token": config["model"]["n_token"]}
    torch.manual_seed(0)
    state = checkpoint.construct(config["model"]).state_dict()
    noisy = {key: tensor + 0.2 * torch.randn_like(tensor) for key, tensor in state.items()}
    archive.write(Path(name), {**content, "config": json.dumps(config), "model": noisy})
    return name
