"""Softmax losses of retrieval models: in-batch negatives, of a micro-batch or of the global batch, and sampled ones.

Decided here: what the losses are, and when negatives come from all workers. The log-Q correction subtracts the
logarithm of the probability that an item is drawn as a negative (Bengio and Senecal 2008; Yi et al., RecSys 2019), so
that frequent items are not held down for being frequent.

Global negatives (`negatives="global"`) need collectives in the middle of a micro-batch:

    1. gather    each worker's vectors, item ids and log_q
    2. local     the rows of the logit matrix that belong to this worker's users, and the loss of these
    3. gather    the log-sum-exp of every row
    4. local     the columns of this worker's items in the rows of the others, for their gradient
       backward  no collective: what other workers sent is constant here, and each has its own part of the gradient

All are in the forward pass, where the user's code calls the loss; the backward pass, which may run in other threads,
has none. They are safe only where every worker computes one batch of the step, so that each makes the same calls
(`local_reason`). What a crash leaves behind: nothing is exchanged or held before a step is closed, so the others
leave the collective with Horovod's error, abandon the step, and compute it again in the next world, as after a crash in
any forward pass.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from gba_hvd.callbacks import Event
from gba_hvd.elastic import TorchState
from gba_hvd.errors import BadInput, GbaError, StateMismatch, refuse_unknown
from gba_hvd.training.engine import Engine
from recovery import state_codec

log = logging.getLogger("gba_hvd")
_noted: WeakKeyDictionary[Engine, set[str]] = WeakKeyDictionary()  # reasons that were reported, once each


def in_batch_softmax(
    users: Tensor,
    items: Tensor,
    *,
    item_ids: Tensor | None = None,
    log_q: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    negatives: Literal["micro_batch", "global"] = "micro_batch",
    state: TorchState | None = None,
) -> Tensor:
    """Mean cross-entropy of each user's own item among all items of the batch, a scalar.

        logit[i, j] = users[i] . items[j] / temperature - log_q[j]
        loss        = mean over i of (log sum over j of exp(logit[i, j]) - logit[i, i])

    users, items: float [B, d]; row i of both belongs to sample i.
    item_ids: int64 [B]. Samples with the same item are no negatives of each other: they are left out of the sum over j.
    log_q: float [B], finite: logarithm of the probability that a sample has the item, such as its share of the training
    samples. Without it all items count alike.
    temperature: more than 0, a number, or a float tensor of one element, such as a parameter that is trained. The value
    of a tensor on a GPU is not checked.
    negatives: "micro_batch", the items of this batch. "global", in allreduce mode, those of all workers' batches of the
    step: the loss and its gradient are those of one process with the global batch.
    state: the job's, for negatives="global" only.

    negatives="global" is a collective. Every worker must make the same calls in each batch; otherwise they wait for
    each other without end, and the log of Horovod, or of the worker that made fewer calls, says who waits for whom. It
    needs one batch a step on every worker (`sync_micro_batch` = global_batch / workers), and users and items of all
    samples of the batch; otherwise BadInput is raised. When workers of a running job are lost or join, negatives are
    those of the batch until the job has as many workers again, and an event `negatives_local` warns of it. Negatives
    are those of the batch, too, in asynchronous modes, in steps that measure single micro-batches (one in 20 with a
    `GBACallback`), and in a short last step of an epoch that leaves workers idle; the log says each of these once.

    Ids and log_q may be on the CPU beside vectors on a GPU. Logits and loss are float32, of vectors in half precision
    and under autocast, too; float64 of float64.

    Raises BadInput for tensors of other shapes or types, and a log_q that is not finite.
    """
    refuse_unknown("negatives", negatives, ("micro_batch", "global"))
    _check_pair(users, items)
    temperature = _temperature(temperature)
    ids = None if item_ids is None else _shaped(item_ids, [[len(items)]], "item_ids", whole=True).to(items.device)
    correction = None if log_q is None else _log_q(log_q, [[len(items)]], "log_q").to(items.device)
    if negatives == "micro_batch" and state is not None:
        raise BadInput('in_batch_softmax: state= has no effect with negatives="micro_batch"; leave it out')
    if negatives == "global" and state is None:
        raise BadInput('in_batch_softmax: negatives="global" needs state=, the TorchState of the job')
    users, items = _widened(users), _widened(items)
    with torch.autocast(users.device.type, enabled=False):
        if state is None or not _is_global(state.engine, len(users)):
            return _softmax(_logits(users, items, correction, temperature), ids)
        return _global_softmax(state.engine, _Part(users, items, ids, correction), temperature)


def sampled_softmax(
    users: Tensor,
    items: Tensor,
    negatives: Tensor,
    *,
    item_ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
    log_q: Tensor | None = None,
    negative_log_q: Tensor | None = None,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """Mean cross-entropy of each user's own item among it and sampled negatives, a scalar.

        positive[i]    = users[i] . items[i] / temperature - log_q[i]
        negative[i, s] = users[i] . negatives[s] / temperature - negative_log_q[s]
        loss           = mean over i of (log(exp(positive[i]) + sum over s of exp(negative[i, s])) - positive[i])

    users, items: float [B, d]; row i of both belongs to sample i.
    negatives: float [S, d], the same for all users, or [B, S, d].
    item_ids, negative_ids: int64 [B], and [S] or [B, S]: a negative that is the user's own item is left out of the sum.
    log_q, negative_log_q: float [B], and [S] or [B, S]: logarithm of the probability with which the sampler draws the
    item, or of how often it is expected among the negatives; finite. Without both, the sampler is taken to be uniform.
    temperature: more than 0, as that of `in_batch_softmax`.

    Ids and log_q may be on the CPU beside vectors on a GPU. Logits and loss are float32, of vectors in half precision
    and under autocast, too; float64 of float64.

    Raises BadInput for tensors of other shapes or types, for one of a pair without the other, and for a log_q that is
    not finite.
    """
    _check_pair(users, items)
    temperature = _temperature(temperature)
    n, width = users.shape
    if not _is_float(negatives) or negatives.ndim not in (2, 3) or negatives.shape[-1] != width:
        raise BadInput(
            f"negatives must be a float tensor [S, {width}] or [{n}, S, {width}], got {_described(negatives)}"
        )
    if negatives.ndim == 3 and len(negatives) != n:
        raise BadInput(f"negatives [B, S, d] must be of the {n} samples of users, got {_described(negatives)}")
    shapes = [[negatives.shape[-2]], [n, negatives.shape[-2]]]  # of what belongs to negatives
    for name, one, other in (("ids", item_ids, negative_ids), ("log_q", log_q, negative_log_q)):
        if (one is None) != (other is None):
            first = "item_ids" if name == "ids" else "log_q"
            raise BadInput(f"{first} and negative_{name} are needed together, got one of them")
    own_q = None if log_q is None else _log_q(log_q, [[n]], "log_q").to(items.device)
    other_q = None if negative_log_q is None else _log_q(negative_log_q, shapes, "negative_log_q").to(items.device)
    users, items, negatives = _widened(users), _widened(items), _widened(negatives)
    with torch.autocast(users.device.type, enabled=False):
        positive = (users * items).sum(1) / temperature
        dots = users @ negatives.T if negatives.ndim == 2 else torch.einsum("bd,bsd->bs", users, negatives)
        negative = dots / temperature
    if own_q is not None and other_q is not None:
        positive = positive - own_q
        negative = negative - other_q
    if item_ids is not None and negative_ids is not None:
        others = _shaped(negative_ids, shapes, "negative_ids", whole=True).to(items.device)
        own = _shaped(item_ids, [[n]], "item_ids", whole=True).to(items.device)
        negative = negative.masked_fill(own[:, None] == others, -torch.inf)
    logits = torch.cat([positive[:, None], negative], dim=1)
    return functional.cross_entropy(logits, torch.zeros(n, dtype=torch.int64, device=logits.device))


# --- the loss of a matrix of logits ----------------------------------------------------------------------------------


def _logits(users: Tensor, items: Tensor, log_q: Tensor | None, temperature: float | Tensor) -> Tensor:
    """[n users, n items]"""
    logits = users @ items.T / temperature
    return logits if log_q is None else logits - log_q.to(logits.dtype)[None, :]


def _without_same_items(logits: Tensor, of_rows: Tensor, of_columns: Tensor, first: int) -> Tensor:
    """-inf where another sample has the row's item. The own column of row i is first + i."""
    same = of_rows[:, None] == of_columns[None, :]
    rows = torch.arange(len(of_rows), device=same.device)
    same[rows, rows + first] = False
    return logits.masked_fill(same, -torch.inf)


