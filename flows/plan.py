"""What a comparison will train: each strategy under each loop that drives it, with its settings or why it cannot be;
and what makes a sweep the same one.

Nothing here is heavy: what is wrong with a command is printed before Prefect or a framework is imported.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from tasks import config, sweeps
from tasks.operations import pipeline, preconditions
from tasks.records import ComparisonRow, PreparedDataset, SweepPlan
from tasks.system.errors import UserError, one_of
from tasks.system.machine import usable_cores

LOOPS: tuple[str, ...] = get_args(config.Train.model_fields["loop"].annotation)
TRACED_STEPS = 30
"""After each training, to say where a step's time goes."""


@dataclass(frozen=True)
class Pair:
    """One row to be."""

    strategy: str
    loop: str | None
    settings: config.Settings | None = None
    reason: str | None = None
    """Why there are no settings to train with."""


@dataclass(frozen=True)
class Plan:
    pairs: tuple[Pair, ...]
    left_out: tuple[str, ...]
    """Pairs that do not exist, of strategies that have another row."""
    shared: config.Settings
    """What all rows have but for their strategy, their loop and how their batch is divided."""

    @property
    def trainable(self) -> list[config.Settings]:
        """The settings of the rows that can be trained."""
        return [pair.settings for pair in self.pairs if pair.settings is not None]

    @property
    def rows(self) -> dict[str, config.Settings | str]:
        """The settings of each row, or why it has none, by a name for a person."""
        named = {", ".join(part for part in (pair.strategy, pair.loop) if part): pair for pair in self.pairs}
        return {name: pair.settings or pair.reason or "" for name, pair in named.items()}

    @property
    def key(self) -> str:
        """What two comparisons have in common that would measure the same rows on as many cores."""
        rows = [(pair.strategy, pair.loop, pair.settings and pair.settings.to_json()) for pair in self.pairs]
        told = json.dumps([rows, usable_cores()], sort_keys=True)
        return f"comparison-{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def plan(
    strategies: Sequence[str],
    loops: Sequence[str],
    recipe: str | None,
    overrides: Mapping[str, Any],
    prepared: PreparedDataset | None = None,
) -> Plan:
    """Return every pair with the same data, seed, epochs and global batch.

    A batch size for each replica counts as the global one: with more replicas each takes less.

    Args:
        strategies: kinds; one that cannot be trained here is a pair with its reason.
        loops: a loop that does not drive a strategy is left out, as long as another one does.
        recipe: a name in recipes/ or a path, laid over params.yaml.
        overrides: ``{"train.epochs": 3}``. ``strategy.devices`` goes to each strategy that has this key,
            ``strategy.mirrored.devices`` to one.
        prepared: the data, by which settings that nobody gives are chosen.

    Raises:
        UserError: unknown strategy, loop or key; settings that are wrong whatever the strategy; one row alone; or
            nothing to train.
    """
    kinds = _chosen("strategy", strategies, config.strategy_kinds())
    loops = _chosen("loop", loops, LOOPS)
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
        driving = [loop for loop in loops if loop in offered]
        if driving:
            left_out += [f"{kind} with {loop}: {only}" for loop in loops if loop not in offered]
        else:
            pairs.append(Pair(kind, None, reason=f"{only}: give --loops {','.join([*loops, *offered])}"))
        of_kind = {**common, **own[kind], "strategy.kind": kind}
        pairs += [_pair(recipe, {**of_kind, "train.loop": loop}, prepared) for loop in driving]
    if len(pairs) == 1:
        others = ", ".join(kind for kind in config.strategy_kinds() if kind != pairs[0].strategy)
        raise UserError(
            f"--strategies {pairs[0].strategy} --loops {','.join(loops)} is one row, which is held against nothing: "
            f"name another strategy ({others}) or another loop too, or train it alone with `stratagem run`"
        )
    planned = Plan(tuple(pairs), tuple(left_out), shared)
    if not planned.trainable:
        raise UserError(f"nothing can be compared here. {'; '.join(map(explain, pairs))}")
    return planned


