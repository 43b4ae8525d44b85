"""Break every equation on purpose: a named test must fail for each mutant.

    python tests/mutants.py [WORD ...]      # only mutants whose name contains a word

A mutant is a copy of the package in which one piece of text is replaced. The tests that guard the equation are run
against the copy, and the first one that fails is printed. A mutant that no test notices survives, and the exit code is 1.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 600  # seconds for the tests of a mutant: one that runs for ever is noticed too
FEDAVG, FEDPROX, SCAFFOLD, MOON, FEDNOVA, FNR = (
    f"tests/test_oracles_{name}.py" for name in ("fedavg", "fedprox", "scaffold", "moon", "fednova", "fnr")
)
FEDDYN, FEDDC, FEDDF, FEDGEN, FEDFTG, FEDBN, CFEDFN, KTPFL, LOCAL_ONLY, SHARE, RETURNED, SERVER_OPTIMISERS = (
    f"tests/test_oracles_{name}.py"
    for name in (
        "feddyn", "feddc", "feddf", "fedgen", "fedftg", "fedbn", "cfedfn", "ktpfl", "local_only", "public_share",
        "public_returned", "server_optimisers",
    )
)  # fmt: skip
SLOW, LISTED, NEEDED = (f"tests/test_{name}.py" for name in ("heterogeneous", "list_algorithms", "needs"))
CONTROLS = "tests/test_controls.py"
ENGINES, CONFORMANCE, FAST = "tests/test_engines.py", "tests/test_conformance.py", "tests/test_fast.py"
GPU = "tests/test_gpu.py"
GPU_ALONE = f"{GPU} -k 'not loop_engines'"  # without the comparison of every method, which takes a minute
UNDER_FNR = f"{CONFORMANCE} -k fnr"


@dataclass(frozen=True)
class Mutant:
    """One change, and who should notice."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _of(file: str, *tests: str, **changes: tuple[str, str]) -> list[Mutant]:
    stem = Path(file).stem
    return [Mutant(f"{stem}: {name.replace('_', ' ')}", file, old, new, tests) for name, (old, new) in changes.items()]


