"""Rules of the source that no linter knows: who reads the environment, no pickle, no waiting for the device."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from contract_reading import imports, is_package, sources

ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
GROUPS = {"init_process_group", "new_group", "new_subgroups", "init_device_mesh", "DeviceMesh"}
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
TORCH_PICKLES = {"save", "load"}
PICKLING_MODULES = ("torch.distributed.checkpoint", "torch.package", "torch.hub", "torch.jit")
RUNS_TEXT = {"eval", "exec", "compile", "__import__", "import_module", "run_module", "run_path", "locate"}
READS_FOREIGN_FILES = {"checkpoint", "records"}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
READS = {"item", "tolist", "cpu", "numpy", "synchronize"}
MAY_READ = "read_"

Trees = dict[str, ast.Module]


def uses_outside(trees: Trees, room: str, names: set[str]) -> list[str]:
    """Each use of one of these names, as an attribute or an import, outside `room`."""
    return [
        f"{module}:{line} uses {name}"
        for module, tree in trees.items()
        if module.split(".")[1:2] != [room]
        for name, line in (*_attributes(tree), *_names_taken(module, tree))
        if name in names
    ]


def _attributes(tree: ast.AST) -> list[tuple[str, int]]:
    return [(node.attr, node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]


def _names_taken(module: str, tree: ast.Module) -> list[tuple[str, int]]:
    taken = imports(tree, module=module, package=is_package(module))
    return [(item.name, item.line) for item in taken if item.name is not None]


def pickles(trees: Trees) -> list[str]:
    """Each import or call through which a pickle is written or read, which would run code that a file holds."""
    return [f"{module}:{line} uses {name}" for module, tree in trees.items() for name, line in _pickles(module, tree)]


def _pickles(module: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    for item in imports(tree, module=module, package=is_package(module)):
        full = f"{item.module}.{item.name}"
        of_torch = (item.module == "torch" and item.name in TORCH_PICKLES) or _is_in(full, PICKLING_MODULES)
        if item.module.split(".")[0] in PICKLES or item.name in OBJECT_COLLECTIVES or of_torch:
            yield full, item.line
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr=attr) if attr in TORCH_PICKLES:
                yield f"torch.{attr}", node.lineno
            case ast.Attribute(attr=attr) if attr in OBJECT_COLLECTIVES:
                yield attr, node.lineno
            case ast.keyword(arg="allow_pickle", value=value) if not _is_false(value):
                yield "allow_pickle", value.lineno


def _is_in(name: str, modules: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def runs_text(trees: Trees) -> list[str]:
    """Each place, in the rooms that read what others wrote, that could run it or import what it names."""
    return [
        f"{module}:{line} uses {name}"
        for module, tree in trees.items()
        if READS_FOREIGN_FILES & set(module.split(".")[1:2])
        for name, line in _runs_text(module, tree)
    ]


def _runs_text(module: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    written_out = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and _names_a_module(node)]
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) if name in RUNS_TEXT:
                yield name, node.lineno
            case ast.Attribute(attr=name) if name in RUNS_TEXT - {"compile"} and node not in written_out:
                yield name, node.lineno  # compile: of a regular expression
    for name, line in _names_taken(module, tree):
        if name in RUNS_TEXT:
            yield name, line


def _names_a_module(call: ast.Call) -> bool:
    return bool(call.args) and isinstance(call.args[0], ast.Constant)


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def device_reads(trees: Trees) -> list[str]:
    """Each place in the engine that makes the host wait for the device, outside a function named `read_...`.

    Such functions are called once per step; a wait per micro-batch would drain the device's queue. What the source
    does not show, as `float(tensor)`, is counted at run time by test_hot_path.py.
    """
    return [
        f"{module}:{line} waits for the device by {name}"
        for module, tree in trees.items()
        if module.split(".")[1:2] == ["engine"]
        for name, line in _device_reads(tree)
    ]


def _device_reads(node: ast.AST) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and child.name.lstrip("_").startswith(MAY_READ):
            continue
        match child:
            case ast.Call(func=ast.Attribute(attr=attr)) if attr in READS:
                yield attr, child.lineno
            case ast.Call(func=ast.Attribute(attr="to"), args=[ast.Constant(value="cpu"), *_]):
                yield 'to("cpu")', child.lineno
        yield from _device_reads(child)


def test_only_world_reads_the_environment() -> None:
    assert uses_outside(sources(), "world", ENVIRONMENT) == []


def test_only_world_makes_groups_and_meshes() -> None:
    assert uses_outside(sources(), "world", GROUPS) == []


def test_nothing_is_pickled() -> None:
    assert pickles(sources()) == []


def test_nothing_that_is_read_can_run() -> None:
    assert runs_text(sources()) == []


def test_the_engine_waits_for_the_device_only_where_it_says_so() -> None:
    assert device_reads(sources()) == []


def faults(rule: Callable[[Trees], list[str]], module: str, text: str) -> list[str]:
    return rule({module: ast.parse(text)})


def test_a_use_of_the_environment_is_found() -> None:
    def rule(trees: Trees) -> list[str]:
        return uses_outside(trees, "world", ENVIRONMENT)

    assert faults(rule, "trimaran.world.discover", "import os\nos.environ['RANK']") == []
    assert faults(rule, "trimaran.run.loop", "import os\nos.getpid()") == []
    assert faults(rule, "trimaran.run.loop", "import os\nos.environ.get('RANK')")
    assert faults(rule, "trimaran.run.loop", "from os import getenv as ask")
    assert faults(rule, "trimaran", "import os as system\nsystem.getenv('RANK')")


def test_a_pickle_is_found() -> None:
    assert (
        faults(pickles, "trimaran.run.loop", "import json, numpy\nnumpy.load(f, allow_pickle=False)\nf.save(x)") == []
    )
    assert faults(pickles, "trimaran.run.loop", "import pickle")
    assert faults(pickles, "trimaran.run.loop", "def f():\n    from cloudpickle import dumps")
    assert faults(pickles, "trimaran.run.loop", "import torch\ntorch.load(path)")
    assert faults(pickles, "trimaran.run.loop", "from torch import save")
    assert faults(pickles, "trimaran.run.loop", "numpy.load(path, allow_pickle=True)")
    assert faults(pickles, "trimaran.run.loop", "dist.all_gather_object(found, mine)")


def test_a_pickle_under_another_name_is_found() -> None:
    assert faults(pickles, "trimaran.run.loop", "import torch.distributed as dist\nimport torch.jitter") == []
    assert faults(pickles, "trimaran.checkpoint.saving", "import torch.distributed.checkpoint as dcp")
    assert faults(pickles, "trimaran.checkpoint.saving", "from torch.distributed import checkpoint")
    assert faults(pickles, "trimaran.checkpoint.saving", "from torch.distributed.checkpoint import save")
    assert faults(pickles, "trimaran.checkpoint.saving", "def f():\n    from torch import hub")


def test_what_would_run_a_file_is_found() -> None:
    where = "trimaran.checkpoint.reading"
    assert faults(runs_text, where, "import re, importlib\nre.compile('a')\nimportlib.import_module('peft')") == []
    assert faults(runs_text, "trimaran.optim.reference", "import importlib\nimportlib.import_module(name)") == []
    assert faults(runs_text, where, "import importlib\nimportlib.import_module(kind)")
    assert faults(runs_text, where, "from importlib import import_module as fetch")
    assert faults(runs_text, "trimaran.records.runs", "value = eval(text)")
    assert faults(runs_text, where, "list(map(exec, texts))")


def test_a_wait_for_the_device_is_found() -> None:
    where = "trimaran.engine.step"
    assert faults(device_reads, where, "def read_norm(self):\n    return self.norm.item()") == []
    assert faults(device_reads, "trimaran.run.loop", "loss.item()") == []
    assert faults(device_reads, where, "def accumulate(self):\n    self.loss.item()")
    assert faults(device_reads, where, "loss = total.to('cpu')")
    assert faults(device_reads, where, "ids = lambda x: x.tolist()")