def explain(one: Pair | ComparisonRow) -> str:
    """Return one line: which pair or row it is, and why it did not work."""
    return f"{one.strategy}{f', {one.loop}' if one.loop else ''}: {one.reason}"


def _chosen(what: str, names: Sequence[str], allowed: Mapping[str, object] | Sequence[str]) -> list[str]:
    chosen = list(dict.fromkeys(name.strip() for name in names if name.strip()))
    for name in chosen:
        if name not in allowed:
            raise UserError(one_of(what, name, allowed))
    if not chosen:
        raise UserError(f"no {what} is named: give one or more of {', '.join(allowed)}, with commas between them")
    return chosen


def _split(overrides: Mapping[str, Any], kinds: Sequence[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the settings that all share, and those of each strategy.

    Raises:
        UserError: a key that belongs to an option of the command, or to none of the strategies.
    """
    common: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    # What is for one strategy comes after what is for all, however they were given.
    for key, value in sorted(overrides.items(), key=lambda item: item[0].count(".")):
        if key in ("strategy", "strategy.kind"):
            raise UserError(f"--set {key}: a comparison takes its strategies from --strategies")
        if key == "train.loop":
            raise UserError("--set train.loop: a comparison takes its loops from --loops")
        if not key.startswith("strategy."):
            common[key] = value
            continue
        for kind, name in _receivers(key.removeprefix("strategy."), kinds):
            own[kind][f"strategy.{name}"] = value
    return common, own


def _receivers(key: str, kinds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each of the strategies that a key is meant for, with the key's own name."""
    known = {kind: section.model_fields.keys() - {"kind"} for kind, section in config.strategy_kinds().items()}
    first, _, rest = key.partition(".")
    meant, name = ([first], rest) if first in known else (list(kinds), key)
    if not set(meant) <= set(kinds):
        raise UserError(f"--set strategy.{key}: {first} is not compared; --strategies has {', '.join(kinds)}")
    found = [kind for kind in meant if name.partition(".")[0] in known[kind]]
    if not found:
        others = [kind for kind in known if name.partition(".")[0] in known[kind]]
        if others and first not in known:
            raise UserError(
                f"--set strategy.{key}: none of {', '.join(kinds)} has this key; it belongs to {', '.join(others)}"
            )
        prefix = f"strategy.{first}." if first in known else "strategy."
        allowed = [f"{prefix}{other}" for kind in meant for other in known[kind]]
        raise UserError(one_of("key", f"strategy.{key}", dict.fromkeys(allowed)))
    yield from ((kind, name) for kind in found)


def _pair(recipe: str | None, values: Mapping[str, Any], prepared: PreparedDataset | None) -> Pair:
    """Return one pair; what is wrong with its settings or its devices becomes its reason."""
    kind, loop = values["strategy.kind"], values["train.loop"]
    try:
        settings = config.load(recipe, values, prepared=prepared)
        _refuse_foreign_cluster(settings)
        preconditions.check_devices(settings)
    except UserError as error:
        return Pair(kind, loop, reason=str(error))
    return Pair(kind, loop, settings)


def _refuse_foreign_cluster(settings: config.Settings) -> None:
    # The cluster's other members would wait for a training that they were never told of, and so would this process.
    if pipeline.in_foreign_cluster(settings):
        raise UserError(
            "a comparison starts its processes itself, and this cluster was started by someone else: give "
            "--set strategy.launcher=local"
        )


def plan_of_sweep(space: sweeps.Space, parallel: int) -> SweepPlan:
    """Return what makes a sweep the same one.

    Raises:
        UserError: nobody says which values of the metric are better.
    """
    direction = space.file.direction
    if direction is None and ":" in space.metric:
        raise UserError(
            f"{space.path}: metric = '{space.metric}' is your own: give `direction: lower` or `direction: higher`"
        )
    lower = pipeline.lower_is_better(space.metric) if direction is None else direction == "lower"
    return SweepPlan(
        name=space.name,
        space=space.file.model_dump(mode="json"),
        metric=space.metric,
        lower_is_better=lower,
        parallel=parallel,
        sampler=sweeps.SAMPLER,
    )
