"""Keeps a training state alive while its function is left and entered again.

    kept = keep({"model": model, "optim": optim, "data": loader}, checkpointer)
    step = kept.restore()
    ...
    kept.commit(step)

Between `commit` and the next optimizer step the state belongs to a step; from the optimizer's step
until `commit` it is between two, and worthless if the function is left there by an error. `restore`
finds the newest step that survives on some rank for every part of the state (`choice`), compares
the copies of ranks that hold the same (`checksums`), and gives it to the ranks that lack it
(`exchange`, `adoption`).
"""

from __future__ import annotations

import sys
from typing import Any, Literal, Protocol

import msgspec
import torch
from msgspec import Struct

from holdfast.checkpoint.checkpointer import Restored
from holdfast.checkpoint.state.capture import flattened
from holdfast.checkpoint.state.skeleton import dismantle
from holdfast.checkpoint.state.spread import is_spread
from holdfast.errors import CheckpointError, StateLost, UsageError
from holdfast.inprocess import link
from holdfast.inprocess.kept.adoption import Adoption
from holdfast.inprocess.kept.boundary import Boundary, BoundaryRecorder
from holdfast.inprocess.kept.choice import (
    LivingChoice,
    LivingRefusal,
    RankStanding,
    choose,
    diverged,
)
from holdfast.inprocess.kept.exchange import RankExchange
from holdfast.inprocess.kept.open_steps import leave_steps, protect_steps, resume_steps
from holdfast.inprocess.kept.parts import StatePart, fingerprint, take_part
from holdfast.inprocess.kept.registry import Survivor, register
from holdfast.inprocess.kept.zones import await_device, before_steps
from holdfast.inprocess.zones import current_zones

_CHANGED = (
    "parameters were changed before restore(); DistributedDataParallel does that, unless made after it"
    " or with init_sync=False"
)
_TROUBLE_BYTES = 192
"""Longest reason that ranks tell each other."""


class RestoresState(Protocol):
    """A `holdfast.Checkpointer`, as far as kept state needs one."""

    restored: Restored

    def restore(self) -> int: ...


class KeptRestored(Struct, frozen=True):
    """What `Kept.restore` took, and what it did not."""

    step: int
    where: Literal["living", "memory", "storage", "start"] | None
    """`living`: the ranks' own tensors; the others as in `Checkpointer.restored`. None: nothing."""
    sources: tuple[int, ...] = ()
    """For each rank, the rank that its living state came from."""
    refused: tuple[str, ...] = ()
    """Why living state was not taken."""
    records_done: int = 0
    """Records of the step that was under way whose gradients stay."""


def keep(state: dict[str, Any], checkpointer: RestoresState | None = None) -> KeptState:
    """Name the state that survives when the function is left and entered again in this process.

    - `state`: names and what they stand for, as for `holdfast.Checkpointer`: objects with
      state_dict and load_state_dict, or plain values, which `restore` replaces in the dict. Give
      both the same dict. Objects made outside of the function are simply still there. Where the
      function makes new ones, their state is copied from the old ones, for which there must be
      memory.
    - `checkpointer`: restores if living state cannot be used. Without it, that is an error.

    What is not part of an optimizer's step is recorded at each commit: state dicts of schedulers
    and data loaders, plain values, buffers of modules, and the generators of `random` and torch. An
    object whose state changes only between an optimizer's step and `commit` can say so with
    `kept_in_place = True`; it is not asked for its state then. Tensors in the state dict of an
    object of the script's own, and plain tensors, are not copied: change them only there, or after
    `kept.changing()`.

    An object with merge_state_dicts cannot be kept, because a rank that is gone takes its part
    along.
    """
    return KeptState(state, checkpointer)


