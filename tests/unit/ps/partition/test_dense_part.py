"""The dense part of a server: the user's optimizer to the bit, and whole after a kill at any line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gba_hvd
from gba_hvd.errors import BadInput, ShardMemoryError, StateMismatch
from gba_hvd.optimizer import DistributedOptimizer
from gba_hvd.ps import dense_file
from gba_hvd.ps.dense_file import DenseReader, DenseTensor
from gba_hvd.ps.partition.dense_part import DensePart
from gba_hvd.torch_optimizers import build, put_state, register_optimizer, resolve, spec_of

TENSORS = [
    DenseTensor("w", (5, 3), 0),
    DenseTensor("b", (), 1),
    DenseTensor("out", (7,), 0),
    DenseTensor("c", (4, 2), 1),
]
N = sum(t.size for t in TENSORS)
LRS = [0.05, 0.003]
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda groups: torch.optim.SGD(groups, weight_decay=0.01),
    "momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, initial_accumulator_value=0.1),
    "adam": lambda groups: torch.optim.Adam(groups, betas=(0.8, 0.99), amsgrad=True),
    "adamw": torch.optim.AdamW,
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5, centered=True),
    "nadam": torch.optim.NAdam,
    "fused adam": lambda groups: torch.optim.Adam(groups, fused=True),
    "foreach adam": lambda groups: torch.optim.Adam(groups, foreach=True),
}


@register_optimizer
class Counting(torch.optim.Optimizer):
    """Keeps what torch's own do not: plain values, a list, late tensors, a changing hyper-parameter, a new `data`."""

    def __init__(self, params: Any, lr: float, pace: tuple[float, ...] = (1.0,)) -> None:
        super().__init__(params, {"lr": lr, "pace": pace, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["calls"] = state.get("calls", 0) + 1
                state["last"] = [float(p.grad.sum()), None, (True, "x")]
                if state["calls"] >= 3:
                    state.setdefault("late", torch.zeros(1000, dtype=torch.float64)).add_(1)
                p.data = p - group["lr"] * group["pace"][0] * group["seen"] * p.grad


class Closing(torch.optim.Optimizer):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        pass


class Plain:
    """A plain torch optimizer over the same tensors, to compare with."""

    def __init__(self, make: Make, values: np.ndarray) -> None:
        ends = np.cumsum([0, *(t.size for t in TENSORS)])
        self.params = [
            torch.nn.Parameter(torch.tensor(values[a:b]).view(t.shape))
            for t, a, b in zip(TENSORS, ends[:-1], ends[1:], strict=True)
        ]
        groups: list[dict[str, Any]] = [{"params": [], "lr": lr} for lr in LRS]
        for t, p in zip(TENSORS, self.params, strict=True):
            groups[t.group]["params"].append(p)
        self.optimizer = make(groups)

    def step_(self, grad: np.ndarray, lrs: list[float]) -> None:
        at = 0
        for p in self.params:
            p.grad = torch.tensor(grad[at : at + p.numel()]).view(p.shape)
            at += p.numel()
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr
        self.optimizer.step()

    @property
    def values(self) -> np.ndarray:
        return np.concatenate([p.detach().numpy().ravel() for p in self.params])

    def state(self) -> list[dict[str, Any]]:
        return [dict(self.optimizer.state[p]) if p in self.optimizer.state else {} for p in self.params]


def a_gradient(step: int, n: int = N) -> np.ndarray:
    return np.random.default_rng(step).normal(size=n).astype(np.float32)


def the_rates(step: int) -> list[float]:
    return [lr / (1 + 0.1 * step) for lr in LRS]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and bool(a == b)


def a_part(path: Path, make: Make = OPTIMIZERS["adam"], step: int = 0) -> tuple[DensePart, Plain]:
    values = a_gradient(1000)
    plain = Plain(make, values)
    spec = json.loads(json.dumps(spec_of(plain.optimizer)))  # as it travels
    return DensePart.create(path, TENSORS, spec, values, [{}] * len(TENSORS), step), plain


def test_changed_settings_are_those_of_the_plain_optimizer_also_for_a_new_process(tmp_path: Path) -> None:
    part, plain = a_part(tmp_path / "dense")
    for step in range(1, 7):
        changed = [{"betas": (0.5 + step / 20, 0.9), "eps": 1e-3}, {"weight_decay": 0.5 / step}] if step < 4 else []
        for group, new in zip(plain.optimizer.param_groups, changed, strict=False):
            group.update(new)
        part.step_(a_gradient(step), LRS, step, settings=changed)
        plain.step_(a_gradient(step), LRS)
        if step == 4:
            part.close()
            part = DensePart.open(tmp_path / "dense")
    np.testing.assert_array_equal(part.values, plain.values)
    assert same(part.state(), plain.state())
    part.close()


# --- the optimizer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_are_those_of_the_plain_optimizer_to_the_bit(tmp_path: Path, name: str) -> None:
    part, plain = a_part(tmp_path / "dense", OPTIMIZERS[name])
    for step in range(1, 21):
        part.step_(a_gradient(step), the_rates(step), step)
        plain.step_(a_gradient(step), the_rates(step))
        if step % 7 == 0:  # a new process takes over
            part.close()
            part = DensePart.open(tmp_path / "dense")
    assert part.step == 20
    assert np.array_equal(part.values, plain.values)
    assert same(part.state(), plain.state())


def test_looking_ahead_changes_what_is_shown_and_nothing_else(tmp_path: Path) -> None:
    _, plain = a_part(tmp_path / "unused")
    spec, start = spec_of(plain.optimizer), plain.values
    part = DensePart.create(tmp_path / "dense", TENSORS, spec, start, [{}] * len(TENSORS), 0, shown=start.copy())
    for step in range(1, 6):
        before = plain.values
        part.step_(a_gradient(step), the_rates(step), step, ahead=0.5)
        plain.step_(a_gradient(step), the_rates(step))
        part.close()
        part = DensePart.open(tmp_path / "dense")  # a server that starts again shows it on
        assert np.array_equal(part.values, plain.values) and same(part.state(), plain.state())
        np.testing.assert_allclose(part.shown, plain.values + 0.5 * (plain.values - before), rtol=1e-6)
    with pytest.raises(BadInput):
        part.step_(a_gradient(6), [], 6, ahead=0.5)
    np.testing.assert_allclose(part.shown, plain.values + 0.5 * (plain.values - before), rtol=1e-6)


def test_a_part_made_in_the_middle_goes_on_where_the_workers_were(tmp_path: Path) -> None:
    _, plain = a_part(tmp_path / "unused")
    for step in range(1, 6):
        plain.step_(a_gradient(step), the_rates(step))
    spec = spec_of(plain.optimizer)
    part = DensePart.create(tmp_path / "dense", TENSORS, spec, plain.values, plain.state(), 5)
    assert part.step == 5 and same(part.state(), plain.state())
    for step in range(6, 9):
        plain.step_(a_gradient(step), the_rates(step))
        part.step_(a_gradient(step), the_rates(step), step)
    assert np.array_equal(part.values, plain.values) and same(part.state(), plain.state())


def test_an_optimizer_of_ones_own_keeps_whatever_it_remembers(tmp_path: Path) -> None:
    part, plain = a_part(tmp_path / "dense", lambda groups: Counting(groups, lr=0.1, pace=(0.5, 2.0)))
    for step in range(1, 9):
        part.step_(a_gradient(step), the_rates(step), step)
        plain.step_(a_gradient(step), the_rates(step))
        part.close()
        part = DensePart.open(tmp_path / "dense")
        assert np.array_equal(part.values, plain.values) and same(part.state(), plain.state())


def test_a_server_may_hold_no_tensor_of_a_group_or_none_at_all(tmp_path: Path) -> None:
    spec = spec_of(OPTIMIZERS["adam"]([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(2)]}]))
    some = DensePart.create(tmp_path / "some", [DenseTensor("w", (2,), 1)], spec, np.ones(2, np.float32), [{}], 0)
    some.step_(np.ones(2, np.float32), LRS, 1)
    none = DensePart.create(tmp_path / "none", [], spec, np.zeros(0, np.float32), [], 0)
    none.step_(np.zeros(0, np.float32), LRS, 1)
    assert (some.values != 1).all()
    assert DensePart.open(tmp_path / "none").step == 1
    assert DenseReader(tmp_path / "none").read(np.zeros(0, np.float32), 0) == 1


