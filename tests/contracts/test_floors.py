"""A module imports only from lower floors, never from a sibling on its own floor. There are no exceptions."""

from __future__ import annotations

import ast
import subprocess
import sys

from contract_reading import Import, imports, is_package, sources

FLOORS: tuple[tuple[str, frozenset[str]], ...] = (
    ("0 errors", frozenset({"errors"})),  # beneath the other words, which raise them
    ("0 words", frozenset({"units"})),
    ("1 nouns", frozenset({"job", "layout", "batch", "cluster", "options", "records", "phases", "tensor_plan"})),
    ("2 world", frozenset({"world"})),
    ("3 mechanisms", frozenset({"data", "losses", "optim", "engine", "checkpoint"})),
    ("4 foresight", frozenset({"planner"})),
    ("5 runs", frozenset({"run"})),
    ("6 uses", frozenset({"prove", "launch", "report"})),
    ("7 doors", frozenset({"cli"})),
    ("7 doorstep", frozenset({"__main__"})),  # python -m trimaran
)
LEVEL = {room: level for level, (_, rooms) in enumerate(FLOORS) for room in rooms}
NO_TORCH = frozenset({"0 errors", "0 words", "1 nouns"})
STANDARD_LIBRARY_ONLY = frozenset({"0 errors", "0 words"})


def rooms_of(floors: frozenset[str]) -> frozenset[str]:
    """The rooms on the floors so named."""
    return frozenset[str]().union(*(rooms for name, rooms in FLOORS if name in floors))


def floor_faults(trees: dict[str, ast.Module]) -> list[str]:
    """Each import that breaks the rule of the floors, and each room that stands on none, as sentences."""
    faults = []
    for module, tree in trees.items():
        room = room_of(module)
        if room is None:
            faults += [
                f"trimaran:{item.line} {fault}"
                for item in imports(tree, module=module, package=True)
                for fault in face_faults(item)
            ]
        elif room not in LEVEL:
            faults.append(f"{module} stands on no floor")
        else:
            faults += [
                f"{module}:{item.line} {fault}"
                for item in imports(tree, module=module, package=is_package(module))
                for fault in import_faults(room, item)
            ]
    return faults


def room_of(module: str) -> str | None:
    """The module or package directly under trimaran; None for the public face."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def import_faults(room: str, item: Import) -> list[str]:
    """What is wrong with this import in a module of `room`."""
    other = imported_room(item)
    if other is None or other == room:
        return []
    if other not in LEVEL:
        return [f"imports {other!r}, which stands on no floor (the public face is for users)"]
    if LEVEL[other] == LEVEL[room]:
        return [f"imports {other!r}, which stands on the same floor, {FLOORS[LEVEL[room]][0]!r}"]
    if LEVEL[other] > LEVEL[room]:
        return [f"imports {other!r}, which stands higher, on {FLOORS[LEVEL[other]][0]!r}"]
    return []


def face_faults(item: Import) -> list[str]:
    """The public face names every floor, but loads only nouns and words before a name is asked for."""
    other = imported_room(item)
    if other is None or not item.at_import or other in rooms_of(NO_TORCH):
        return []
    return [f"loads {other!r} at import: the public face is lazy"]


def imported_room(item: Import) -> str | None:
    """The room an import reaches, or the public face ("trimaran"); None for other packages."""
    top, *rest = item.module.split(".")
    if top != "trimaran":
        return None
    return rest[0] if rest else item.name if item.name in LEVEL else "trimaran"


def test_the_house_keeps_its_floors() -> None:
    assert floor_faults(sources()) == []


def test_each_kind_of_breach_is_found() -> None:
    def faults(module: str, text: str) -> list[str]:
        return floor_faults({module: ast.parse(text)})

    assert (
        faults("trimaran.run.loop", "from trimaran.engine.step import Engine\nimport trimaran.errors\nimport os") == []
    )
    assert (
        faults("trimaran.run.loop", "from . import state\nfrom .state import State\nfrom trimaran import errors") == []
    )
    assert faults("trimaran.data.order", "from trimaran.engine.step import Engine")  # a sibling
    assert faults("trimaran.job", "if TYPE_CHECKING:\n    from trimaran.data import Batch")  # for types only
    assert faults("trimaran.job", "def f():\n    import trimaran.run")  # in a function
    assert faults("trimaran.engine.step", "from ..run.loop import loop")  # relative
    assert faults("trimaran.engine.step", "importlib.import_module('trimaran.run.loop')")  # by name
    assert faults("trimaran.engine.step", "from trimaran import start")  # through the public face
    assert faults("trimaran.engine.step", "import trimaran")
    assert faults("trimaran.engine.step", "from trimaran.helpers import f")  # from no floor
    assert faults("trimaran.helpers", "")  # a room on no floor


def test_the_public_face_is_lazy() -> None:
    def faults(text: str) -> list[str]:
        return floor_faults({"trimaran": ast.parse(text)})

    assert faults("from trimaran.job import Job\nif TYPE_CHECKING:\n    from trimaran.run import start") == []
    assert faults("def __getattr__(name):\n    return importlib.import_module(f'trimaran.{name}')") == []
    assert faults("from trimaran.run import start")
    assert faults("from .data import pad")


def foreign_imports(trees: dict[str, ast.Module]) -> list[str]:
    """Imports beyond the standard library, in rooms that may use nothing else."""
    allowed = sys.stdlib_module_names | {"trimaran"}
    rooms = rooms_of(STANDARD_LIBRARY_ONLY)
    return [
        f"{module}:{item.line} imports {item.module}"
        for module, tree in trees.items()
        if room_of(module) in rooms
        for item in imports(tree, module=module, package=is_package(module))
        if item.module.split(".")[0] not in allowed
    ]


def test_words_use_the_standard_library_only() -> None:
    assert foreign_imports(sources()) == []
    assert foreign_imports({"trimaran.units": ast.parse("import re\nimport numpy")})


def first_to_load_torch(modules: list[str]) -> str | None:
    """The first of these modules after whose import, in a fresh interpreter, torch is loaded."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: print(name); break\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True)
    return ran.stdout.strip() or None


def test_the_lowest_floors_do_not_load_torch() -> None:
    rooms = rooms_of(NO_TORCH)
    modules = [module for module in sources() if room_of(module) is None or room_of(module) in rooms]
    assert "trimaran" in modules
    assert "trimaran.job" in modules
    assert first_to_load_torch(modules) is None


def test_loading_torch_is_noticed() -> None:
    assert first_to_load_torch(["json", "torch"]) == "torch"
