import math

import pytest
import torch
from conftest import compose, tiny_model

from txl import optim
from txl.config import build

COMMON = dict(lr=0.5, steps=100, valid_nll=[])


def test_cosine():
    rates = [optim.cosine(step, **COMMON) for step in range(101)]
    assert rates[0] == 0.5 and rates[50] == pytest.approx(0.25) and rates[100] == pytest.approx(0)
    assert optim.cosine(25, lr_min=0.1, **COMMON) == pytest.approx(0.1 + 0.4 * (1 + math.cos(math.pi / 4)) / 2)
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("schedule", [optim.cosine, optim.constant, optim.inverse_square_root, optim.plateau])
def test_warm_up_is_linear_and_never_zero(schedule):
    rates = [schedule(step, warmup=10, **COMMON) for step in range(11)]
    assert rates[0] == rates[1] == pytest.approx(0.05)
    assert rates[5] == pytest.approx(0.25)
    assert rates[10] == pytest.approx(0.5 if schedule is not optim.cosine else 0.25 * (1 + math.cos(math.pi / 10)))


def test_inverse_square_root_peaks_at_lr():
    rates = [optim.inverse_square_root(step, warmup=16, **COMMON) for step in range(100)]
    assert max(rates) == rates[16] == 0.5
    assert rates[64] == pytest.approx(0.25)
    assert optim.inverse_square_root(25, **COMMON) == pytest.approx(0.1)


def test_plateau_follows_the_valid_figures():
    def rate(*valid_nll, **options):
        return optim.plateau(50, lr=0.5, steps=100, valid_nll=valid_nll, **options)

    assert rate() == rate(3.0) == rate(3.0, 2.0) == 0.5
    assert rate(3.0, 3.0) == rate(3.0, 3.1, 2.9) == 0.25
    assert rate(3.0, 3.1, 3.1) == 0.125
    assert rate(3.0, 3.1, patience=1) == 0.5
    assert rate(3.0, 3.1, 3.1, patience=1) == 0.25
    assert rate(3.0, 3.1, factor=0.1) == pytest.approx(0.05)
    assert rate(3.0, 3.1, lr_min=0.4) == 0.4


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"factor": 1.0}, "factor"),
        ({"factor": math.nan}, "factor"),
        ({"patience": -1}, "patience"),
        ({"lr_min": 2}, "lr_min"),
    ],
)
def test_plateau_refuses_settings_without_a_meaning(options, key):
    with pytest.raises(ValueError, match=rf"schedule\.{key}: must"):
        optim.plateau(0, **COMMON, **options)


def test_plateau_is_torchs_own():
    figures = [3.0, 2.5, 2.6, 2.7, 2.4, 2.5, 2.5, 2.5, 2.5, 2.3]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0)
    for count, nll in enumerate(figures, start=1):
        theirs.step(nll)
        ours = optim.plateau(50, lr=0.5, steps=100, valid_nll=figures[:count], patience=1)
        assert ours == optimizer.param_groups[0]["lr"]


def test_weight_decay_spares_biases_norms_u_and_v():
    model = tiny_model()
    decayed, spared = optim.parameter_groups(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(parameter)].rsplit(".", 1)[-1] for parameter in decayed["params"]} == {"weight"}
    kinds = {names[id(parameter)].rsplit(".", 1)[-1] for parameter in spared["params"]}
    assert kinds == {"bias", "out_bias", "weight", "r_w_bias", "r_r_bias"}
    assert spared["weight_decay"] == 0
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))
    assert all("norm" in names[id(p)] for p in spared["params"] if names[id(p)].endswith("weight"))


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adagrad"])
def test_optimizers_take_their_settings_and_step(name):
    cfg = compose(f"optimizer={name}", "optimizer.lr=0.05", "optimizer.weight_decay=0.3")
    model = tiny_model()
    optimizer = build(cfg.optimizer)(optim.parameter_groups(model))
    assert type(optimizer).__name__.lower() == name
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    before = [parameter.clone() for parameter in model.parameters()]
    model(torch.tensor([[1, 2]]), None, torch.tensor([[2, 3]]))[0].mean().backward()
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))
