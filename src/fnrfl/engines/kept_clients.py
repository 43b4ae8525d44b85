"""Clients with what is theirs: their memory and the models that they hold, around a trainer that keeps nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from fnrfl.core import trees
from fnrfl.core.errors import FnrflError, gpu_out_of_memory
from fnrfl.core.messages import MeasureRequest, TrainReply, TrainRequest
from fnrfl.core.store import CPU, ClientStore
from fnrfl.core.trees import Tree
from fnrfl.core.values import State
from fnrfl.engines.trainer import ClientTrainer, Trained

log = logging.getLogger("fnrfl")


class KeptClients:
    """Clients that train here, `clients_at_once` at a time; what does not fit in memory is tried again with fewer.

    A held model lives until the first request of another round.
    """

    def __init__(
        self,
        trainer: ClientTrainer,
        memory: ClientStore,
        held_models: ClientStore,
        *,
        clients_at_once: int | None = None,
        block: int | None = None,
        num_devices: int = 1,
        round: int = -1,
    ) -> None:
        """`block` clients are enough to train at once where nobody holds a model: the method folds them meanwhile.

        `held_models` are those of `round`.
        """
        self.trainer, self.memory, self.held_models = trainer, memory, held_models
        self.clients_at_once, self.block, self.num_devices = clients_at_once, block, num_devices
        self._round = round
        self._was_full = False  # whether memory was too small once

    # -- requests -----------------------------------------------------------------------------------------------------
    def train(self, request: TrainRequest) -> Iterator[TrainReply]:
        self._enter_round(request.round)
        first, notes = 0, dict[str, object]()
        if len(request.clients) > (self.clients_at_once or len(request.clients)):
            self.held_models.move(CPU)
        while first < len(request.clients):
            most = self.clients_at_once or len(request.clients)
            if self.block is not None and not request.task.hold_model:
                most = min(most, self.block)
            chunk = request.rows(slice(first, first + most))
            trained = self._try(chunk)
            if trained is None:  # the same clients again, after what filled the memory is gone
                notes |= self._do_less_at_once(len(chunk.clients))
                continue
            first += len(chunk.clients)
            reply = TrainReply(trained.replies, trained.not_finite, notes, trained.missing)
            del trained, chunk  # and so below: models that were folded make room for the next
            yield reply
            del reply

    def measure(self, request: MeasureRequest) -> Tree:
        self._enter_round(request.round)
        return self.trainer.measure(request, self.held_model)

    def held_model(self, client: int) -> State:
        """The model that a client holds; before it has any, the one that everybody knows from the start."""
        if client not in self.held_models:
            return self.trainer.initial
        return State.unpacked("model", self.held_models.get(client))

    def _enter_round(self, round: int) -> None:
        if round != self._round:
            self._round = round
            self.held_models.clear()

    def _try(self, chunk: TrainRequest) -> Trained | None:
        """A chunk of clients trains, and keeps what is theirs; None if that does not fit in memory."""
        task, clients = chunk.task, chunk.clients
        try:
            held = trees.stacked([self.held_model(client) for client in clients]) if task.start is None else None
            memory = self.memory.read(clients) if task.remember else {}
            trained = self.trainer.train(chunk, held, memory)
            clients = trained.replies.clients.tolist()
            remembered = self.memory.renewed(clients, trained.memory if task.remember else {})
            models = list[Tree]()
            if task.hold_model:
                ends = State(trained.replies.params, trained.replies.buffers)
                models = [self.held_models.copied(trees.rows(ends, m).packed("model")) for m in range(len(clients))]
        except RuntimeError as error:
            if not gpu_out_of_memory(error):
                raise
            return None
        # From here on nothing can fail for want of memory, and a client that has to begin again has changed nothing.
        for client, renewed in remembered:
            self.memory.keep(client, renewed)
        for client, model in zip(clients, models, strict=False):
            self.held_models.keep(client, model)
        return trained

    # -- memory that is full ------------------------------------------------------------------------------------------
    def _do_less_at_once(self, clients: int) -> dict[str, object]:
        """Go on without the other programs, then with half the clients, at last without any program.

        Programs are let go once: those that cannot be there together would be recorded anew in every round.
        """
        runner = self.trainer.runner
        runner.free_programs(self.trainer.pool)
        if not self._was_full:
            self._was_full = True
            return {}
        if runner.halve_groups(clients):
            self.clients_at_once = runner.group_size * self.num_devices
            self.memory.move(CPU)
            self.held_models.move(CPU)
            message = "the GPU's memory is full: from now on %d clients are trained at once."
            log.warning(message, self.clients_at_once)
            return {"clients_at_once": self.clients_at_once}
        if runner.stop_recording():
            return {}
        raise FnrflError(
            "One client's training does not fit in the GPU's memory. Set a smaller client.batch, or "
            'engine.precision = "bf16".'
        )