MUTANTS = [
    *_of(
        "algorithms/fedavg.py", FEDAVG, FNR, f"{CONFORMANCE} -k fedavg",
        sign_of_the_step=("state.params + got", "state.params - got"),
        average_forgets_refinement=("r.params - state", "r.trained - state"),
        displacement_not_taken=('r.params - state.params}', "r.params}"),
    ),
    *_of(
        "core/types.py", FEDAVG, FEDNOVA, SCAFFOLD, CONFORMANCE,
        models_weighted_uniformly=("if uniform else chunk.examples)", "if True else chunk.examples)"),
        uniform_weights_by_examples=("ones if uniform else", "chunk.examples if uniform else"),
        buffers_weighted_uniformly=("v.is_floating_point()}, chunk.examples)", "v.is_floating_point()}, torch.ones_like(chunk.examples))"),
        weights_not_renormalised=("value.div_(len(examples) if uniform else examples.sum())", "value.div_(len(examples))"),
        smallest_integer_buffer=("top = value.amax(0)", "top = value.amin(0)"),
        travel_averaged_uniformly=("shares = self.examples.to(values.dtype)", "shares = torch.ones_like(values)"),
    ),
    *_of(
        "core/optim.py", ENGINES, FEDNOVA, SCAFFOLD,
        sgd_ascends=("alpha=-lr", "alpha=lr"),
        no_momentum=('memory["velocity"].mul_(training.momentum)', 'memory["velocity"].mul_(0.0)'),
        rate_as_a_tensor_ascends=("params.sub_(grad * lr)", "params.add_(grad * lr)"),
        rate_as_a_tensor_dropped=("params.sub_(grad * lr)", "params.sub_(grad)"),
        count_forgets_momentum=("count = training.momentum * count + 1", "count = 1"),
        count_never_forgets=("count = training.momentum * count + 1", "count = count + 1"),
        travel_counts_steps=("total += training.lr * count", "total += training.lr"),
        travel_without_rate=("total += training.lr * count", "total += count"),
        adam_without_first_correction=('memory["first"] / (1 - BETA1**count)', 'memory["first"]'),
        adam_without_second_correction=('memory["second"] / (1 - BETA2**count)', 'memory["second"]'),
        adam_first_moment_swapped=("alpha=1 - BETA1", "alpha=BETA1"),
        adam_second_moment_swapped=("alpha=1 - BETA2", "alpha=BETA2"),
    ),
    *_of(
        "core/step.py", FEDAVG, ENGINES, FNR, SCAFFOLD,
        weight_decay_sign=("alpha=training.weight_decay", "alpha=-training.weight_decay"),
        no_correction=("grad = objective.correct(grad, carry.params, start.params, shared, own)", "pass"),
    ),
    *_of(
        "engines/trace.py", FAST,
        leaves_in_order_of_insertion=("[part[k] for k in sorted(part)]", "list(part.values())"),
        any_record_will_do=("if self.repeats(program, same, now, stepped):", "if True:"),
        one_tensor_for_two=("return [t.clone() for t in tensors]", "return list(tensors)"),
        only_one_step=("for s in range(b0.size(0)):", "for s in range(1):"),
    ),
    *_of(
        "engines/batched.py", FAST, CONFORMANCE,
        finished_clients_go_on=("if steps[i] == last:", "if last == max(steps):"),
        group_shrinks_too_far=("next(w for w in halves(width) if w >= live)", "next(w for w in halves(width) if 2 * w >= live)"),
        nobody_waits_for_the_size=("plan.sizes[at[m]], [])", "plan.sizes[0], [])"),
        held_models_mixed_up=("groups = [clients[i : i + self.rows]", "groups = [clients[::-1][i : i + self.rows]"),
    ),
    *_of(
        "engines/job.py", FAST, ENGINES,
        idle_rows_draw=("noise = [self.draws[m](*positions[0].shape) for m in at]", "noise = [self.draws[m](*positions[0].shape) for m in [*at, *list(at)[:1] * idle]]"),
        transform_of_another_client=("for i, m in enumerate(at):", "for i, m in enumerate(reversed(at)):"),
    ),
    *_of(
        "engines/base.py", FAST, ENGINES,
        rate_of_the_first_round=("start.params.new_tensor(training.lr)", "start.params.new_tensor(self._training.lr)"),
    ),
    *_of(
        "core/net.py", FAST,
        weights_not_put_back=("part.view(out, height, width, into).permute(0, 3, 1, 2)", "part.view(out, into, height, width)"),
        packed_in_the_old_order=("v.permute(0, 2, 3, 1) if self.channels_last and v.ndim == 4 else v", "v"),
    ),
    *_of(
        "core/shared.py", GPU,
        variance_biased=(" * (count / max(1, count - 1))", ""),
        eps_left_in=("rstd.square().reciprocal() - self.eps", "rstd.square().reciprocal()"),
        mean_moves_away=("(mean - self.running_mean) * part", "(self.running_mean - mean) * part"),
        statistics_never_move=("self._remember(mean, rstd, x.numel() // channels)", "pass"),
        strides_swapped=("::rows, ::columns", "::columns, ::rows"),
        clients_mixed=("v.movedim(axis, 0)).reshape(-1)", "v.movedim(axis, -1)).reshape(-1)"),
        gradients_swapped=("dweight.view(M, -1), dbias.view(M, -1)", "dbias.view(M, -1), dweight.view(M, -1)"),
        eval_mode_shifts_twice=("(bias - self.running_mean * scale)", "(bias - 2 * self.running_mean * scale)"),
    ),
    *_of(
        "engines/base.py", GPU_ALONE,
        kept_before_all_is_copied=("        held = [self.held.copied(model) for model in models] if task.hold else []\n", "        for client, memory in remembered:\n            self.store.keep(client, memory)\n        held = [self.held.copied(model) for model in models] if task.hold else []\n"),
    ),
    *_of(
        "core/net.py", GPU_ALONE,
        half_of_a_batch_that_is_too_large=("for half in x.chunk(2)]", "for half in x.chunk(2)[:1]]"),
        own_buffers_in_bf16=("x.is_floating_point() and not self._unlike", "x.is_floating_point()"),
        types_apart=("or not self._unlike:", "or True:"),
    ),
    *_of(
        "engines/gpu.py", GPU_ALONE,
        gives_up_at_once=("if rows > 1:", "if False:"),
        one_device_for_all=("return self.net.copy(self.devices[i])", "return self.net"),
        tf32_for_the_server_too=("            torch.backends.cuda.matmul.allow_tf32 = False", "            pass"),
        programs_let_go_again_and_again=("        return replies\n\n    def _make_room", "        self._full = replies is None\n        return replies\n\n    def _make_room"),
        models_held_where_there_is_no_room=("            self.held.move(CPU)\n        yield", "            pass\n        yield"),
        no_room_for_the_server=("        self._let_go()\n        return work()", "        return work()"),
        phases_that_go_on=("                torch.cuda.synchronize(device)", "                pass"),
        tf32_for_nobody=("torch.backends.cuda.matmul.allow_tf32 = self.tf32", "torch.backends.cuda.matmul.allow_tf32 = False"),
    ),
    *_of(
        "engines/batched.py", FAST, ENGINES,
        full_batches_not_recorded=("size == job.training.batch or self._few_sizes(job)", "self._few_sizes(job)"),
        all_asked_together=("        except RuntimeError:  #", "        except ZeroDivisionError:  #"),
    ),
    *_of(
        "engines/trace.py", GPU_ALONE,
        closed_but_recording=("        self.closed = True", "        pass"),
    ),
    *_of(
        "engines/capture.py", GPU_ALONE,
        rounding_is_a_mistake=(" + 1e-8 * before.numel() ** 0.5", ""),
        small_changes_do_not_count=("1e-8 * before.numel()", "1e-5 * before.numel()"),
    ),
    *_of(
        "core/store.py", GPU_ALONE,
        only_new_ones_move=("{c: {k: v.to(home) for k, v in m.items()} for c, m in self._here.items()}", "self._here"),
    ),
    *_of(
        "engines/base.py", ENGINES,
        errors_do_not_wait=("        wait(begun)  #", "        pass  #"),
        errors_stop_nobody=("            late.cancel()", "            pass"),
    ),
    *_of(
        "core/net.py", ENGINES,
        random_in_eval_mode=("for mode in (True, False):", "for mode in (True,):"),
    ),
    *_of(
        "runs/build.py", FAST,
        capturing_for_one_group=("steps * -(-cohort_size(config) // ROWS)", "steps"),
    ),
    *_of(
        "engines/batched.py", GPU_ALONE,
        compiled_by_the_cohort=("sizes = self.sizes if private", "sizes = [self.sizes[c] for c in job.clients] if private"),
        the_server_is_there_sometimes=('if private and job.clients != [SERVER] else 1.0', "if private else 1.0"),
        compiled_by_one_round=("taken * self.rounds *", "taken *"),
    ),
    *_of(
        "algorithms/fedprox.py", FEDPROX,
        sign_of_the_pull=("grad + self.mu", "grad - self.mu"),
        no_pull=("grad + self.mu * (params - start)", "grad"),
        half_the_pull=("self.mu * (params", "0.5 * self.mu * (params"),
        pull_to_zero=("(params - start)", "params"),
    ),
    *_of(
        "algorithms/scaffold.py", SCAFFOLD, FNR, f"{CONFORMANCE} -k scaffold",
        correction_signs=('grad - own["c"] + shared["c"]', 'grad + own["c"] - shared["c"]'),
        no_client_variate=('grad - own["c"] + shared["c"]', 'grad + shared["c"]'),
        no_server_variate=('grad - own["c"] + shared["c"]', 'grad - own["c"]'),
        new_variate_sign=("(start.params - end.params) / travel", "(end.params - start.params) / travel"),
        new_variate_keeps_c=('own["c"] - shared["c"] + (start', 'own["c"] + (start'),
        new_variate_forgets_ci=('own["c"] - shared["c"] + (start', '-shared["c"] + (start'),
        new_variate_without_travel=("end.params) / travel", "end.params)"),
        delta_sign=('return {"delta_c": new - own["c"]}, {"c": new}\n\n\n@dataclass(frozen=True)\nclass AtStart', 'return {"delta_c": own["c"] - new}, {"c": new}\n\n\n@dataclass(frozen=True)\nclass AtStart'),
        whole_gradient_not_at_x=("model.start.params + (params - params.detach())", "params"),
        whole_gradient_unweighted=("len(batch.y) * super()", "super()"),
        whole_gradient_not_averaged=("(start.params - end.params) / examples", "(start.params - end.params)"),
        whole_gradient_without_decay=(" + self.weight_decay * start.params", ""),
        server_variate_of_the_cohort=("part * new.mean", "new.mean"),
        server_variate_sign=('state.extra["c"] + part', 'state.extra["c"] - part'),
        parts_swapped=("if uniform else new.examples", "if not uniform else new.examples"),
        no_server_rate=("self.server_lr * got", "got"),
        refinement_scaled=('self.server_lr * got.mean["moved"] + got.mean["refinement"]', 'self.server_lr * (got.mean["moved"] + got.mean["refinement"])'),
        refinement_dropped=(' + got.mean["refinement"]', ""),
        always_by_examples=('uniform = self.weights == "uniform"', "uniform = False"),
    ),
    *_of(
        "algorithms/moon.py", MOON, FNR, f"{CONFORMANCE} -k moon",
        near_and_far_swapped=("torch.stack([near, far], -1)", "torch.stack([far, near], -1)"),
        contrast_sign=("contrast = -torch", "contrast = torch"),
        temperature_multiplies=(".div(self.tau)", ".mul(self.tau)"),
        weight_dropped=("self.mu * own", "own"),
        contrast_before_first_part=('own["seen"] * batch', "batch"),
        previous_is_the_received=('"previous": end.params', '"previous": start.params'),
        previous_in_foreign_buffers=('model.frozen(own["previous"], buffers,', 'model.frozen(own["previous"], model.start.buffers,'),
        near_is_the_previous=("model.frozen(model.start.params, model.start.buffers, batch.x)", 'model.frozen(own["previous"], buffers, batch.x)'),
        contrast_of_logits=("out.projection, model.frozen(model", "out.logits, model.frozen(model"),
    ),
    *_of(
        "core/net.py", MOON, ENGINES, FNR,
        references_in_train_mode=('params.detach(), buffers, x, mode="frozen")', 'params.detach(), buffers, x, mode="batch")'),
        statistics_always_stored=('new if mode == "updating" else buffers', "new"),
        threads_share_a_module=("copy.deepcopy(self.module).to(device or self.device), {}", "self.module, {}"),
    ),
    *_of(
        "core/masks.py", MOON, ENGINES, FNR,
        dropout_not_scaled=("(1 / (1 - self.p) if", "(1.0 if"),
    ),
    *_of(
        "algorithms/fednova.py", FEDNOVA, FNR, f"{CONFORMANCE} -k fednova",
        not_normalised=(" / r.travel[:, None]", ""),
        normalised_by_steps=("r.travel[:, None]", "r.steps[:, None]"),
        effective_steps_uniform=("got.weigh(got.travel)", "got.travel.mean()"),
        effective_steps_of_counts=("got.weigh(got.travel)", "got.weigh(got.steps.to(got.travel.dtype))"),
        sign=("state.params + effective", "state.params - effective"),
        direction_from_refined=("(r.trained - state.params)", "(r.params - state.params)"),
        refinement_dropped=(' + got.mean["refinement"]', ""),
    ),
    *_of(
        "algorithms/fnr.py", FNR, UNDER_FNR,
        norm_not_squared=("features.square().sum(-1)", "features.abs().sum(-1)"),
        class_sums_not_means=('total["sum"] / total["count"].clamp(min=1)', 'total["sum"]'),
        accuracy_inverted=("out.logits.argmax(-1) == batch.y", "out.logits.argmax(-1) != batch.y"),
        refines_one_more=("math.floor(cohort * share + 1e-9)", "math.ceil(cohort * share + 1e-9)"),
        refines_the_strongest=("accuracy.argsort(stable=True)", "(-accuracy).argsort(stable=True)"),
        ranks_on_refinement_data=('Accuracy(), data="ranking"', 'Accuracy(), data="public"'),
        target_of_the_refined=("norms[~weak].mean(0)", "norms[weak].mean(0)"),
        target_includes_itself=("(norms.sum(0) - norms[refined]) / (len(norms) - 1)", "norms.mean(0).expand(len(refined), -1)"),
        targets_swapped=('if target == "others":\n        return', 'if target != "others":\n        return'),
        difference_sign=("(norm_targets(norms, refined, target) - norms[refined])", "(norms[refined] - norm_targets(norms, refined, target))"),
        difference_peers=("return peers * (norm", "return (norm"),
        rho_dropped=("torch.where(known, count, 0.0) / len(u)", "known.to(u.dtype)"),
        live_sum_not_mean=("(u @ hot) / count.clamp(min=1)", "u @ hot"),
        unknown_targets_count=("known = (target > 0) & (count > 0)", "known = count > 0"),
        relative_without_one=("(mean / goal - 1).square()", "(mean / goal).square()"),
        relative_upside_down=("(mean / goal - 1)", "(goal / mean - 1)"),
        squared_sum=("rho @ (mean - goal).square()", "rho @ (mean + goal).square()"),
        absolute_signed=("rho @ (mean - goal).abs()", "rho @ (mean - goal)"),
        huber_offset=("gap - 0.5)", "gap)"),
        huber_half=("gap.square() / 2", "gap.square()"),
        per_sample_sum=("(u - goal).square()", "(u + goal).square()"),
        log_ratio_sum=("mean.log() - goal.log()", "mean.log() + goal.log()"),
        literal_sign=("return -(rho * peers", "return (rho * peers"),
        literal_gap_moves=("(goal - mean).detach()) @ mean", "(goal - mean)) @ mean"),
        literal_without_peers=("-(rho * peers * (goal", "-(rho * (goal"),
        constant_with_gradient=("(rho @ (peers * (goal - mean))).detach()", "rho @ (peers * (goal - mean))"),
        penalty_sign=("loss + self.weight * PENALTIES", "loss - self.weight * PENALTIES"),
        penalty_unweighted=("loss + self.weight * PENALTIES", "loss + PENALTIES"),
        penalty_dropped=("loss + self.weight * PENALTIES[self.penalty](feature_norms(out.features), hot, target, self.peers)", "loss"),
        local_penalty_drops_correction=("return self.inner.correct(grad, params, start, shared, own)", "return grad"),
        local_penalty_drops_finish=("return self.inner.finish(start, end, travel, examples, shared, own)", "return {}, {}"),
        local_penalty_drops_inner_loss=("loss = self.inner.loss(", "loss = Objective().loss("),
        refines_on_private_data=('"refine", own=own, data="public"', '"refine", own=own, data="private"'),
        trained_is_the_refined=("replace(chunk, params=got.params[order],", "replace(chunk, params=got.params[order], trained=got.params[order],"),
        refined_model_not_used=("params=got.params[order]", "params=chunk.params"),
        refined_rows_mixed_up=("params=got.params[order]", "params=got.params"),
        early_upload_forgotten=('or "uses-trained" in fnr.inner.needs', ""),
        statistics_not_frozen=("batchnorm=fnr.batchnorm", 'batchnorm="updating"'),
        refinement_at_local_rate=("lr=fnr.lr, ", ""),
        refinement_epochs=("epochs=fnr.epochs", "epochs=1"),
        no_norm_pass=("if fnr.norm_pass_train_mode:\n", "if False:\n"),
        local_targets_forgotten=('{"fnr.target": refining.norms.mean(0)}', '{"fnr.target": 0 * refining.norms.mean(0)}'),
    ),
    *_of(
        "algorithms/feddyn.py", FEDDYN, f"{CONFORMANCE} -k feddyn",
        pull_sign=('grad + self.alpha / own["w"] * (', 'grad - self.alpha / own["w"] * ('),
        pull_without_state=('(params - start + own["h"])', "(params - start)"),
        pull_without_prox=('(params - start + own["h"])', 'own["h"]'),
        pull_state_sign=('(params - start + own["h"])', '(params - start - own["h"])'),
        alpha_not_scaled=('self.alpha / own["w"]', "self.alpha"),
        alpha_scaled_up=('self.alpha / own["w"]', 'self.alpha * own["w"]'),
        state_sign=('own["h"] + (end.params - start.params)', 'own["h"] - (end.params - start.params)'),
        state_forgets=('own["h"] + (end.params - start.params)', "end.params - start.params"),
        weights_swapped=('self.weights == "examples"', 'self.weights != "examples"'),
        weights_not_mean_one=("everybody / everybody.mean()", "everybody / everybody.sum()"),
        weights_of_other_clients=("to(x.dtype)[cohort]", "to(x.dtype)[: len(cohort)]"),
        no_smallest=("w.clamp(min=self.smallest)", "w"),
        models_by_examples=("uniform=True", "uniform=False"),
        average_forgets_refinement=("r.params - x", "r.trained - x"),
        state_from_refined=('{"h": r.trained - x}', '{"h": r.params - x}'),
        state_of_the_cohort=("change / len(everybody)", "change / len(cohort)"),
        server_state_sign=("state.extra[k] + change", "state.extra[k] - change"),
        server_state_forgets=("state.extra[k] + change / len(everybody)", "change / len(everybody)"),
        no_state_in_the_step=('got.mean["moved"] + kept["h"], **kept', 'got.mean["moved"], **kept'),
        old_state_in_the_step=('got.mean["moved"] + kept["h"], **kept', 'got.mean["moved"] + state.extra["h"], **kept'),
        step_sign=('x + got.mean["moved"]', 'x - got.mean["moved"]'),
        note_of_the_old_state=('float(kept["h"].norm())', 'float(state.extra["h"].norm())'),
    ),
    *_of(
        "algorithms/feddc.py", FEDDC, f"{CONFORMANCE} -k feddc",
        correction_signs=('+ (shared["g"] / own["w"] - own["g"])', '- (shared["g"] / own["w"] - own["g"])'),
        no_client_variate=('(shared["g"] / own["w"] - own["g"])', '(shared["g"] / own["w"])'),
        no_server_variate=('(shared["g"] / own["w"] - own["g"])', '(-own["g"])'),
        server_variate_not_scaled=('(shared["g"] / own["w"] - own["g"])', '(shared["g"] - own["g"])'),
        no_pull=("super().correct(grad, params, start, shared, own)", "grad"),
        variate_sign=("(start.params - end.params) / travel", "(end.params - start.params) / travel"),
        variate_without_travel=("end.params) / travel", "end.params)"),
        variate_keeps_g=('/ travel - shared["g"] / own["w"]', "/ travel"),
        variate_with_unscaled_g=('/ travel - shared["g"] / own["w"]', '/ travel - shared["g"]'),
        change_not_scaled=('{"g": own["w"] * change}', '{"g": change}'),
        change_sign=('{"g": own["w"] * change}', '{"g": -own["w"] * change}'),
        variate_forgets=('{"g": own["g"] + change}', '{"g": change}'),
        drift_forgotten=('kept | {"g": own["g"] + change}', '{"g": own["g"] + change}'),
    ),
    *_of(
        "algorithms/parts/optimisers.py", SERVER_OPTIMISERS,
        momentum_forgotten=("return beta * m + D", "return 0.0 * m + D"),
        momentum_damped=("return beta * m + D", "return beta * m + (1 - beta) * D"),
        average_weights_swapped=("beta * m + (1 - beta) * D", "(1 - beta) * m + beta * D"),
        average_not_damped=("beta * m + (1 - beta) * D", "beta * m + D"),
        yogi_sign=("(v - square).sign()", "(square - v).sign()"),
        yogi_without_sign=(" * (v - square).sign()", ""),
        yogi_weight_swapped=("v - (1 - beta) * square", "v - beta * square"),
        adaptive_without_root=("(v.sqrt() + tau)", "(v + tau)"),
        adaptive_tau_inside_the_root=("(v.sqrt() + tau)", "(v + tau).sqrt()"),
        correction_swapped=("math.sqrt(1 - beta2**t) / (1 - beta1**t)", "(1 - beta1**t) / math.sqrt(1 - beta2**t)"),
        correction_without_root=("math.sqrt(1 - beta2**t)", "(1 - beta2**t)"),
        correction_betas_swapped=("math.sqrt(1 - beta2**t) / (1 - beta1**t)", "math.sqrt(1 - beta1**t) / (1 - beta2**t)"),
        refinement_weighted_uniformly=("shares = replies.examples.to(replies.params.dtype)", "shares = (0 * replies.examples + 1).to(replies.params.dtype)"),
        refinement_sign=("replies.params - replies.trained", "replies.trained - replies.params"),
        refinement_twice=("replies = replace(replies, params=replies.trained)", "pass"),
    ),
    *_of(
        "algorithms/_optimised.py", SERVER_OPTIMISERS,
        step_sign=("(step - D)", "(-step - D)"),
        displacement_twice=("new.params + (step - D)", "new.params + step"),
        refinement_lost=(" + apart.refinement, new.buffers", ", new.buffers"),
        refinement_always_inside=('apart if self.refinement == "outside" else engine', "engine"),
        refinement_always_outside=('apart if self.refinement == "outside" else engine', "apart"),
        rounds_counted_from_zero=("engine.round + 1", "engine.round"),
        buffers_not_renewed=("apart.refinement, new.buffers", "apart.refinement, state.buffers"),
        inner_state_lost=("new.extra | memory)", "state.extra | memory)"),
        v_starts_at_tau=("first = self.tau**2", "first = self.tau"),
        v_always_starts_at_zero=('if self.v0 == "tau" else 0.0', 'if False else 0.0'),
        moments_swapped=('self.second(memory["server.v"], D.square())', 'self.second(memory["server.m"], D.square())'),
        not_squared=("D.square())", "D)"),
        rate_forgotten=("self.rate(t) * optimisers", "optimisers"),
        needs_of_the_inner_method_forgotten=("return self.method.needs | (", "return frozenset("),
        uses_trained_unsaid=('{"uses-trained"} if self.refinement == "outside"', '{"uses-trained"} if False'),
        inner_method_ignored=("return _at_defaults(self.inner)", 'return _at_defaults("fedavg")'),
        wrappers_allowed=("if not _wraps(found):", "if True:"),
        client_memory_of_the_inner_method_forgotten=("return self.method.client_state(net)", "return {}"),
        own_models_forgotten=("return self.method.personal(net, state, client, memory)", "return state"),
    ),
    *_of(
        "algorithms/fedavgm.py", SERVER_OPTIMISERS, f"{CONFORMANCE} -k fedavgm",
        rate_forgotten=("return self.server_lr * m,", "return m,"),
        momentum_not_remembered=('return self.server_lr * m, {"server.m": m}', 'return self.server_lr * m, {}'),
    ),
    *_of(
        "algorithms/fedadagrad.py", SERVER_OPTIMISERS,
        forgets=("return v + square", "return square"),
        sign=("return v + square", "return v - square"),
    ),
    *_of(
        "algorithms/fedadam.py", SERVER_OPTIMISERS,
        wrong_beta=("(v, square, self.beta2)", "(v, square, self.beta1)"),
        always_corrected=("if self.correction else 1.0", "if True else 1.0"),
        never_corrected=("if self.correction else 1.0", "if False else 1.0"),
    ),
    *_of(
        "algorithms/fedyogi.py", SERVER_OPTIMISERS,
        is_adam=("optimisers.yogi(", "optimisers.average("),
    ),
    *_of(
        "algorithms/fedbn.py", FEDBN,
        layers_not_put_in=('start.params.index_copy(0, own["places"], own["norms"])', "start.params"),
        statistics_not_put_in=('own.get(f"buffer.{name}", value)', "value"),
        layers_not_remembered=('{"norms": end.params[own["places"]]} | buffers', "buffers"),
        statistics_not_remembered=('{"norms": end.params[own["places"]]} | buffers', '{"norms": end.params[own["places"]]}'),
        layers_of_the_start_remembered=('end.params[own["places"]]', 'start.params[own["places"]]'),
        layers_travel=("stays=engine.net.batchnorm", "stays=frozenset()"),
        sign=("state.params + got", "state.params - got"),
        refinement_forgotten=("r.params - state.params", "r.trained - state.params"),
        always_uniform=('uniform=self.weights == "uniform"', "uniform=True"),
        never_uniform=('uniform=self.weights == "uniform"', "uniform=False"),
        everybody_uses_the_average=("return OwnNorms().begin(state, memory)", "return state"),
    ),
    *_of(
        "algorithms/feddf.py", FEDDF, f"{CONFORMANCE} -k feddf",
        average_sign=("state.params + got", "state.params - got"),
        average_forgets_refinement=("r.params - state", "r.trained - state"),
        always_by_examples=('uniform=self.weights == "uniform"', "uniform=False"),
        teachers_counted_by_cohort=("len(got.clients), self", "len(cohort), self"),
        sum_of_logits=("len(got.clients), self", "1, self"),
        student_starts_from_the_old_model=("self._taught(average, x", "self._taught(state, x"),
        students_temperature_dropped=("SoftTargets(self.temperature,", "SoftTargets(1.0,"),
        clip_dropped=("self.clip)", "0.0)"),
        sgd_for_adam=('Training("adam"', 'Training("sgd"'),
        weight_decay=("self.lr, 0.0, 0.0", "self.lr, 0.0, 0.1"),
        statistics_always_updated=("batchnorm=self.batchnorm", 'batchnorm="updating"'),
        judged_by_distillation_labels=('engine.pool("validation")', 'engine.pool("distill")'),
        distils_on_public_data=('engine.pool("distill")', 'engine.pool("public")'),
        validation_ignored=("if len(labels) else None", "if False else None"),
    ),
    *_of(
        "algorithms/parts/ensemble.py", FEDDF,
        teachers_in_train_mode=("net.look(model.params, model.buffers, net.laid_out(part)) for part", 'net.apply(model.params, model.buffers, net.laid_out(part), mode="batch")[0] for part'),
        teachers_share_buffers=("v[m] for k", "v[0] for k"),
        temperature_multiplies=("(mean / temperature)", "(mean * temperature)"),
        probs_without_temperature=("(said / temperature).softmax(-1)", "said.softmax(-1)"),
        verdict_of_probs_softened_again=('mean if kind == "probs" else', "mean if False else"),
        kinds_swapped=('return said if kind == "logits"', 'return said if kind == "probs"'),
        wrong_answers_counted=(".argmax(-1) == y", ".argmax(-1) != y"),
    ),
    *_of(
        "algorithms/parts/distill.py", FEDDF,
        divergence_sign=("target * said).sum", "-target * said).sum"),
        entropy_dropped=("torch.special.xlogy(target, target) - target", "-target"),
        student_without_temperature=("(out.logits / self.temperature)", "out.logits"),
        targets_in_the_order_of_the_batch=('shared["target"][batch.index]', 'shared["target"][: len(batch.index)]'),
        t_squared=("return batch.mean((torch", "return self.temperature**2 * batch.mean((torch"),
        gradients_lengthened=(".clamp(max=1.0)", ".clamp(min=1.0)"),
        no_annealing=("[cosine(training.lr, step, steps) for", "[training.lr for"),
        annealed_a_step_early=("cosine(training.lr, step, steps)", "cosine(training.lr, step + 1, steps)"),
        annealed_upwards=("(1 + math.cos", "(1 - math.cos"),
        last_for_best=("if judge is None:\n        best", "if True:\n        best"),
        start_no_candidate=("-math.inf if judge is None else judge(start)", "-math.inf"),
        ties_to_the_later=("found > liked", "found >= liked"),
        patience_never_ends=("elif taken - chosen >= patience", "elif False"),
        patience_from_the_start=("elif taken - chosen >= patience", "elif taken >= patience"),
        the_start_judged=("found = judge(now)", "found = judge(start)"),
        best_moves_on=("State(carry.params.clone(), aligned(carry.buffers)), taken", "now, taken"),
        same_order_every_epoch=("torch.cat(orders)", "torch.cat(orders[:1] * len(orders))"),
        dropout_without_masks=("{name: stream(name) for name in net.drop_shapes}", "{}"),
    ),
    *_of(
        "algorithms/public_finetune.py", CONTROLS,
        tunes_the_old_model=('"finetune", average', '"finetune", state'),
        tunes_on_ranking_data=('data="public"', 'data="ranking"'),
        own_rate_ignored=("lr=self.lr, ", ""),
        own_optimiser_ignored=("optimizer=self.optimizer, ", ""),
        clients_epochs=("epochs=self.epochs, ", ""),
        clients_batch=("batch=self.batch, ", ""),
        statistics_updated=("batchnorm=self.batchnorm", 'batchnorm="updating"'),
    ),
    *_of(
        "algorithms/public_only.py", CONTROLS,
        trains_on_private_data=('data="public"', 'data="private"'),
        statistics_lost=("params=end.params, buffers=end.buffers", "params=end.params"),
        clients_epochs=("epochs=self.epochs, ", ""),
    ),
    *_of(
        "algorithms/centralised.py", CONTROLS,
        trains_on_public_data=('data="private"', 'data="public"'),
        forgets_what_it_learned=("params=end.params", "params=state.params"),
    ),
    *_of(
        "algorithms/bn_recalibrate.py", CONTROLS,
        clients_statistics_linger=("layer.momentum = None", "layer.momentum = 0.1"),
        counters_not_reset=("if fresh else {})", "if False else {})"),
        counters_lost=("return buffers | counters", "return buffers"),
        dropout_on=("layer.eval()", "pass"),
        eval_mode=('mode="updating"', 'mode="frozen"'),
        always_fresh=('self.statistics == "fresh"', "True"),
        statistics_of_the_last_batch=("net.apply(params, buffers, x", "net.apply(params, model.buffers | {k: torch.zeros_like(v) for k, v in counters.items()}, x"),
        the_nets_own_layers_changed=("    net = net.copy()\n", ""),
        old_model_recalibrated=("recalibrated(engine.net, average", "recalibrated(engine.net, state"),
    ),
    *_of(
        "algorithms/fedgen.py", FEDGEN, f"{CONFORMANCE} -k fedgen",
        average_sign=('state.params + got.mean["moved"]', 'state.params - got.mean["moved"]'),
        average_forgets_refinement=("r.params - state.params", "r.trained - state.params"),
        heads_before_refinement=('"head": r.params[:', '"head": r.trained[:'),
        no_generated_features=('shared["a"] * self.size / len(batch.y) * made', '0.0 * made'),
        generated_sign=('+ shared["a"]', '- shared["a"]'),
        generated_not_per_batch=(" * self.size / len(batch.y) * made", " * made"),
        agreement_sign=('loss + shared["b"]', 'loss - shared["b"]'),
        agreement_weight_dropped=('shared["b"] * batch', "batch"),
        agreement_turned_round=("view - out.logits.log_softmax(-1)", "out.logits.log_softmax(-1) - view"),
        agreement_with_gradient=('net.head(head.detach(), make(batch.noise["generated.view"], batch.y)).log_softmax(-1).detach()', 'net.head(head, make(batch.noise["generated.view"], batch.y)).log_softmax(-1)'),
        agreement_of_other_labels=('make(batch.noise["generated.view"], batch.y)', 'make(batch.noise["generated.view"], batch.y * 0)'),
        heads_weighted_alike=("shares[:, y]).sum()", "torch.ones_like(shares[:, y])).sum()"),
        heads_averaged=("shares[:, y]).sum()", "shares[:, y]).mean()"),
        weights_over_labels=("seen / seen.sum(0)", "seen / seen.sum(1, keepdim=True)"),
        counts_not_smoothed=("engine.training.epochs * counts + 1", "engine.training.epochs * counts"),
        counts_of_one_epoch=("engine.training.epochs * counts + 1", "counts + 1"),
        diversity_sign=("+ self.diversity * diversity", "- self.diversity * diversity"),
        no_diversity=(" + self.diversity * diversity(made, noise)", ""),
        generator_on_the_first_round=('extra["labels"].amax() * max(', "torch.ones_like(extra[\"labels\"].amax()) * max("),
        weights_never_fade=("max(weight * fade, min(weight, FLOOR))", "weight"),
        no_floor=("max(weight * fade, min(weight, FLOOR))", "weight * fade"),
        floor_raises=("min(weight, FLOOR)", "FLOOR"),
        rate_never_falls=("lr=self.lr * fade", "lr=self.lr"),
        all_labels_generated=("(counts.amax(0) > 0).to(counts.dtype)", "torch.ones_like(counts[0])"),
        labels_forgotten=('torch.maximum(extra["labels"], held)', "held"),
        gaussian_noise=("[torch.rand(self.batch, n,", "[torch.randn(self.batch, n,"),
        generator_in_eval_mode=("maker(weights, statistics, noise, y, training=True)", "maker(weights, statistics, noise, y, training=False)"),
        local_generator_in_train_mode=("noise, y, training=False)[0]", "noise, y, training=True)[0]"),
    ),
    *_of(
        "algorithms/fedftg.py", FEDFTG, f"{CONFORMANCE} -k fedftg",
        average_sign=('state.params + got.mean["moved"]', 'state.params - got.mean["moved"]'),
        teachers_before_refinement=('{"": r.params}', '{"": r.trained}'),
        student_sign=('-(shared["target"]', '(shared["target"]'),
        student_summed_over_classes=("log_softmax(-1)).mean(-1))", "log_softmax(-1)).sum(-1))"),
        disagreement_with_the_teachers_gradient=("teacher.detach()).abs()", "teacher).abs()"),
        disagreement_squared=(".abs().mean(-1)", ".square().mean(-1)"),
        divergence_turned_round=("student.softmax(-1) * (student.log_softmax(-1) - teacher.log_softmax(-1))", "teacher.softmax(-1) * (teacher.log_softmax(-1) - student.log_softmax(-1))"),
        hunts_for_agreement=("self.classify * right - apart", "self.classify * right + apart"),
        no_disagreement=(" - apart", ""),
        no_classification=("self.classify * right - apart", "-apart"),
        classification_sign=("self.classify * right - apart", "-self.classify * right - apart"),
        classification_weight_lost=("weighted(cross_entropy(teacher, y), share)", "cross_entropy(teacher, y).mean() * share.mean()"),
        diversity_sign=("+ self.diversity * diversity", "- self.diversity * diversity"),
        diversity_not_shared=("diversity(x, noise) / num_teachers", "diversity(x, noise)"),
        teachers_alike=("holders(counts.to(net.dtype))", "torch.full_like(counts, 1 / len(counts)).to(net.dtype)"),
        labels_uniform=("proportional(counts.sum(0),", "proportional(torch.ones_like(counts.sum(0)),"),
        teachers_in_order_of_answers=("clients, order = got.clients.sort()", "clients, order = got.clients, torch.arange(len(got.clients))"),
        teachers_with_the_averages_statistics=('{k: got.rows[f"/{k}"][order] for k in got.buffers}', "{k: v.expand(len(order), *v.shape) for k, v in got.buffers.items()}"),
        student_in_train_mode=("batchnorm=self.batchnorm", 'batchnorm="updating"'),
        student_without_decay=("weight_decay=self.weight_decay", "weight_decay=0.0"),
        student_rate_never_falls=("lr=self.lr * rate", "lr=self.lr"),
        generator_rate_never_falls=("lr=self.generator_lr * rate", "lr=self.generator_lr"),
        images_in_train_mode=("noise, y, training=False)[0])", "noise, y, training=True)[0])"),
        generator_in_eval_mode=("maker(weights, statistics, noise, y, training=True)", "maker(weights, statistics, noise, y, training=False)"),
        counts_asked_every_round=("clients[(known[clients, 0] < 0).cpu()]", "clients"),
        counts_of_the_wrong_clients=("self._tuned(average, teachers, counts[clients], engine)", "self._tuned(average, teachers, counts[got.clients.flip(0)], engine)"),
        answers_not_weighted=("share[:, None] * answer(engine.net,", "answer(engine.net,"),
    ),
    *_of(
        "algorithms/parts/generator.py", FEDGEN, FEDFTG,
        label_ignored=("torch.cat([noise, hot], 1)", "torch.cat([noise, 0 * hot], 1)"),
        noise_ignored=("torch.cat([noise, hot], 1)", "torch.cat([0 * noise, hot], 1)"),
        no_hidden_relu=('linear(h.relu(), layers["out"]', 'linear(h, layers["out"]'),
        no_last_relu=('made.relu() if self.end == "relu"', 'made if self.end == "relu"'),
        statistics_keep_the_new=("torch.lerp(old_mean, mean.detach(), MOMENTUM)", "torch.lerp(old_mean, mean.detach(), 1 - MOMENTUM)"),
        variance_biased=("var.detach() * count / (count - 1)", "var.detach()"),
        no_shift=(' + layers[f"shift{i}"].view(across)', ""),
        decay_sign=("alpha=training.weight_decay", "alpha=-training.weight_decay"),
        diversity_sign=("(-(apart", "((apart"),
        diversity_without_noise=("(apart * (noise[:, None] - noise).square().mean(-1)).mean()", "apart.mean()"),
        diversity_of_absolute_noise=("(noise[:, None] - noise).square()", "(noise[:, None] - noise).abs()"),
        diversity_not_per_coordinate=(" / flat.shape[1]", ""),
        weight_after_the_mean=("(each * weights).mean(-1)", "each.mean(-1) * weights.mean(-1)"),
        holders_over_labels=("counts / counts.sum(0).clamp(min=1)", "counts / counts.sum(1, keepdim=True).clamp(min=1)"),
        labels_sorted=("[torch.randperm(total, generator=stream)]", ""),
        labels_at_the_edge=("(at[:, None] >= edges)", "(at[:, None] > edges)"),
    ),
    *_of(
        "algorithms/local_only.py", LOCAL_ONLY, KTPFL, f"{CONFORMANCE} -k local",
        always_from_the_start=("return remembered(own, start)", "return start"),
        foreign_buffers=('{k: memory[f"model/{k}"] for k in like.buffers}', "like.buffers"),
        remembers_the_start=("return {}, as_memory(end)", "return {}, as_memory(start)"),
        models_uploaded=('"local", upload=False, hold=True', '"local", upload=True, hold=True'),
        not_held=('"local", upload=False, hold=True', '"local", upload=False'),
        lost_clients_keep_too=("engine.fold(got.clients, LocalTask(Keeping()", "engine.fold(cohort, LocalTask(Keeping()"),
        the_servers_model_is_used=("return remembered(memory, state)", "return state"),
    ),
    *_of(
        "algorithms/parts/cluster.py", CFEDFN,
        farthest_merge=("far.argmin()", "far.where(far.isfinite(), -far[0, 0]).argmax()"),
        single_linkage=("(sizes[i] * far[i] + sizes[j] * far[j]) / (sizes[i] + sizes[j])", "torch.where(far[i].isfinite() & far[j].isfinite(), torch.minimum(far[i], far[j]), math.inf)"),
        unweighted_linkage=("(sizes[i] * far[i] + sizes[j] * far[j]) / (sizes[i] + sizes[j])", "(far[i] + far[j]) / 2"),
        sizes_forgotten=("sizes[i] += sizes[j]", "pass"),
        smallest_gap=("heights[left] - heights[left + 1]", "heights[left + 1] - heights[left]"),
        highest_merge_for_gap=("heights[left] - heights[left + 1]", "heights[left]"),
        one_cluster_less=("most = min(clusters, N)", "most = max(1, min(clusters, N) - 1)"),
        names_with_holes=("= found[most].unique(return_inverse=True)[1]", "= found[most]"),
    ),
    *_of(
        "algorithms/cfedfn.py", CFEDFN, f"{CONFORMANCE} -k cfedfn",
        norms_not_averaged=('total["sum"] / total["count"].clamp(min=1)', 'total["sum"]'),
        squared_norms=("out.features.norm(dim=-1) @ hot", "out.features.square().sum(-1) @ hot"),
        signed_features=("out.features.abs().sum(0)", "out.features.sum(0)"),
        share_without_root=("share.sqrt() * norms", "share * norms"),
        share_dropped=("share.sqrt() * norms", "norms"),
        share_of_everybody=("counts / counts.sum(1, keepdim=True)", "counts / counts.sum()"),
        level_dropped=(" / norms[told].mean().clamp(min=1e-12)", ""),
        level_counts_absent_classes=("norms[told].mean()", "norms.mean()"),
        described_on_public_data=('data="private", at=state', 'data="public", at=state'),
        described_by_own_models=(', data="private", at=state', ', data="private"'),
        no_warm_up=("engine.round < self.warmup", "engine.round < 0"),
        longer_warm_up=("engine.round < self.warmup", "engine.round <= self.warmup"),
        clusters_trained_by_everybody=("cohort[cluster[cohort] == k]", "cohort"),
        clusters_of_rows=("cohort[cluster[cohort] == k]", "cohort[cluster[: len(cohort)] == k]"),
        average_uniform=("torch.bincount(cluster, engine.examples.cpu(), len(models)) / engine.examples.sum().cpu()", "torch.full((len(models),), 1 / len(models))"),
        average_by_heads=("torch.bincount(cluster, engine.examples.cpu(), len(models)) / engine.examples.sum().cpu()", "torch.bincount(cluster, None, len(models)) / len(cluster)"),
        average_is_used=('if "cluster" in state.extra else state', 'if "nobody" in state.extra else state'),
        auto_is_always_four=("max(1, min(4, N // 2))", "4"),
        gap_ignored=('gap=self.cut == "gap"', "gap=False"),
    ),
    *_of(
        "algorithms/parts/coefficients.py", KTPFL,
        teachers_by_columns=("return (c @ said.flatten(1))", "return (c.mT @ said.flatten(1))"),
        kl_turned_round=("(teacher.clamp(min=tiny).log() - mine.clamp(min=tiny).log()) @ flat.mT", "(teacher - mine) @ flat.clamp(min=tiny).log().mT"),
        kl_sign=("(teacher.clamp(min=tiny).log() - mine.clamp(min=tiny).log())", "(mine.clamp(min=tiny).log() - teacher.clamp(min=tiny).log())"),
        kl_not_averaged=("@ flat.mT / said.shape[1]", "@ flat.mT"),
        mse_half=("(2 / flat.shape[1]", "(1 / flat.shape[1]"),
        mse_not_averaged=("(2 / flat.shape[1]", "(2"),
        mse_sign=("return (teacher - mine)", "return (mine - teacher)"),
        curvature_not_averaged=(".sum(1, keepdim=True).div(said.shape[1])", ".sum(1, keepdim=True)"),
        curvature_of_the_mean=("(flat - flat.mean(0)).square()", "flat.square()"),
        weights_not_scaled=("flat / flat.square().sum().clamp(min=1e-12).sqrt()", "flat"),
        projection_off_by_one=("excess.gather(-1, count - 1)", "excess.gather(-1, (count - 2).clamp(min=0))"),
        projection_keeps_negatives=(").clamp(min=0)\n\n\ndef projected", ")\n\n\ndef projected"),
        step_up=("c - step * grad", "c + step * grad"),
        no_pull=("pull = 2 * step * rho", "pull = 0.0 * rho"),
        half_the_pull=("pull = 2 * step * rho", "pull = step * rho"),
        released_pull_sign=("grad + 2 * rho / K", "grad - 2 * rho / K"),
        released_pull_not_averaged=("2 * rho / K * (c", "2 * rho * (c"),
        released_step_up=("5 * (c - scale * grad)", "5 * (c + scale * grad)"),
        released_without_five=("(5 * (c - scale * grad)).softmax", "(c - scale * grad).softmax"),
        released_step_not_scaled=("c - scale * grad", "c - grad"),
    ),
    *_of(
        "algorithms/ktpfl.py", KTPFL, f"{CONFORMANCE} -k ktpfl",
        predictions_without_temperature=("soft = (out.logits / self.temperature)", "soft = out.logits"),
        predictions_out_of_order=("index_add(0, batch.index, soft)", "index_add(0, batch.index.flip(0), soft)"),
        student_without_temperature=("said = (out.logits / self.temperature)", "said = out.logits"),
        imitation_sign=("- teacher * said", "+ teacher * said"),
        imitation_unweighted=("return self.lam * batch.mean", "return batch.mean"),
        teacher_of_other_examples=('own["teacher"][batch.index]', 'own["teacher"][: len(batch.index)]'),
        entropy_dropped=("torch.special.xlogy(teacher, teacher) - teacher * said", "-teacher * said"),
        away_from_the_mixture=('(own["teacher"] - start.params)', '(start.params - own["teacher"])'),
        the_whole_way=("params = start.params + self.lam *", "params = start.params + 1.0 *"),
        buffers_stay=("State(params, start.buffers | moved)", "State(params, start.buffers)"),
        share_above_one=("share = min(1.0, self.lam)", "share = self.lam"),
        the_silent_teach=("known.nonzero()[:, 0]", "torch.arange(N)"),
        rows_not_renormalised=("self._moved(rows / among,", "self._moved(rows,"),
        mass_of_the_silent_lost=("= new * among", "= new"),
        own_row_mixed_up=("torch.searchsorted(who, clients)", "torch.searchsorted(who, clients).flip(0)"),
        rules_swapped=('if self.coefficients == "mse":', 'if self.coefficients != "mse":'),
        coefficients_ignore_lam=("self.lam * grad, self.rho", "grad, self.rho"),
        curvature_ignored=("self.step / steep", "self.step"),
        coefficients_stay=("c[clients[:, None], who] = new * among", "pass"),
        old_coefficients_teach=("mixed(new, v[who])", "mixed(rows / among, v[who])"),
        weight_decay_in_imitation=("weight_decay=0.0, ", ""),
        imitates_without_lam=('none = self.exchange == "weights" or not self.lam', 'none = self.exchange == "weights"'),
        imitates_on_private_data=('"imitate", data="distill"', '"imitate", data="private"'),
        statistics_updated=("batchnorm=self.batchnorm", 'batchnorm="updating"'),
    ),
    *_of(
        "data/splits.py", SHARE, RETURNED,
        public_data_is_not_handed_out=("np.sort(np.concatenate(both))", "np.sort(both[0])"),
        only_refinement_data_is_handed_out=("np.unique(np.concatenate(shared))", "np.unique(shared[0])"),
        ranking_data_given_twice=("np.unique(np.concatenate(shared))", "np.sort(np.concatenate(shared))"),
        outside_data_at_wrong_positions=("public = public + len(dataset.train)", "public = public"),
        owners_by_sizes_alone=("np.where(counts.any(0), counts, counts.sum(1, keepdims=True))", "np.where(counts.any(0) & False, counts, counts.sum(1, keepdims=True))"),
        absent_classes_to_the_first=("counts, counts.sum(1, keepdims=True))", "counts, np.ones_like(counts))"),
        owners_are_one_off=("(drawn >= ends)", "(drawn > ends)"),
        owners_always_the_largest=(".integers(0, ends[-1])", ".integers(0, np.minimum(1, ends[-1]))"),
        owners_ignore_the_seed=('numpy_generator(seed, "split", "returned")', 'numpy_generator(0, "split", "returned")'),
        manifest_is_silent=(', "public_to": self.public_to}', "}"),
    ),
    *_of(
        "runs/build.py", SHARE, RETURNED, NEEDED,
        fnr_hides_the_inner_method=('for name in ("inner", "method")]', 'for name in ("method",)]'),
        shared_data_not_in_the_pool=("(splits.private.x, splits.private.y)", "(splits.train.x, splits.train.y)"),
        fixed_noise_allowed=('splits.public_to == "everybody" and partition.noise', 'splits.public_to == "" and partition.noise'),
        no_notice_under_fnr=('config.fnr is not None and splits.public_to != "nobody"', "False"),
        adam_allowed=('"linear-optimiser" in algorithm.needs and', "False and"),
        batchnorm_not_asked_for=('"batchnorm" in algorithm.needs and', "False and"),
        head_not_asked_for=('"head" in algorithm.needs and', "False and"),
        distill_not_asked_for=('"distill" in algorithm.needs and', "False and"),
        public_labels_not_asked_for=('"public-labels" in algorithm.needs and', "False and"),
        features_not_asked_for=('"features" in algorithm.needs and', "False and"),
    ),
    *_of(
        "algorithms/public_share.py", SHARE,
        shares_with_owners=('"everybody"', '"owners"'),
        shares_with_nobody=('"everybody"', '"nobody"'),
    ),
    *_of(
        "algorithms/public_returned.py", RETURNED,
        returned_to_everybody=('"owners"', '"everybody"'),
        returned_to_nobody=('"owners"', '"nobody"'),
    ),
    *_of(
        "engines/base.py", SLOW,
        everybody_is_slow=("order[:count]", "order"),
        the_first_are_slow=("cohort.sort().values[order[:count]]", "cohort.sort().values[:count]"),
        order_of_the_cohort_matters=("cohort.sort().values[order[:count]]", "cohort[order[:count]]"),
        slow_and_lost_are_the_same=('self.dropout, "dropout")', "self.dropout)"),
        the_same_every_round=("generator=generator(self.seed, self.round, what)", "generator=generator(self.seed, what)"),
        a_straggler_may_do_nothing=("torch.randint(1, epochs,", "torch.randint(0, epochs,"),
        a_straggler_may_do_all=("torch.randint(1, epochs,", "torch.randint(1, epochs + 1,"),
        all_stragglers_alike=('generator(self.seed, self.round, client, "straggler")', 'generator(self.seed, self.round, "straggler")'),
        refinement_is_cut_short=('if task.purpose != "local" or client not in self.slow or epochs < 2:', "if client not in self.slow or epochs < 2:"),
        travel_of_all_epochs=("new_tensor([travel[n] for n in steps])", "new_tensor([travel[max(steps)] for n in steps])"),
        lost_clients_answer=("good = [m for m in good if job.clients[m] not in self.lost]", "pass"),
        lost_clients_remember=("self.store.renewed(clients, names)", "self.store.renewed(job.clients, kept)"),
        stragglers_not_noted=('(("stragglers", self.slow), ("dropped", self.lost))', '(("dropped", self.lost),)'),
        dropped_not_noted=('(("stragglers", self.slow), ("dropped", self.lost))', '(("stragglers", self.slow),)'),
    ),
    *_of(
        "config/registry.py", LISTED,
        needs_not_inherited=("if \"needs\" in said else base.needs", "if \"needs\" in said else frozenset()"),
        traffic_not_inherited=("if \"traffic\" in said else base.traffic", "if \"traffic\" in said else Declared().traffic"),
        fields_not_inherited=("base.fields | own", "own"),
    ),
]  # fmt: skip


