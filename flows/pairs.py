"""The rows of a comparison: pairs of a strategy and a loop, with the same data, seeds, epochs and global batch.

This module imports neither Prefect nor a framework, so errors in a comparison's arguments appear at once.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from tasks import config
from tasks.operations import preconditions
from tasks.records import ComparisonRow, PreparedDataset, Run
from tasks.runs import lineage, resume
from tasks.strategies import engines
from tasks.system.errors import UserError, one_of
from tasks.system.machine import usable_cores

LOOPS: tuple[str, ...] = get_args(config.Train.model_fields["loop"].annotation)
TRACED_STEPS = 30
"""Steps traced after each training, to show where a step's time goes."""


@dataclass(frozen=True)
class Pair:
    """A row of a comparison before its training."""

    strategy: str
    loop: str | None
    settings: config.Settings | None = None
    reason: str | None = None
    """Why the pair cannot be trained, if it has no settings."""

    def in_round(self, number: int) -> "Pair":
        """Return the pair with a round's seed, from ``train.seed`` on, so that rounds show the effect of the seed."""
        if self.settings is None:
            return self
        train = self.settings.train
        train = train.model_copy(update={"seed": (train.seed + number - 1) % 2**31})
        return replace(self, settings=self.settings.model_copy(update={"train": train}))


@dataclass(frozen=True)
class ComparisonPlan:
    """What a comparison trains."""

    asked: tuple[Sequence[str], Sequence[str], config.Recipe, Mapping[str, Any]]
    """The arguments of ``plan``."""
    pairs: tuple[Pair, ...]
    left_out: tuple[str, ...]
    """Pairs that do not exist, for strategies with another row."""
    shared: config.Settings
    """The settings of all rows, except strategy, loop and the division of the batch."""
    unfinished: Run | None = None
    """The comparison that continues; None starts a new one."""
    note: str | None = None
    """Why an unfinished comparison does not continue."""

    @property
    def trainable(self) -> list[config.Settings]:
        """The settings of the rows that can be trained."""
        return [pair.settings for pair in self.pairs if pair.settings is not None]

    @property
    def key(self) -> str:
        """The key of comparisons of the same rows on the same number of cores."""
        rows = [(pair.strategy, pair.loop, pair.settings and pair.settings.to_json()) for pair in self.pairs]
        told = json.dumps([rows, usable_cores()], sort_keys=True)
        return f"comparison-{hashlib.sha256(told.encode()).hexdigest()[:16]}"

    def on(self, prepared: PreparedDataset, fresh: bool) -> "ComparisonPlan":
        """Return the plan for prepared data, with the settings that follow the data and, unless ``fresh``, the
        unfinished comparison to continue."""
        fitted = plan(*self.asked, prepared)
        if fresh:
            return fitted
        wanted = lineage.collect(fitted.trainable[0], prepared.data_version)
        unfinished, note = resume.find_unfinished_comparison(self.key, prepared.name, wanted)
        return replace(fitted, unfinished=unfinished, note=note)


def plan(
    strategies: Sequence[str],
    loops: Sequence[str],
    recipe: config.Recipe,
    overrides: Mapping[str, Any],
    prepared: PreparedDataset | None = None,
) -> ComparisonPlan:
    """Return every pair with the same data, seeds, epochs and global batch.

    A batch size per replica counts as the global one, so more replicas have smaller parts of it.

    Args:
        strategies: kinds; one that this machine cannot train becomes a pair with its reason.
        loops: a loop that a strategy does not support is skipped if the strategy supports another one.
        recipe: a name in recipes/ or a path; it overrides params.yaml.
        overrides: ``{"train.epochs": 3}``. ``strategy.devices`` applies to each strategy that has this key,
            ``strategy.mirrored.devices`` to one.
        prepared: the data, which determine the settings that are not given.

    Raises:
        UserError: unknown strategy, loop or key; settings that are wrong for every strategy; only one row; or
            nothing to train.
    """
    kinds = _chosen("strategy", strategies, config.strategy_kinds())
    chosen_loops = _chosen("loop", loops, LOOPS)
    common, own = _split(overrides, kinds)
    alone = {**common, "strategy.kind": "one_device", "train.loop": "fit"}
    shared = config.load(recipe, alone, prepared=prepared)
    base = shared.train
    common = {key: value for key, value in common.items() if key.removeprefix("train.") not in config.BATCH_SIZES}
    common["train.global_batch_size"] = base.global_batch_size or base.per_replica_batch_size
    if "train.traced_steps" not in common and base.traced_steps is None:
        common["train.traced_steps"] = TRACED_STEPS
    pairs: list[Pair] = []
    left_out = []
    for kind in kinds:
        offered = config.strategy_kinds()[kind].loops
        only = f"its only loop is {' and '.join(offered)}"
        driving = [loop for loop in chosen_loops if loop in offered]
        if driving:
            left_out += [f"{kind} with {loop}: {only}" for loop in chosen_loops if loop not in offered]
        else:
            pairs.append(Pair(kind, None, reason=f"{only}: use --loops {','.join([*chosen_loops, *offered])}"))
        of_kind = {**common, **own[kind], "strategy.kind": kind}
        pairs += [_pair(recipe, {**of_kind, "train.loop": loop}, prepared) for loop in driving]
    if len(pairs) == 1:
        others = ", ".join(kind for kind in config.strategy_kinds() if kind != pairs[0].strategy)
        raise UserError(
            f"--strategies {pairs[0].strategy} --loops {','.join(chosen_loops)} is only one row, so there is "
            f"nothing to compare: add another strategy ({others}) or loop, or train it with `stratagem run`"
        )
    asked = (strategies, loops, recipe, overrides)
    planned = ComparisonPlan(asked, tuple(pairs), tuple(left_out), shared)
    if not planned.trainable:
        raise UserError(f"none of these rows can be trained here. {'; '.join(map(explain, pairs))}")
    return planned


