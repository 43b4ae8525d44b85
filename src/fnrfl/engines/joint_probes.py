"""Probes that the models of several clients answer in one pass; many passes may be one recorded program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import groupby, islice

import torch
from torch import Tensor
from torch.func import vmap

from fnrfl.core import trees
from fnrfl.core.engine import Probe, Step
from fnrfl.core.net import Net
from fnrfl.core.trees import Tree
from fnrfl.core.values import Batch, State
from fnrfl.engines.devices import DevicePool, Worker
from fnrfl.engines.recorder.programs import Program
from fnrfl.engines.recorder.recorder import ProgramRequest, Recorder
from fnrfl.engines.runner import Probing

ModelsAndScale = tuple[State, Tree]  # the scale of inputs is an argument: runs share programs
PassPrograms = dict[tuple[torch.device, int, int], Program]  # (device, number of models, batch size) -> recorded passes
MIN_BATCHES_FOR_PROGRAM = 100  # batches of one size in the probes of a run: fewer are not worth a program


def ask_together(
    probing: Probing, pool: DevicePool, group_size: int, recorder: Recorder | None, rounds: int
) -> list[Tree]:
    """The answers of all clients, who look at the same batches; `rounds` says how often they will be asked about."""
    count, probe = len(probing.request.clients), probing.request.probe
    groups = [range(first, min(first + group_size, count)) for first in range(0, count, group_size)]
    programs = {} if recorder is None else _programs(probing, pool, groups, recorder, rounds)

    def ask(worker: Worker, g: int) -> list[Tree]:
        net, models, total = worker.net, _models(probing, worker, groups[g]), dict[str, Tensor]()
        for size, alike in groupby(_batches(probing, worker, groups[g]), lambda batch: len(batch.y)):
            program = programs.get((net.device, len(groups[g]), size))
            if program is None or not total:
                for batch in alike if program is None else islice(alike, 1):
                    total = probe.add(total, _answers(probing, net, models, batch))
            if program is not None:
                total = trees.aligned(total)
                for batches in _some_at_once(alike, pool.max_gather_bytes):
                    program(total, (models, net.scale), batches)
        return [probe.finish({k: v[i] for k, v in total.items()}) for i in range(len(groups[g]))]

    return [answer for group in pool.each(len(groups), ask) for answer in group]


def _batches(probing: Probing, worker: Worker, group: Sequence[int]) -> Iterator[Batch]:
    return probing.shared_batches(worker, [probing.request.clients[m] for m in group])


def _some_at_once(batches: Iterator[Batch], most_bytes: int) -> Iterator[Batch]:
    """Batches of one size, [steps, size, ...], as many at a time as take so many bytes."""
    for first in batches:
        size = sum(t.numel() * t.element_size() for t in trees.leaves(first))
        yield trees.stacked([first, *islice(batches, max(0, most_bytes // size - 1))])


def _models(probing: Probing, worker: Worker, group: Sequence[int]) -> State:
    return trees.moved(trees.stacked([probing.model(m) for m in group]), worker.net.device)


def _answers(probing: Probing, net: Net, models: State, batch: Batch) -> Tree:
    """Sums over one batch, of every model."""
    probe, x = probing.request.probe, net.laid_out(batch.x)

    def answer(params: Tensor, buffers: Tree, masks: Tree) -> Tree:
        mine = replace(batch, x=x, noise=masks)
        return probe(probing.forward(net, params, buffers, mine), mine)

    answers: Tree = vmap(answer)(models.params, models.buffers, batch.noise)
    return answers


def _pass(probing: Probing, net: Net) -> Step:
    """A batch more, as a function of everything that it reads and writes."""

    def step(total: Tree, fixed: ModelsAndScale, batch: Batch) -> Tensor:
        models, scale = fixed
        for name, part in _answers(probing, net.scaling_by(scale), models, batch).items():
            total[name].add_(part)
        return models.params.new_zeros(())

    return step


def _programs(
    probing: Probing, pool: DevicePool, groups: Sequence[Sequence[int]], recorder: Recorder, rounds: int
) -> PassPrograms:
    """Passes over batches of the most frequent size, recorded for every device and number of models.

    Only of probes in train mode: others look at large batches, and Python is no part of their time.
    """
    request, training = probing.request, probing.request.probe.training
    if training is None or not _is_a_value(request.probe):
        return {}
    sizes = pool.feed.plan(request.clients[0], request.data, training, probing.stream(request.clients[0])).sizes
    often = sizes.count(sizes[0]) * rounds if sizes else 0
    if often < MIN_BATCHES_FOR_PROGRAM:
        return {}
    asked = [(worker, width) for width in {len(group) for group in groups} for worker in pool.devices()]
    wanted = [_request(probing, worker, range(width), sizes[0], often * width) for worker, width in asked]
    found = zip(asked, recorder.programs_of(wanted), strict=True)
    return {(worker.net.device, width, sizes[0]): program for (worker, width), program in found if program}


def _is_a_value(probe: Probe) -> bool:
    """Whether probes that are equal ask the same, and add up as all do: only then can a program be found again."""
    if not is_dataclass(probe) or not vars(probe).keys() <= {field.name for field in fields(probe)}:
        return False
    try:
        hash(probe)
    except TypeError:
        return False
    return type(probe).add is Probe.add


def _request(probing: Probing, worker: Worker, group: Sequence[int], size: int, expected_steps: int) -> ProgramRequest:
    probe, net = probing.request.probe, worker.net

    def example() -> tuple[Step, Tree, ModelsAndScale, Batch]:
        models, batch = _models(probing, worker, group), next(_batches(probing, worker, group))
        answers = trees.aligned(_answers(probing, net, models, batch))
        return _pass(probing, net), answers, (models, net.scale), batch

    key = "probe", len(group), size, probing.request.data, probe, type(probe).__call__, net.device
    return ProgramRequest(key, example, expected_steps)