def _warm() -> None:
    """Import what every run of the tests needs, but not the package: the children inherit it."""
    import _hypothesis_pytestplugin  # noqa: F401
    import hypothesis.strategies  # noqa: F401
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch
    from torch.func import grad, vmap
    from torch.fx.experimental.proxy_tensor import make_fx

    torch.set_num_threads(1)  # a child inherits no threads, and would wait for them
    make_fx(vmap(grad(torch.sum)))(torch.zeros(1, 1))


def _tested(tests: str, folder: str, out: Path) -> int:
    """Run some tests against the package in a folder, in a child of this process; its exit code, -1 after LIMIT."""
    import pytest

    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(LIMIT)
            os.chdir(ROOT)
            os.environ["PYTHONPATH"] = folder
            sys.path[:0] = [folder, str(ROOT)]
            with out.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            code = int(pytest.main(["-xqm", "not slow", "-p", "no:cacheprovider", *shlex.split(tests)]))
            sys.stdout.flush()
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    return -1 if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else os.waitstatus_to_exitcode(status)


def verdict(mutant: Mutant) -> tuple[Mutant, str | None]:
    """The test that noticed, or None."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        package, out = Path(folder) / "fnrfl", Path(folder) / "out"
        shutil.copytree(ROOT / "src" / "fnrfl", package, ignore=shutil.ignore_patterns("__pycache__"))
        target = package / mutant.file
        text = target.read_text()
        if text.count(mutant.old) == 0:
            raise ValueError(f"{mutant.name}: {mutant.old!r} is not in {mutant.file}; bring the list up to date.")
        target.write_text(text.replace(mutant.old, mutant.new))
        for tests in mutant.tests:
            code = _tested(tests, folder, out)
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", out.read_text(), re.MULTILINE)
            if failed:
                return mutant, failed.group(1)
            if code == -1:
                return mutant, f"{tests} (does not end)"
            if code:
                raise ValueError(f"{mutant.name}: pytest could not run.\n{out.read_text()}")
    return mutant, None


def main(words: list[str]) -> int:
    """Try them all, one on each core."""
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    killed = 0
    _warm()
    with multiprocessing.get_context("fork").Pool() as pool:
        for mutant, test in pool.imap(verdict, chosen):
            killed += test is not None
            print(f"{'killed  ' if test else 'SURVIVED'}  {mutant.name:45}  {test or ''}", flush=True)
    print(f"{killed} of {len(chosen)} mutants killed")
    return killed != len(chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
