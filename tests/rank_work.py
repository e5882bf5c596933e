"""What processes do in test_ranks.py: here, since a process that starts anew has to import it."""

import os
import signal
import time
from datetime import timedelta

import torch
from conftest import tiny_model

from txl import optim
from txl.averaging import Average, ExponentialAverage
from txl.config import build, compose
from txl.data.streams import Lanes
from txl.evaluation import evaluate
from txl.sharding import is_sharded, spread, whole
from txl.training import Run, updates

ADAPTIVE = ["model/softmax=adaptive", "model.softmax.cutoffs=[10,30]", "model.softmax.div_val=2"]
CASES = {
    "plain": ([], 1, "none"),
    "accumulated": ([], 2, "none"),
    "adaptive": (ADAPTIVE, 2, "none"),
    "adaptive untied": ([*ADAPTIVE, "model.tie_weight=false", "model.untie_r=true"], 1, "none"),
    "no memory": (["model/memory=none", "model.pre_norm=true"], 1, "none"),
    "same length": (["model.same_length=true"], 4, "none"),
    "borders": ([], 2, "borders"),
    "sharded": ([], 1, "full"),
    "sharded adaptive": (ADAPTIVE, 2, "full"),
}


def made(case, ranks):
    """A run of 8 lanes in float64, whose last segment of each pass is short."""
    options, accumulate, how = CASES[case]
    model = tiny_model(*options)
    tokens = torch.randint(50, (8 * 44 + 1,), generator=torch.Generator().manual_seed(4)).numpy()
    borders = torch.arange(0, 300, 7).numpy() if how == "borders" else None
    lanes = Lanes(tokens, batch_size=8, tgt_len=10, borders=borders, rows=ranks.share(8))
    replica = spread(model, ranks, torch.device("cpu"), sharding=how if how == "full" else "none")
    optimizer = build(compose("train", ["optimizer=adamw", "optimizer.lr=0.01"]).optimizer)(
        optim.parameter_groups(model)
    )
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return Run(model=model, replica=replica, optimizer=optimizer, lanes=lanes, scaler=scaler, ranks=ranks), accumulate


def constant(step, *, lr, steps, valid_nll):
    return lr


def train_all(ranks, stop):
    """The losses, the norms, the final weights and memory of 12 updates, with a save and a fresh start after 7."""
    results = {}
    for case in CASES:
        run, accumulate = made(case, ranks)
        how = dict(lr=0.01, schedule=constant, clip=0.25, accumulate=accumulate)
        done = list(updates(run, steps=7, **how))
        state = run.state_dict()
        weights = {name: whole(one).clone() for name, one in run.model.state_dict().items()}
        states = [state] if ranks.size == 1 else [None]
        if ranks.size > 1:
            states = [state]
            torch.distributed.broadcast_object_list(states, src=0)  # as if read from one file
        again, _ = made(case, ranks)
        from txl.checkpoint import load_weights

        load_weights(again.model, weights)
        again.load_state_dict(states[0])
        done += list(updates(again, steps=12, **how))
        mems = [ranks.whole_batch(memory) for memory in again.mems]
        results[case] = {
            "nll": [update.nll for update in done],
            "norm": [update.grad_norm for update in done],
            "tokens": again.tokens,
            "unlogged": again.take_unlogged()["train/nll"],
            "weights": [whole(one).flatten().tolist() for one in again.model.state_dict().values()],
            "mems": [memory.flatten().nan_to_num(99.0).tolist() for memory in mems],
            "sharded": is_sharded(again.model),
        }
    return results


def count_exchanges(ranks, stop):
    """How many gradient exchanges an accumulated update makes."""
    run, _ = made("accumulated", ranks)
    counts = [0]

    def counting(state, bucket):
        counts[0] += 1
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    run.replica.register_comm_hook(None, counting)
    found = []
    for _ in updates(run, steps=3, lr=0.01, schedule=constant, accumulate=4):
        found.append(counts[0])
        counts[0] = 0
    return found


def evaluate_all(ranks, stop):
    """Figures of a text by several settings, in float64."""
    from txl.data.corpus import text_files
    from txl.data.vocab import Bytes

    corpus = text_files(vocab=Bytes(), train="t.txt", valid="t.txt", test="t.txt", cache_dir="cache")
    with ranks.main_first():
        split = corpus.split("test", corpus.vocabulary())
    figures = []
    for options in ([], ["model.same_length=true"], ["model/memory=none"]):
        model = tiny_model(*options, n_token=256)
        for reading in (dict(batch_size=1, tgt_len=7), dict(batch_size=3, tgt_len=16, max_segments=2)):
            figures.append(evaluate(model, split, precision="fp32", ranks=ranks, **reading))
    if ranks.size > 1:  # one has twice as many lanes as the other, and each segment takes a while: no hang
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
        from txl import evaluation

        real, evaluation.AT_ONCE = evaluation.scoring_segments, 60
        evaluation.scoring_segments = lambda *given, **how: (
            time.sleep(0.7 * (ranks.rank == 0)) or one for one in real(*given, **how)
        )
        reading = dict(batch_size=3, tgt_len=7)
        figures.append(evaluate(model, split, precision="fp32", ranks=ranks, **reading))
        evaluation.scoring_segments = real
    else:
        figures.append(evaluate(model, split, precision="fp32", ranks=ranks, batch_size=3, tgt_len=7))
    left = evaluate(
        model, split, precision="fp32", ranks=ranks, interrupted=lambda: ranks.rank == ranks.size - 1, **reading
    )
    return figures, left


def go_wrong(kind, ranks, stop):
    """One of the processes raises, dies or hangs while the other waits for it."""
    ranks.agree(1)
    if kind == "hang":
        ranks.settled()
    if ranks.rank == 1:
        if kind == "mistake":
            raise ValueError("data.train: something is wrong with it")
        if kind == "raise":
            raise KeyError("a bug of ours")
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
    return ranks.agree(2)


def wait_for_the_first(ranks, stop):
    """Longer than a hung process would be waited for."""
    ranks.settled()
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    until = time.monotonic() + 3
    ranks.wait_until(lambda: time.monotonic() > until)
    return ranks.agree(ranks.rank)[0]


def averaged(ranks, stop):
    """Each process's average of the weights of 9 updates; of several, it was in the model's place after the fourth."""
    run, _ = made("plain", ranks)
    run.average = Average(rule=ExponentialAverage(decay=0.8))
    for update in updates(run, steps=9, lr=0.01, schedule=constant, clip=0.25):
        if update.step == 4 and ranks.size > 1:
            with run.average.in_place(run.model), torch.no_grad():
                run.model.eval()(torch.zeros(2, 5, dtype=torch.long), None)
                run.model.train()
    return ranks.gather([weights.flatten().tolist() for weights in run.average.weights.values()])