def _softmax(logits: Tensor, ids: Tensor | None) -> Tensor:
    if ids is not None:
        logits = _without_same_items(logits, ids, ids, 0)
    return functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


# --- negatives of all workers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """One worker's samples."""

    users: Tensor
    items: Tensor
    ids: Tensor | None
    log_q: Tensor | None


def _global_softmax(engine: Engine, own: _Part, temperature: float | Tensor) -> Tensor:
    """This worker's mean loss; the mean over workers, weighted by samples, is that of the global batch, and so is the
    gradient. A collective.
    """
    world, device = engine.world, own.users.device
    parts = _gathered_parts(engine, own)
    first = sum(len(part.users) for part in parts[: world.rank])
    n = len(own.users)
    items = torch.cat([own.items if rank == world.rank else part.items for rank, part in enumerate(parts)])
    ids = None if own.ids is None else torch.cat([_given(part.ids) for part in parts])
    log_q = None if own.log_q is None else torch.cat([
        own.log_q if rank == world.rank else _given(part.log_q).to(own.log_q.dtype) for rank, part in enumerate(parts)
    ])  # fmt: skip
    logits = _logits(own.users, items, log_q, temperature)
    if ids is not None and own.ids is not None:
        logits = _without_same_items(logits, own.ids, ids, first)
    normalisers = torch.logsumexp(logits, dim=1)
    loss = (normalisers - logits[torch.arange(n, device=device), torch.arange(first, first + n, device=device)]).mean()
    of_all = _gather(engine, "log-sum-exp", {"values": normalisers.detach().double()})
    others = [rank for rank in range(world.size) if rank != world.rank and len(parts[rank].users)]
    if not others:
        return loss
    rows = torch.cat([parts[rank].users for rank in others])
    # The rows' own workers have their part of the temperature's gradient.
    constant = temperature.detach() if isinstance(temperature, Tensor) else temperature
    columns = _logits(rows, own.items, own.log_q, constant)
    if own.ids is not None:
        their_ids = torch.cat([_given(parts[rank].ids) for rank in others])
        columns = columns.masked_fill(their_ids[:, None] == own.ids[None, :], -torch.inf)
    theirs = torch.cat([of_all[rank]["values"].to(device) for rank in others]).to(columns.dtype)
    # The derivative of a row's log-sum-exp by a logit is its softmax, and so is that of this by the same logit.
    share = torch.exp(columns - theirs[:, None]).sum() / n
    return loss + (share - share.detach())