def explain(one: Pair | ComparisonRow) -> str:
    """Return one line with the pair or row, and why it failed."""
    return f"{one.strategy}{f', {one.loop}' if one.loop else ''}: {one.reason}"


def _chosen(what: str, names: Sequence[str], allowed: Mapping[str, object] | Sequence[str]) -> list[str]:
    chosen = list(dict.fromkeys(name.strip() for name in names if name.strip()))
    for name in chosen:
        if name not in allowed:
            raise UserError(one_of(what, name, allowed))
    if not chosen:
        raise UserError(f"no {what} is given: choose one or more of {', '.join(allowed)}, separated by commas")
    return chosen


def _split(overrides: Mapping[str, Any], kinds: Sequence[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the settings of all strategies, and those of each one; refuse keys with their own options."""
    known = {kind: section.model_fields.keys() - {"kind"} for kind, section in config.strategy_kinds().items()}
    common: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    # A setting of one strategy overrides that of all, in whatever order they are given.
    for key, value in sorted(overrides.items(), key=lambda item: item[0].count(".")):
        if key in ("strategy", "strategy.kind"):
            raise UserError(f"--set {key}: a comparison takes its strategies from --strategies")
        if key == "train.loop":
            raise UserError("--set train.loop: a comparison takes its loops from --loops")
        if not key.startswith("strategy."):
            common[key] = value
            continue
        name = key.removeprefix("strategy.")
        first, _, rest = name.partition(".")
        meant, name = ([first], rest) if first in known else (kinds, name)
        if not set(meant) <= set(kinds):
            raise UserError(f"--set {key}: {first} is not compared; --strategies has {', '.join(kinds)}")
        having = [kind for kind in known if name.partition(".")[0] in known[kind]]
        receivers = [kind for kind in meant if kind in having]
        if not receivers and having and first not in known:
            raise UserError(f"--set {key}: none of {', '.join(kinds)} has this key; it belongs to {', '.join(having)}")
        if not receivers:
            prefix = f"strategy.{first}." if first in known else "strategy."
            allowed = [f"{prefix}{other}" for kind in meant for other in known[kind]]
            raise UserError(one_of("key", key, dict.fromkeys(allowed)))
        for kind in receivers:
            own[kind][f"strategy.{name}"] = value
    return common, own


def _pair(recipe: config.Recipe, values: Mapping[str, Any], prepared: PreparedDataset | None) -> Pair:
    """Return one pair; an error in its settings or devices becomes its reason."""
    kind, loop = values["strategy.kind"], values["train.loop"]
    try:
        settings = config.load(recipe, values, prepared=prepared)
        # The other members of the cluster would wait for a single training.
        if engines.is_foreign(settings.strategy.cluster):
            raise UserError(
                "a comparison starts its processes itself, and this cluster was started by someone else: use "
                "--set strategy.launcher=local"
            )
        preconditions.check_settings(settings)
    except UserError as error:
        return Pair(kind, loop, reason=str(error))
    return Pair(kind, loop, settings)