def test_values_are_read_only_and_always_the_current_ones(tmp_path: Path) -> None:
    part, _ = a_part(tmp_path / "dense")
    values, before = part.values, part.values.copy()
    part.step_(a_gradient(1), LRS, 1)
    assert (values != before).any() and values is part.values
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1


def test_a_missed_step_changes_the_number_and_nothing_else(tmp_path: Path) -> None:
    part, _ = a_part(tmp_path / "dense")
    part.step_(a_gradient(1), LRS, 1)
    values, state, out = part.values.copy(), part.state(), np.zeros(N, np.float32)
    part.skip_(2)
    assert DenseReader(tmp_path / "dense").read(out, 1) == 2
    again = DensePart.open(tmp_path / "dense")
    assert again.step == 2 and same(again.state(), state)
    assert np.array_equal(again.values, values) and np.array_equal(out, values)


def test_a_step_that_raises_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, plain = a_part(tmp_path / "dense")
    for step in (1, 2):
        part.step_(a_gradient(step), the_rates(step), step)
        plain.step_(a_gradient(step), the_rates(step))
    with monkeypatch.context() as patch:
        patch.setattr(dense_file.DenseFile, "finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            part.step_(a_gradient(3), LRS, 3)
    assert part.step == 2 and np.array_equal(part.values, plain.values) and same(part.state(), plain.state())
    part.step_(a_gradient(3), the_rates(3), 3)
    plain.step_(a_gradient(3), the_rates(3))
    assert np.array_equal(part.values, plain.values) and same(part.state(), plain.state())


# --- crashes and readers ---------------------------------------------------------------------------------------------

# In a process of its own: forks a child for every line that a step runs in the functions that write; each child is
# killed at its line.
_KILLED_EVERYWHERE = """
import json, os, shutil, signal, sys
import numpy as np, torch
from pathlib import Path
from gba_hvd.ps import dense_file
from gba_hvd.ps.partition import dense_part
from gba_hvd.ps.partition.dense_part import DensePart

torch.set_num_threads(1)
files = {dense_file.__file__, dense_part.__file__}
writing = {"step_", "_publish", "begin", "reserve", "finish", "activate"}
path, step, grad = Path(sys.argv[1]), int(sys.argv[2]), np.load(sys.argv[3])

def child(copy, dies_at):
    part, lines = DensePart.open(copy), 0
    def trace(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename not in files or frame.f_code.co_name not in writing:
            return None
        if event == "line":
            lines += 1
            if lines == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    part.step_(grad, [0.05, 0.003], step)
    os._exit(0)

DensePart.open(path).close()  # torch imports much when it makes its first optimizer: once, not in every child
dies_at, found = 0, []
while not found or found[-1]["status"] != 0:
    dies_at += 1
    copy = path.with_name(f"copy-{dies_at}")
    shutil.copy(path, copy)
    pid = os.fork()
    if pid == 0:
        child(copy, dies_at)
    found.append({"path": str(copy), "status": os.waitpid(pid, 0)[1]})
    assert dies_at < 2000
print(json.dumps(found))
"""


@pytest.mark.processes
@pytest.mark.parametrize("step", [1, 2, 5], ids=["state appears", "the other half grows", "nothing grows"])
def test_a_server_killed_at_any_line_of_a_step_leaves_a_whole_step(tmp_path: Path, step: int) -> None:
    part, plain = a_part(tmp_path / "dense")
    for earlier in range(1, step):
        part.step_(a_gradient(earlier), LRS, earlier)
        plain.step_(a_gradient(earlier), LRS)
    part.close()
    np.save(tmp_path / "grad.npy", a_gradient(step))
    command = [sys.executable, "-c", _KILLED_EVERYWHERE, str(tmp_path / "dense"), str(step), str(tmp_path / "grad.npy")]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    whole = {step - 1: (plain.values, _copies(plain.state()))}
    plain.step_(a_gradient(step), LRS)
    whole[step] = (plain.values, _copies(plain.state()))
    plain.step_(a_gradient(step + 1), LRS)

    assert [f["status"] for f in found] == [9] * (len(found) - 1) + [0]  # they really died, all but the last
    steps = []
    for left in found:
        out = np.empty(N, np.float32)
        seen = DenseReader(Path(left["path"])).read(out, -1)
        assert np.array_equal(out, whole[seen][0])
        part = DensePart.open(Path(left["path"]))
        steps.append(part.step)
        assert part.step == seen and np.array_equal(part.values, whole[seen][0])
        assert same(part.state(), whole[seen][1])
        for later in range(seen + 1, step + 2):  # and resumes from there
            part.step_(a_gradient(later), LRS, later)
        assert np.array_equal(part.values, plain.values) and same(part.state(), plain.state())
        assert DenseReader(Path(left["path"])).read(out, step) == step + 1
        part.close()
    assert steps == sorted(steps) and set(steps) == {step - 1, step}


def _copies(state: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v.clone() if isinstance(v, Tensor) else v for k, v in entries.items()} for entries in state]


