"""What keeps the house in order: imports go one way, nothing is left unfinished."""

import ast
import subprocess
import sys

from conftest import ROOT

ORDER = [
    ["txl.signature", "txl.signals", "txl.settings", "txl.tiles", "txl.ops", "txl.losses"],
    ["txl.layers"],
    ["txl.model", "txl.transformer"],
    ["txl.data", "txl.optim", "txl.averaging", "txl.runtime", "txl.ranks", "txl.sharding"],
    [
        "txl.evaluation",
        "txl.generation",
        "txl.archive",
        "txl.checkpoint",
        "txl.saver",
        "txl.curves",
        "txl.trackers",
        "txl.tracking",
    ],
    ["txl.fitting"],
    ["txl.training"],
    ["txl.runs", "txl.resuming", "txl.report", "txl.figures", "txl.sweep"],
    ["txl.instruments", "txl.interop"],
    ["txl.printing"],
    ["txl.scoring", "txl.conversation"],
]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rank(name):
    for level, modules in enumerate(ORDER):
        if any(name == module or name.startswith(f"{module}.") for module in modules):
            return level
    return None


def test_imports_go_up_only():
    for path in sorted((ROOT / "txl").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        level = rank(module)
        for name in imports(path):
            if level is not None and (other := rank(name)) is not None:
                assert other <= level, f"{module} imports {name}"
    known = {"txl.signature", "txl.signals"}  # of the standard library only
    own = {name for name in imports(ROOT / "txl" / "config.py") if name.startswith("txl")}
    assert {".".join(name.split(".")[:2]) for name in own} == known


def test_only_config_and_its_callback_know_hydra():
    for path in sorted((ROOT / "txl").rglob("*.py")):
        if path.name not in ("config.py", "sweep.py"):
            assert not [name for name in imports(path) if name.split(".")[0] in ("hydra", "omegaconf")], path
    known = {name for name in imports(ROOT / "txl" / "sweep.py") if name.startswith("hydra")}
    assert known == {"hydra.experimental.callback", "hydra.experimental.callback.Callback"}


def test_the_model_needs_nothing_but_torch_einops_and_jaxtyping():
    program = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'hydra', 'omegaconf', 'rich', 'matplotlib', 'wandb', 'safetensors', 'yaml'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import txl.ops, txl.model, txl.transformer, txl.layers.memory, txl.layers.position, txl.layers.softmax\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)
