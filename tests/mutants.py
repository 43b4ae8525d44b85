"""Break every equation on purpose: a named test must fail for each mutant.

    python tests/mutants.py [WORD ...]      # only mutants whose name contains a word

A mutant is a copy of the package in which one piece of text is replaced. The tests that guard the equation are run
against the copy, and the first one that fails is printed. A mutant that no test notices survives, and the exit code is 1.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FEDAVG, FEDPROX, SCAFFOLD, MOON, FEDNOVA, FNR = (
    f"tests/test_oracles_{name}.py" for name in ("fedavg", "fedprox", "scaffold", "moon", "fednova", "fnr")
)
ENGINES, CONFORMANCE, FAST = "tests/test_engines.py", "tests/test_conformance.py", "tests/test_fast.py"
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
        uniform_weights_by_examples=("torch.ones_like(chunk.examples) if uniform else", "chunk.examples if uniform else"),
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
        any_record_will_do=("if _repeats(program, same, now, stepped):", "if True:"),
        one_tensor_for_two=("return [t.clone() for t in tensors]", "return list(tensors)"),
        only_one_step=("for s in range(b0.size(0)):", "for s in range(1):"),
    ),
    *_of(
        "engines/batched.py", FAST, CONFORMANCE,
        finished_clients_go_on=("if steps[i] == last:", "if last == max(steps):"),
        group_shrinks_too_far=("next(w for w in halves(width) if w >= live)", "next(w for w in halves(width) if 2 * w >= live)"),
        nobody_waits_for_the_size=("plan.sizes[at[m]], [])", "plan.sizes[0], [])"),
        held_models_mixed_up=("groups = [clients[i : i + ROWS]", "groups = [clients[::-1][i : i + ROWS]"),
    ),
    *_of(
        "engines/base.py", FAST, ENGINES,
        idle_rows_draw=("noise = [self.draws[m](*positions[0].shape) for m in at]", "noise = [self.draws[m](*positions[0].shape) for m in [*at, *list(at)[:1] * idle]]"),
        transform_of_another_client=("for i, m in enumerate(at):", "for i, m in enumerate(reversed(at)):"),
        rate_of_the_first_round=("torch.tensor(training.lr, dtype", "torch.tensor(self._training.lr, dtype"),
    ),
    *_of(
        "core/net.py", FAST,
        weights_not_put_back=("part.view(out, height, width, into).permute(0, 3, 1, 2)", "part.view(out, into, height, width)"),
        packed_in_the_old_order=("v.permute(0, 2, 3, 1) if self.channels_last and v.ndim == 4 else v", "v"),
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
        dropout_not_scaled=("(1 / (1 - self.p) if", "(1.0 if"),
        threads_share_a_module=("other.module = copy.deepcopy(self.module)", "pass"),
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
        refinement_at_local_rate=('lr=client.lr if fnr.lr == "client" else fnr.lr', "lr=client.lr"),
        refinement_epochs=("epochs=fnr.epochs", "epochs=1"),
        no_norm_pass=("if fnr.norm_pass_train_mode:\n", "if False:\n"),
        local_targets_forgotten=('{"fnr.target": refining.norms.mean(0)}', '{"fnr.target": 0 * refining.norms.mean(0)}'),
    ),
]  # fmt: skip


def verdict(mutant: Mutant) -> tuple[Mutant, str | None]:
    """The test that noticed, or None."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        package = Path(folder) / "fnrfl"
        shutil.copytree(ROOT / "src" / "fnrfl", package, ignore=shutil.ignore_patterns("__pycache__"))
        target = package / mutant.file
        text = target.read_text()
        if text.count(mutant.old) == 0:
            raise SystemExit(f"{mutant.name}: {mutant.old!r} is not in {mutant.file}; bring the list up to date.")
        target.write_text(text.replace(mutant.old, mutant.new))
        for tests in mutant.tests:
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-xqm",
                "not slow",
                "-p",
                "no:cacheprovider",
                *shlex.split(tests),
            ]
            done = subprocess.run(
                command, cwd=ROOT, env={"PYTHONPATH": folder, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
            )
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            if failed:
                return mutant, failed.group(1)
            if done.returncode:
                raise SystemExit(f"{mutant.name}: pytest could not run.\n{done.stdout}{done.stderr}")
    return mutant, None


def main(words: list[str]) -> int:
    """Try them all, two at a time."""
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    killed = 0
    with ThreadPoolExecutor(2) as pool:
        for mutant, test in pool.map(verdict, chosen):
            killed += test is not None
            print(f"{'killed  ' if test else 'SURVIVED'}  {mutant.name:45}  {test or ''}", flush=True)
    print(f"{killed} of {len(chosen)} mutants killed")
    return killed != len(chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
