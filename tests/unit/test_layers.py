"""Imports go down: a file imports its own layer and lower ones, and no two files import each other, however far apart.

Every import counts, also those inside functions and those that only type checkers see.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.unit import syntax

ROOT = Path(__file__).parents[2]
PACKAGES = {"gba_hvd": "gba_hvd", "recovery": "recovery", "gba_hvd_tools": "tools"}
# Lowest first. A name stands for a file, or for a package and all in it that has no entry of its own.
LAYERS = {
    "gba_hvd": [
        ["errors", "extras", "config", "mode_names", "callbacks", "batch", "gc_pause", "kernel_cache", "kernels"],
        ["shm", "epoch"],
        ["embedding", "gradients", "comm", "torch_optimizers", "update_rules"],
        ["metrics", "faults", "trace", "data", "reading", "convert"],
        ["compression", "averaging"],
        ["ps"],
        ["ps.partition"],
        ["ps.coordinator"],
        ["ps.server", "ps.worker"],
        ["training"],
        ["modes"],
        ["checkpoint", "switching"],
        ["membership", "tracking"],
        ["elastic"],
        [
            "optimizer",
            "batch_keys",
            "batches",
            "between_epochs",
            "evaluation",
            "evaluation_reader",
            "retrieval",
            "losses",
            "hogwild",
        ],
        ["serving"],
        ["testing"],
    ],
    "recovery": [
        [
            "errors",
            "old_names",
            "environment",
            "redaction",
            "printable",
            "registry",
            "state_codec",
            "rows",
            "hashed_ids",
            "policies",
            "units",
        ],
        ["storage"],
        ["format"],
        ["catalog"],
        ["config"],
        ["selection", "restore"],
        ["write", "schedule"],
        ["events", "save_requests", "torch_rows", "active_chain", "simulation", "callback"],
        ["checkpointer"],
        ["child"],
        ["process_checkpointer"],
        ["testing"],
    ],
    "gba_hvd_tools": [
        [
            "terminal",
            "signals",
            "virtual_hosts",
            "picture",
            "build_progress",
            "process_list",
            "running_jobs",
            "step_time_words",
            "health_words",
            "folder_argument",
        ],
        ["build_horovod", "checkpoint", "doctor", "launch", "plan", "bench.harness"],
        ["simulated"],
        ["bench", "chaos"],
        ["commands", "simulated.real_worker"],
        ["cli"],
    ],
}
BESIDE = {"gba_hvd.tracking": {"gba_hvd.errors", "gba_hvd.extras", "gba_hvd.config", "gba_hvd.mode_names",
                               "gba_hvd.callbacks"}}  # fmt: skip


def modules() -> dict[str, Path]:
    found = {}
    for name, folder in PACKAGES.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = [name, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def nodes(module: str) -> list[ast.AST]:
    """All nodes of a file's syntax tree."""
    return syntax.nodes(MODULES[module].read_text())


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of these packages that a file imports anywhere."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else base for name in names}
    return frozenset(one for one in found if one in MODULES and one != module)


def layer(module: str) -> int | None:
    """None: the package itself, whose `__init__` imports what users call."""
    package, _, rest = module.partition(".")
    if not rest:
        return None
    while rest:
        for number, names in enumerate(LAYERS[package]):
            if rest in names:
                return number
        rest = rest.rpartition(".")[0]
    raise AssertionError(f"{module} is in no layer: say in which one it is")


def edges() -> Iterator[tuple[str, str]]:
    for module in sorted(MODULES):
        yield from ((module, other) for other in sorted(imports(module)))


def test_no_import_goes_up_a_layer():
    upwards = set()
    for module, other in edges():
        if module.partition(".")[0] != other.partition(".")[0]:
            continue
        mine, its = layer(module), layer(other)
        if mine is not None and its is not None and its > mine:
            upwards.add((module, other))
    assert not upwards


def test_packages_are_imported_from_above_only():
    below = {"recovery": {"gba_hvd", "gba_hvd_tools"}, "gba_hvd": {"gba_hvd_tools"}, "gba_hvd_tools": set[str]()}
    wrong = [(a, b) for a, b in edges() if b.partition(".")[0] in below[a.partition(".")[0]]]
    assert not wrong


def test_what_stands_beside_the_layers_knows_the_vocabulary_only():
    for beside, vocabulary in BESIDE.items():
        for module, other in edges():
            if module.startswith(beside) and other.startswith("gba_hvd."):
                assert other.startswith(beside) or other in vocabulary, f"{module} imports {other}"


def test_no_circle_of_files():
    """Files are taken away whose imports are all gone; what is left is in a circle, or imports one."""
    left = {module: imports(module) for module in MODULES}
    while free := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in free:
            del left[module]
    assert not left


# --- modes -----------------------------------------------------------------------------------------------------------

MODE_CLASSES = {
    "AllreduceMode", "ParameterServerMode", "ModelAveragingMode", "SharesReplica", "AllreduceExchange", "PsWorker",
    "ReplicaWorker",
}  # fmt: skip


def test_nobody_but_those_who_change_modes_asks_which_one_it_is():
    """`hogwild` asks for an ability, once."""
    asking = []
    for module in MODULES:
        for node in nodes(module):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                named = {one.id for one in ast.walk(node.args[1]) if isinstance(one, ast.Name)}
                if named & MODE_CLASSES and not module.startswith(("gba_hvd.modes.", "gba_hvd.switching.")):
                    asking.append(module)
    assert asking == ["gba_hvd.hogwild"]


def test_others_assign_the_world_and_the_mode_of_an_engine_and_nothing_else():
    assigned = set()
    for module in MODULES:
        if module == "gba_hvd.training.engine" or not module.startswith("gba_hvd."):
            continue
        for node in nodes(module):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = node.value
                name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
                if name in ("engine", "_engine"):
                    assigned.add(node.attr)
    assert assigned == {"world", "mode"}


def test_the_engine_is_short():
    assert len(MODULES["gba_hvd.training.engine"].read_text().splitlines()) < 250