def _gathered_parts(engine: Engine, own: _Part) -> list[_Part]:
    """What all workers brought, as constants."""
    device, dtype = own.users.device, own.users.dtype
    sent: dict[str, Any] = {
        "step": engine.progress.step, "users": own.users.detach(), "items": own.items.detach(),
        "ids": own.ids, "log_q": None if own.log_q is None else own.log_q.detach(),
    }  # fmt: skip
    everyone = _gather(engine, "vectors", sent)
    facts = [(one["step"], one["users"].shape[1], one["ids"] is not None, one["log_q"] is not None) for one in everyone]
    if len(set(facts)) > 1:
        raise StateMismatch(
            "in_batch_softmax: the workers disagree about (step, width d, item_ids given, log_q given): by rank "
            f"{facts}; each must make the same calls in each batch"
        )
    return [
        _Part(
            one["users"].to(device, dtype), one["items"].to(device, dtype),
            None if one["ids"] is None else one["ids"].to(device),
            None if one["log_q"] is None else one["log_q"].to(device),
        )
        for one in everyone
    ]  # fmt: skip


def _gather(engine: Engine, what: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
    parts = engine.world.gather_bytes(f"negatives.{what}", state_codec.encode(mine))
    return [state_codec.decode(part.tobytes()) for part in parts]


def _given(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


# --- whether they may be ---------------------------------------------------------------------------------------------


def local_reason(n_workers: int, in_step: int, in_full_step: int) -> str:
    """Why negatives are those of the batch in this step, in words; empty where they come from all workers.

    in_step: batches of the step, over all workers, 0 where servers lease them; in_full_step: of a full step
    """
    if not in_step:
        return "in an asynchronous mode workers do not wait for each other"
    if in_full_step != n_workers:
        return f"a step has {in_full_step} batches for {n_workers} workers"
    if in_step != n_workers:
        return "this step measures single micro-batches, or it is the short last one of an epoch"
    return ""


def _is_global(engine: Engine, n_rows: int) -> bool:
    """Whether negatives come from all workers in this step; the same decision on all of them.

    Raises BadInput where the settings do not allow it, GbaError outside of a micro-batch.
    """
    mode, model, world, micro = engine.mode, engine.model, engine.world, engine.micro_batch
    if mode is None or (mode.batches_in_step and micro is None):
        raise GbaError(
            'in_batch_softmax: negatives="global" is for batches of gba_hvd.batches, between receiving one and '
            'optimizer.step(); elsewhere use negatives="micro_batch"'
        )
    size = model.micro_batch * model.together
    reason = local_reason(world.size, mode.batches_in_step, model.global_batch // size)
    if not reason:
        assert micro is not None
        if n_rows != micro.n_samples:
            raise BadInput(
                f'in_batch_softmax: negatives="global" needs users and items of all {micro.n_samples} samples of the '
                f"batch, got {n_rows}: losses of workers are weighted by their samples"
            )
        return True
    if mode.batches_in_step and model.global_batch // size != world.size:
        need = f"one batch a step on every worker, and {reason} (of {size} samples)"
        text = f'in_batch_softmax: negatives="global" needs {need}'
        if not engine.progress.restarts:
            raise BadInput(f"{text}. {_remedy(model.global_batch, model.micro_batch, world.size)}")
        _note(
            engine,
            f"{reason}, world {engine.progress.restarts}",
            f"{text}: they are those of each batch until it has",
            True,
        )
    else:
        _note(engine, reason, f'in_batch_softmax: negatives="global" are those of each batch here: {reason}', False)
    return False


def _remedy(global_batch: int, micro_batch: int, n_workers: int) -> str:
    if global_batch % (n_workers * micro_batch):
        return f"Choose a global_batch that is a multiple of {n_workers} x {micro_batch} (workers x micro_batch)"
    if global_batch == n_workers * micro_batch:
        return "Leave sync_micro_batch out"
    return f'Use sync_micro_batch={global_batch // n_workers}, or negatives="micro_batch"'


def _note(engine: Engine, key: str, text: str, is_warning: bool) -> None:
    """Once: as an event where a request is not carried out, else in the log of rank 0."""
    noted = _noted.setdefault(engine, set())
    if key in noted:
        return
    noted.add(key)
    if is_warning:
        data = {"workers": engine.world.size}
        engine.emit(Event("negatives_local", engine.progress.step, text, data, level="warning"))
    elif engine.world.rank == 0:
        log.warning("%s", text)


# --- checks ----------------------------------------------------------------------------------------------------------


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _check_pair(users: Any, items: Any) -> None:
    if not _is_float(users) or not _is_float(items) or users.ndim != 2 or users.shape != items.shape or not len(users):
        raise BadInput(
            f"users and items must be float tensors [B, d] of the same samples, got {_described(users)} and "
            f"{_described(items)}"
        )


def _temperature(value: Any) -> float | Tensor:
    """As a number, or a tensor without dimensions."""
    is_tensor = _is_float(value) and value.numel() == 1
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # To read a value on a GPU would wait for all that is queued there.
    known = value.item() if is_tensor and value.device.type == "cpu" else value
    is_known = known is not value or is_number
    if not (is_tensor or is_number) or (is_known and not 0 < known < float("inf")):
        got = _described(value) if isinstance(value, Tensor) and not is_tensor else repr(known)
        raise BadInput(
            f"temperature must be a finite number, more than 0, or a float tensor of one element, got {got}. The "
            "exponential of a parameter stays above 0 while it is trained"
        )
    found: float | Tensor = value.reshape(()) if is_tensor else value
    return found


def _widened(vectors: Tensor) -> Tensor:
    """At least float32: sums of bfloat16 lose digits of the loss, and float16 overflows at a low temperature."""
    return vectors.to(torch.promote_types(vectors.dtype, torch.float32))


def _log_q(value: Any, shapes: list[list[int]], name: str) -> Tensor:
    found = _widened(_shaped(value, shapes, name))
    is_bad = ~torch.isfinite(found)
    if is_bad.any():
        at = is_bad.nonzero()[0].tolist()
        raise BadInput(
            f"{name} must be finite, got {found[tuple(at)].item()} at position {at}: the logarithm of an item's share "
            "of 0 is -inf; give an item that was never counted the share of one sample"
        )
    return found


def _shaped(value: Any, shapes: list[list[int]], name: str, whole: bool = False) -> Tensor:
    is_tensor = isinstance(value, Tensor)
    is_whole = is_tensor and not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
    if not is_tensor or (not is_whole if whole else not value.is_floating_point()) or list(value.shape) not in shapes:
        kind, expected = "an int64" if whole else "a float", " or ".join(map(str, shapes))
        raise BadInput(f"{name} must be {kind} tensor {expected}, got {_described(value)}")
    found: Tensor = value.detach() if not whole else value
    return found


def _described(value: Any) -> str:
    return f"{str(value.dtype)[6:]} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