class KeptState:
    """A state that survives; made by `keep`."""

    def __init__(self, state: dict[str, Any], checkpointer: RestoresState | None = None) -> None:
        _check(state)
        self.restored = KeptRestored(0, None)
        self._state = state
        self._checkpointer = checkpointer
        self._recorder = BoundaryRecorder(state)
        self._boundary: Boundary | None = None
        """What was recorded at the last commit; None before `restore` is done."""
        self._between = False
        self._over = False
        self._before: Survivor | None = register(self)
        optimizers = [o for o in state.values() if isinstance(o, torch.optim.Optimizer)]
        self._unhook = before_steps(optimizers, self.changing)

    @property
    def step(self) -> int:
        """The last committed step."""
        return self._boundary.step if self._boundary is not None else 0

    def commit(self, step: int) -> None:
        """Say that the state is whole, and belongs to that `step`. It costs 12 to 45 µs, and with
        buffers that change in each step, such as those of batch normalisation, a copy of them."""
        if self._boundary is None or self._over:
            raise UsageError(_not_usable("commit", self._over))
        if step < self._boundary.step:
            raise UsageError(
                f"Kept.commit: step {step} lies before step {self._boundary.step}, which was committed"
                " already"
            )
        self._boundary = self._recorder.record(step)
        if self._between:
            self._between = False
            current_zones().end_zone()

    def changing(self) -> None:
        """Say that the state is about to change, until the next `commit`. Kept optimizers do it by
        themselves before each step; call it where something else changes kept tensors."""
        if self._between or self._boundary is None or self._over:
            return
        await_device()
        self._between = True
        try:
            current_zones().begin_zone()
        except BaseException:  # The step does not begin.
            self._between = False
            raise

    def survivor(self) -> Survivor | None:
        """End this kept state; return what is left of it for the next entry."""
        self._unhook()
        self._over = True
        before, boundary = self._before, self._boundary
        self._before = self._boundary = self._checkpointer = None
        if boundary is None:
            return before
        whole = None if self._between else boundary
        if whole is None:
            return Survivor(self._state, boundary.step, None, None)
        left, changes = leave_steps(self._state), _changes(self._state)
        return Survivor(self._state, boundary.step, whole, self._recorder.buffers, left, changes)

    # ---- restoring ----

    def restore(self) -> int:
        """Make the state that of the newest step that survived, on all ranks, and return its step.

        All ranks call it, after the default process group was made. It returns 0 if there is
        nothing. If ranks have trained and their state cannot be used, the checkpointer restores; if
        there is none, or it has nothing, it raises `StateLost`, which ends the job: training never
        silently starts over.

        Gradients are None after it, except for those with which an `ElasticTrainer` goes on. A rank
        that was at that step itself also gets its generators of `random`, torch and torch's current
        CUDA device back. Those of a rank that is gone are not known: its successor draws other
        numbers, and so does a rank that was given its state by another one. Buffers of modules,
        which a forward pass may change otherwise on each rank, stay what they were on a survivor; a
        rank without gets those of the rank that its state comes from.
        """
        if self._over or self._boundary is not None:
            raise UsageError(_not_usable("restore", self._over, restored=not self._over))
        exchange = RankExchange()
        found = self._restore_living(exchange)
        if isinstance(found, LivingRefusal):
            found = self._restore_saved(found)
        _drop_gradients(self._state)
        if found.where == "living":
            done = resume_steps(self._state, self._unfinished(exchange, found), exchange)
            found = msgspec.structs.replace(found, records_done=done)
        protect_steps(self._state)
        self.restored = found
        # From here on, what was there before is not needed: all ranks have said that they are done.
        self._boundary = self._recorder.record(found.step)
        self._before = None
        rounds = link.current()
        if rounds is not None:
            rounds.resumed(found.step)
        if found.where == "living" and exchange.rank == 0:
            text = f"step {found.step} goes on from living state"
            if found.records_done:
                text += f"; {found.records_done} records of the next one are done"
            print(f"[holdfast] {text}", file=sys.stderr, flush=True)
        return found.step

    def _unfinished(self, exchange: RankExchange, found: KeptRestored) -> dict[str, Any]:
        """Return what this rank has of the step that follows the one that was taken."""
        own = found.sources[exchange.rank] == exchange.rank
        return self._before.unfinished if own and self._before is not None else {}

    def _restore_saved(self, refusal: LivingRefusal) -> KeptRestored:
        step, where = 0, None
        if self._checkpointer is not None:
            self._give_up_shared()
            step = self._checkpointer.restore()
            where = self._checkpointer.restored.where
        if where is None and not refusal.nothing_lost:
            reasons = "".join(f"\n  {reason}" for reason in refusal.reasons)
            missing = (
                "there is no checkpointer" if self._checkpointer is None else "nothing is saved"
            )
            raise StateLost(
                f"living state cannot be used, and {missing}:{reasons}\n"
                "Give keep(state, checkpointer) a Checkpointer that saves, or start the job anew"
            )
        return KeptRestored(step, where, refused=refusal.reasons)

    def _restore_living(self, exchange: RankExchange) -> KeptRestored | LivingRefusal:
        part, mine = self._stand()
        standings = [_decoded(row) for row in exchange.gather(_encoded(mine))]
        choice = choose(standings)
        if isinstance(choice, LivingRefusal):
            return choice
        rank = exchange.rank
        holds = part is not None and mine.step == choice.step
        rows = exchange.gather(part.checksums() if part and holds else (0, 0))
        apart = diverged(choice, standings, [row[1] for row in rows])
        if apart is not None:
            return LivingRefusal((apart,), nothing_lost=False)
        self._take(exchange, choice, part if holds else None)
        taken = [row[0] for row in exchange.gather([take_part(self._state).checksum()])]
        _check_taken(taken, [rows[choice.sources[r]][0] for r in range(len(rows))])
        if choice.sources[rank] == rank and self._before is not None and self._before.boundary:
            self._before.boundary.generators.put_back()
        return KeptRestored(
            choice.step, "living", tuple(choice.sources[r] for r in range(len(rows)))
        )

    def _stand(self) -> tuple[StatePart | None, RankStanding]:
        """Say where this rank stands, with the part that it holds."""
        before = self._before
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # What the last step queued belongs to the state.
        step = before.step if before is not None else -1
        spoilt = before is not None and before.boundary is None and _shared(before, self._state)
        try:
            needs = fingerprint(self._state)
            if before is None or before.boundary is None:
                torn = "" if before is None else f"it was left between steps {step} and {step + 1}"
                return None, RankStanding(step, False, spoilt, needs, trouble=torn)
            if before.state.keys() != self._state.keys():
                names = "the entry before kept other names: " + ", ".join(before.state)
                return None, RankStanding(step, False, spoilt, needs, trouble=names)
            if before.changes != _changes(before.state):
                return None, RankStanding(step, False, spoilt, needs, trouble=_CHANGED)
            part = take_part(before.state, before.boundary, before.buffers)
            return part, RankStanding(step, True, False, needs, fingerprint(before.state))
        except Exception as error:
            # The edge of the script's own state_dict: other ranks must not wait for this one.
            return None, RankStanding(step, trouble=f"{type(error).__name__}: {error}")

    def _take(self, exchange: RankExchange, choice: LivingChoice, part: StatePart | None) -> None:
        """Send and receive what ranks lack, lower sources first, so that no two wait for each other."""
        receivers: dict[int, list[int]] = {}
        for rank, source in choice.sources.items():
            if rank != source:
                receivers.setdefault(source, []).append(rank)
        mine = choice.sources[exchange.rank]
        for source in sorted(receivers):
            if source == exchange.rank and part is not None:
                exchange.send(part, receivers[source])
            elif source == mine:
                self._receive(exchange, source)
        if mine == exchange.rank and part is not None:
            adoption = Adoption(self._state, part.contents, part.locals)
            adoption.copy_from(part.locals)
            adoption.finish(exchange.rank)

    def _receive(self, exchange: RankExchange, source: int) -> None:
        self._give_up_shared()
        contents = exchange.receive_contents(source)
        adoption = Adoption(self._state, contents)
        exchange.receive(contents, adoption.targets, source)
        adoption.finish(exchange.rank)

    def _give_up_shared(self) -> None:
        """Trust the state of the entry before no more, if what is to be written now is that state."""
        before = self._before
        if before is not None and _shared(before, self._state):
            self._before = Survivor(before.state, before.step, None, None)