_WRITER = """
import itertools, select, sys
import numpy as np
from pathlib import Path
from gba_hvd.ps.partition.dense_part import DensePart
part = DensePart.open(Path(sys.argv[1]))
grad = -np.ones(len(part.values), np.float32)
print("ready", flush=True)
sys.stdin.readline()
for step in itertools.count(1):
    part.step_(grad, [1.0], step)
    if step >= 200 and select.select([sys.stdin], [], [], 0)[0]:  # the reader has had enough
        break
print(step)
"""


@pytest.mark.processes
def test_a_reader_never_sees_a_mix_of_two_steps(tmp_path: Path) -> None:
    n = 100_000
    spec = {"class": "SGD", "groups": [{"lr": 1.0}]}  # with gradient -1, every value is the number of the step
    tensors = [DenseTensor("w", (n,), 0)]
    DensePart.create(tmp_path / "dense", tensors, spec, np.zeros(n, np.float32), [{}], 0).close()
    reader, out, step = DenseReader(tmp_path / "dense"), np.full(n, -1, np.float32), -1
    steps: list[int] = []
    command = [sys.executable, "-c", _WRITER, str(tmp_path / "dense")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout and writer.stdin and writer.stdout.readline() == "ready\n"
        writer.stdin.write("go\n")
        writer.stdin.flush()
        while step < 200 or len(steps) < 20:
            now = reader.read(out, step)
            if now == step:
                assert writer.poll() is None
                continue
            assert now > step and (out == now).all()
            step = now
            steps.append(step)
        last = int(writer.communicate("enough\n")[0])
        assert writer.returncode == 0
    assert reader.read(out, step) == last and (out == last).all()


@pytest.mark.parametrize("steps_meanwhile", [1, 2, 3])
def test_what_was_overwritten_while_it_was_copied_is_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps_meanwhile: int
) -> None:
    part, _ = a_part(tmp_path / "dense")
    reader, out, first = DenseReader(tmp_path / "dense"), np.zeros(N, np.float32), part.values.copy()
    copies: list[bool] = []

    def copy_slowly(into: np.ndarray, values: np.ndarray) -> None:
        into[: N // 2] = values[: N // 2]
        if not copies:
            for step in range(1, 1 + steps_meanwhile):
                part.step_(a_gradient(step), LRS, step)
        into[N // 2 :] = values[N // 2 :]
        copies.append(True)

    monkeypatch.setattr(dense_file, "_copy", copy_slowly)
    step = reader.read(out, -1)
    if steps_meanwhile == 1:  # the other half was written
        assert (step, len(copies)) == (0, 1) and np.array_equal(out, first)
    else:
        assert (step, len(copies)) == (steps_meanwhile, 2) and np.array_equal(out, part.values)


def test_a_reader_copies_only_what_is_newer(tmp_path: Path) -> None:
    part, _ = a_part(tmp_path / "dense", step=7)
    reader, out = DenseReader(tmp_path / "dense"), np.zeros(N, np.float32)
    assert reader.read(out, 7) == 7 and not out.any()
    assert reader.read(out, 9) == 9 and not out.any()
    assert reader.read(out, 6) == 7 and np.array_equal(out, part.values)
    part.step_(a_gradient(8), LRS, 8)
    assert reader.read(out, 7) == 8 and np.array_equal(out, part.values)


def test_a_closed_part_stays_on_disk_and_a_new_one_takes_its_place(tmp_path: Path) -> None:
    part, _ = a_part(tmp_path / "dense", step=3)
    part.close()
    part.close()
    assert DensePart.open(tmp_path / "dense").step == 3
    a_part(tmp_path / "dense", step=10)
    assert DensePart.open(tmp_path / "dense").step == 10
    assert [p.name for p in tmp_path.iterdir()] == ["dense"]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_damage_is_found(tmp_path: Path) -> None:
    with pytest.raises(ShardMemoryError, match="no dense part can be opened"):
        DenseReader(tmp_path / "dense")
    (tmp_path / "dense").write_bytes(b"short")
    with pytest.raises(ShardMemoryError, match="no dense part"):
        DensePart.open(tmp_path / "dense")
    (tmp_path / "dense").write_bytes(bytes(9000))
    with pytest.raises(ShardMemoryError, match="no dense part"):
        DensePart.open(tmp_path / "dense")
    part, _ = a_part(tmp_path / "dense")
    part._file.area(part._file.half)[0] += 1
    with pytest.raises(ShardMemoryError, match="damaged"):
        DensePart.open(tmp_path / "dense")


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    part, _ = a_part(tmp_path / "dense", step=3)
    for grad, lrs in [(a_gradient(4)[:-1], LRS), (a_gradient(4).astype(np.float64), LRS), (a_gradient(4), LRS[:1])]:
        with pytest.raises(BadInput, match="expected a"):
            part.step_(grad, lrs, 4)
    with pytest.raises(StateMismatch, match="has 3 already"):
        part.step_(a_gradient(3), LRS, 3)
    with pytest.raises(StateMismatch, match="has 3 already"):
        part.skip_(2)
    with pytest.raises(BadInput, match="expected room"):
        DenseReader(tmp_path / "dense").read(np.zeros(N + 1, np.float32), 0)
    assert part.step == 3 and np.array_equal(part.values, a_gradient(1000))


def test_a_part_that_does_not_fit_together_is_not_made(tmp_path: Path) -> None:
    fits: dict[str, Any] = {
        "tensors": TENSORS,
        "optimizer": {"class": "SGD", "groups": [{"lr": 1.0}] * 2},
        "values": a_gradient(0),
        "state": [{}] * len(TENSORS),
        "step": 0,
    }
    misfits: list[tuple[dict[str, Any], str]] = [
        ({"values": a_gradient(0)[1:]}, "values"),
        ({"state": [{}] * 3}, "optimizer state"),
        ({"optimizer": {"class": "SGD", "groups": [{"lr": 1.0}]}}, "group 1"),
        ({"values": a_gradient(0).astype(np.float64)}, "float64"),
        ({"optimizer": {"class": "Adma", "groups": [{"lr": 1.0}] * 2}}, "did you mean Adam"),
        ({"state": [{"buffer": object()}, {}, {}, {}]}, "is a object"),
    ]
    for wrong, message in misfits:
        with pytest.raises(BadInput, match=message):
            DensePart.create(tmp_path / "dense", **{**fits, **wrong})
    assert not list(tmp_path.iterdir())


# --- descriptions of optimizers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_description_travels_as_json_and_builds_the_same_optimizer(name: str) -> None:
    original = OPTIMIZERS[name]([{"params": [torch.zeros(2)], "lr": 0.5}, {"params": [torch.zeros(3)], "lr": 0.25}])
    torch.optim.lr_scheduler.StepLR(original, 1)
    spec = spec_of(original)
    built = build(json.loads(json.dumps(spec)), [[torch.zeros(2)], [torch.zeros(3)]])
    assert type(built) is type(original) and spec_of(built) == spec
    for mine, theirs in zip(built.param_groups, original.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}


def test_the_users_class_and_groups_are_found_behind_the_distributed_optimizer() -> None:
    tables = gba_hvd.EmbeddingTables({"user": (10, 4)}, optimizer=gba_hvd.Adagrad(lr=0.1))
    plain = torch.optim.Adam([torch.zeros(3, requires_grad=True)], lr=0.2)
    before = spec_of(plain)
    assert spec_of(DistributedOptimizer(plain, tables, global_batch=4, micro_batch=2)) == before
    assert before["class"] == "torch.optim.adam:Adam" and len(before["groups"]) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Adm", "did you mean Adam?"),
        ("torch.optim.adam:adamw", "did you mean AdamW?"),
        ("Optimizer", "no optimizer 'Optimizer'"),
        ("LBFGS", "needs a closure"),
        ("SparseAdam", "sparse gradients only"),
        ("no_such_module:Adam", "cannot be imported here"),
        ("__main__:Adam", "the script itself"),
        ("json:JSONEncoder", "it has none"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_with_what_was_probably_meant(name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        resolve(name)


def test_state_from_elsewhere_comes_to_the_device_of_its_parameter() -> None:
    """As torch has it: but for step counters, which it keeps on the CPU."""
    parameter = torch.nn.Parameter(torch.zeros(3, device="meta"))
    state = {"step": torch.tensor(5.0), "exp_avg": torch.zeros(3), "note": 1}
    for settings, of_step in (({}, "cpu"), ({"capturable": True}, "meta")):
        optimizer = torch.optim.Adam([parameter])
        optimizer.param_groups[0].update(settings)
        put_state(optimizer, parameter, state)
        found = optimizer.state[parameter]
        assert (found["exp_avg"].device.type, found["step"].device.type, found["note"]) == ("meta", of_step, 1)


def test_a_class_of_ones_own_must_be_registered_and_importable() -> None:
    class Local(torch.optim.SGD):
        pass

    with pytest.raises(BadInput, match=r"register_optimizer\(Local\)"):
        spec_of(Local([torch.zeros(1)]))
    with pytest.raises(BadInput, match="inside a function"):
        register_optimizer(Local)
    with pytest.raises(BadInput, match="needs a closure"):
        register_optimizer(Closing)
    with pytest.raises(BadInput, match="subclass"):
        register_optimizer(dict)  # type: ignore[type-var]
    script = type("Mine", (torch.optim.SGD,), {"__module__": "__main__"})
    with pytest.raises(BadInput, match="__main__"):
        register_optimizer(script)
    assert resolve(spec_of(Counting([torch.zeros(1)], lr=1.0))["class"]) is Counting


def test_settings_that_are_no_plain_values_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"Adam group 0: lr is a Tensor.* give the number, 0.5"):
        spec_of(torch.optim.Adam([torch.zeros(1)], lr=torch.tensor(0.5)))
    with pytest.raises(BadInput, match="cannot be built"):
        build({"class": "SGD", "groups": [{"lr": -1.0}]}, [[torch.zeros(1)]])
    with pytest.raises(BadInput, match="1 groups, parameters came for 2"):
        build({"class": "SGD", "groups": [{"lr": 1.0}]}, [[], []])
    with pytest.raises(BadInput, match="'class' and 'groups'"):
        build({"name": "SGD"}, [])