def _check(state: dict[str, Any]) -> None:
    """Refuse what can never be kept. Objects of the script's own are not asked for their state yet."""
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise UsageError("keep: the state is a dict with strings for keys")
    for name, entry in state.items():
        if hasattr(entry, "state_dict") != hasattr(entry, "load_state_dict"):
            raise UsageError(
                f"keep: {name!r} has only one of state_dict and load_state_dict, and needs both"
            )
        if is_spread(entry):
            raise UsageError(
                f"keep: {name!r} is spread over ranks (it has merge_state_dicts), and a rank that is"
                " gone takes its part along; leave it out of keep(), and restore all of the state"
                " with a Checkpointer instead"
            )
        if not hasattr(entry, "state_dict"):
            try:
                dismantle({name: entry})
            except CheckpointError as error:
                raise UsageError(f"keep: {error}") from None


def _check_taken(taken: list[int], expected: list[int]) -> None:
    """Raise on all ranks if one has another state now than the rank that it was copied from."""
    wrong = [rank for rank, found in enumerate(taken) if found != expected[rank]]
    if wrong:
        raise CheckpointError(
            f"rank {wrong[0]} has another state than the rank that it was copied from; its memory or"
            " the link between them is faulty"
        )


def _shared(before: Survivor, state: dict[str, Any]) -> bool:
    """Return whether both have tensors in common, perhaps in different wrappers."""
    return not _tensors(before.state).isdisjoint(_tensors(state))


def _tensors(state: dict[str, Any]) -> set[int]:
    """Return the identities of all tensors of a state that are not in objects of the script's own."""
    found: list[Any] = []
    for entry in state.values():
        if isinstance(entry, torch.nn.Module):
            found += [*entry.parameters(), *entry.buffers()]
        elif isinstance(entry, torch.optim.Optimizer):
            found += [p for group in entry.param_groups for p in group["params"]]
        elif not hasattr(entry, "state_dict"):
            found += [value for _, value in flattened(entry) if isinstance(value, torch.Tensor)]
    return set(map(id, found))


def _changes(state: dict[str, Any]) -> tuple[int, ...]:
    """Return torch's counts of the changes to all parameters; inference tensors have none."""
    modules = [entry for entry in state.values() if isinstance(entry, torch.nn.Module)]
    every = (getattr(p, "_local_tensor", p) for module in modules for p in module.parameters())
    return tuple(-1 if p.is_inference() else p._version for p in every)


def _drop_gradients(state: dict[str, Any]) -> None:
    """Forget gradients of the step that was under way."""
    for entry in state.values():
        if isinstance(entry, torch.nn.Module | torch.optim.Optimizer):
            entry.zero_grad(set_to_none=True)


def _not_usable(call: str, over: bool, restored: bool = False) -> str:
    if over:
        return f"Kept.{call}: its function was left; call keep() in each entry, and use what it returns"
    if restored:
        return f"Kept.{call}: it was called already in this entry"
    return f"Kept.{call}: call restore() first, on all ranks"


# ---- rows ---------------------------------------------------------------------------------------


def _encoded(one: RankStanding) -> list[int]:
    text = one.trouble.encode()[:_TROUBLE_BYTES].ljust(_TROUBLE_BYTES, b"\0")
    words = [
        int.from_bytes(text[at : at + 8], "little", signed=True)
        for at in range(0, _TROUBLE_BYTES, 8)
    ]
    return [one.step, one.whole, one.spoilt, one.needs, one.holds, *words]


def _decoded(row: list[int]) -> RankStanding:
    step, whole, spoilt, needs, holds, *words = row
    text = b"".join(word.to_bytes(8, "little", signed=True) for word in words)
    trouble = text.rstrip(b"\0").decode(errors="ignore")
    return RankStanding(step, bool(whole), bool(spoilt), needs, holds, trouble)
