"""Which points there are: variants, the grid's product and draws from the space, each with a readable unique name.

Nothing is cut silently: what is asked for and not planned is a Skipped with its reason.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.config import Experiment, TrialSpec, flatten, point_builder
from orchestrator.engines import find_engine
from orchestrator.errors import ConfigError

# The names the field uses for long keys; any other key is shown by its last part.
SHORT_NAMES = {"num_speculative_tokens": "k"}
ONE_POINT = "base"
_UNSAFE = re.compile(r"[^A-Za-z0-9._=,+-]+")
_MAX_NAME = 80
_RANGE_KEYS = {"low", "high", "step", "log", "choices", "when"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A point that is asked for and not started, and why. `witness` names the trial that proves it."""

    name: str
    reason: str
    witness: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What would be run, in order, and what would not."""

    points: tuple[TrialSpec, ...]
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One key of the space: `choices`, or numbers from low to high (integers when both ends are).

    `when` holds key -> allowed values; the dimension is drawn only where every key has one of them, and the value
    null stands for "not set".
    """

    key: str
    choices: tuple[Any, ...] | None = None
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False
    when: Mapping[str, tuple[Any, ...]] | None = None

    @property
    def integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


def plan(experiment: Experiment) -> Plan:
    """Variants, then the grid or (sampler random) the draws. With tpe the sampler adds its own: see `draw`.

    Raises ConfigError on a key or value that no trial can have. The last plan is kept: a command checks, shows and
    starts the same one.
    """
    if _last and _last[0][0] == experiment:
        return _last[0][1]
    planned = _plan(experiment)
    _last[:] = [(experiment, planned)]
    return planned


_last: list[tuple[Experiment, Plan]] = []


def _plan(experiment: Experiment) -> Plan:
    search = experiment.search
    named = [(name, dict(params)) for name, params in search.variants.items()]
    skipped: list[Skipped] = []
    if search.sampler == "grid":
        if search.space:
            raise ConfigError("search.space: needs sampler random or tpe; with sampler grid write search.grid")
        named += [(point_name(params), params) for params in _product(search.grid)]
    elif search.sampler == "random":
        drawn, missing = _random_points(experiment)
        named += [(point_name(params), params) for params in drawn]
        if missing:
            reason = f"{search.num_samples} samples asked for, no more than {len(drawn)} different points were found"
            skipped.append(Skipped(name=f"{missing} samples", reason=reason))
    if not named and search.sampler != "tpe":
        named = [(ONE_POINT, {})]
    return _without_duplicates(experiment, named, skipped)


def points(experiment: Experiment) -> tuple[list[TrialSpec], list[tuple[str, str]]]:
    """The trials of an experiment as they are written, and (name, reason) of every point that was left out."""
    planned = plan(experiment)
    return list(planned.points), [(skipped.name, skipped.reason) for skipped in planned.skipped]


def point_name(params: Mapping[str, Any]) -> str:
    """A name such as `k=6,max-num-seqs=4`: the last parts of the keys, as many as are needed to distinguish them."""
    labels = _labels(list(params))
    text = ",".join(f"{labels[key]}={_value_text(value)}" for key, value in params.items())
    return _UNSAFE.sub("_", text)[:_MAX_NAME] or ONE_POINT


def dimensions(experiment: Experiment) -> tuple[Dimension, ...]:
    """The space a sampler draws from: search.space, and search.grid as choices. Raises ConfigError."""
    search = experiment.search
    grid = [Dimension(key=key, choices=tuple(values)) for key, values in search.grid.items()]
    return (*grid, *(_dimension(key, body) for key, body in search.space.items()))


def draw(experiment: Experiment, suggest: Callable[[Dimension], Any]) -> dict[str, Any]:
    """One point: `suggest` is asked for every dimension whose condition holds, in the order they are written."""
    flat = flatten({"engine": asdict(experiment.engine), "placement": asdict(experiment.placement)})
    params: dict[str, Any] = {}
    for dimension in dimensions(experiment):
        if all(flat.get(key) in allowed for key, allowed in (dimension.when or {}).items()):
            params[dimension.key] = suggest(dimension)
            _assign(flat, dimension.key, params[dimension.key])
    return params


def configuration_id(spec: TrialSpec) -> str:
    """The same for two points exactly when they start and measure the same thing, whatever they are called."""
    return spec.with_key().key


def check_engines(experiment: Experiment) -> None:
    """Raise ConfigError on an engine.kind that there is no engine for: the experiment's own, or one of its search."""
    key, search = "engine.kind", experiment.search
    kinds = [experiment.engine.kind, *(flatten(params).get(key) for params in search.variants.values())]
    kinds += search.grid.get(key, [])
    kinds += (_dimension(key, search.space[key]).choices or ()) if key in search.space else ()
    for kind in kinds:
        if kind is not None:
            find_engine(str(kind))


def swept_keys(experiment: Experiment) -> set[str]:
    """Every key that may differ between the trials of an experiment."""
    search = experiment.search
    return {*search.grid, *search.space, *(key for params in search.variants.values() for key in params)}


def _product(grid: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    if not grid:
        return []
    for key, values in grid.items():
        if not values:
            raise ConfigError(f"search.grid.{key}: the list is empty, at least one value is needed")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _random_points(experiment: Experiment) -> tuple[list[dict[str, Any]], int]:
    """(different points, how many of num_samples could not be found); bounded, the same for the same seed."""
    wanted = experiment.search.num_samples
    generator = random.Random(experiment.search.seed)
    seen: dict[str, dict[str, Any]] = {}
    for _ in range(50 * wanted):
        if len(seen) == wanted:
            break
        params = draw(experiment, lambda dimension: _suggest(generator, dimension))
        seen.setdefault(json.dumps(params, sort_keys=True, default=str), params)
    return list(seen.values()), wanted - len(seen)


def _suggest(generator: random.Random, dimension: Dimension) -> Any:
    if dimension.choices is not None:
        return generator.choice(dimension.choices)
    if dimension.log:
        drawn = dimension.low * (dimension.high / dimension.low) ** generator.random()
        return round(drawn) if dimension.integer else drawn
    if dimension.step is not None or dimension.integer:
        step = dimension.step or 1
        return dimension.low + step * generator.randint(0, int((dimension.high - dimension.low) / step + 1e-9))
    return generator.uniform(dimension.low, dimension.high)


def _dimension(key: str, body: Any) -> Dimension:
    """Read one entry of search.space: a list of choices, or a mapping with low and high (or choices)."""
    where = f"search.space.{key}"
    if isinstance(body, list):
        body = {"choices": body}
    if not isinstance(body, dict) or not _RANGE_KEYS.issuperset(body) or not ({"choices"} & set(body) or "low" in body):
        raise ConfigError(
            f"{where}: found {body!r}, allowed is a list of choices or {{low, high, step, log, when}} of numbers"
        )
    when = {name: tuple(v if isinstance(v, list) else [v]) for name, v in (body.get("when") or {}).items()}
    if "choices" in body:
        if not body["choices"]:
            raise ConfigError(f"{where}: the list of choices is empty")
        return Dimension(key=key, choices=tuple(body["choices"]), when=when or None)
    numbers = [body["low"], body.get("high")]
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        raise ConfigError(f"{where}: low and high must be numbers, found {numbers[0]!r} and {numbers[1]!r}")
    low, high = numbers
    if low > high or (body.get("log") and (low <= 0 or body.get("step") is not None)):
        raise ConfigError(f"{where}: found {body!r}, allowed is low <= high; with log, low above 0 and no step")
    return Dimension(key=key, low=low, high=high, step=body.get("step"), log=bool(body.get("log")), when=when or None)


def _without_duplicates(
    experiment: Experiment, named: list[tuple[str, dict[str, Any]]], skipped: list[Skipped]
) -> Plan:
    chosen: dict[str, TrialSpec] = {}
    names: set[str] = set()
    build = point_builder(experiment)
    for name, params in named:
        spec = build(name, params)
        identity = configuration_id(spec)
        twin = chosen.get(identity)
        if twin is not None:
            skipped.append(Skipped(name=name, reason=f"the same configuration as {twin.name}", witness=twin.name))
            continue
        unique, again = name, 2
        while unique in names:
            unique, again = f"{name}~{again}", again + 1
        names.add(unique)
        chosen[identity] = replace(spec, name=unique)
    return Plan(points=tuple(chosen.values()), skipped=tuple(skipped))


def _labels(keys: list[str]) -> dict[str, str]:
    """The shortest tail of every dotted key that no other key shares."""
    labels: dict[str, str] = {}
    for key in keys:
        parts = key.split(".")
        for size in range(1, len(parts) + 1):
            tail = parts[-size:]
            if sum(other.split(".")[-size:] == tail for other in keys) == 1:
                break
        labels[key] = SHORT_NAMES.get(tail[0], tail[0]) if len(tail) == 1 else ".".join(tail)
    return labels


def _value_text(value: Any) -> str:
    if isinstance(value, dict):
        return "+".join(f"{SHORT_NAMES.get(key, key)}={_value_text(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return "+".join(map(_value_text, value))
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return str(value).rstrip("/").rsplit("/", 1)[-1]


def _assign(flat: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key as the configuration would: a mapping merges, anything else replaces what was below it."""
    if isinstance(value, dict):
        flat.pop(key, None)
        flat.update(flatten(value, f"{key}."))
        return
    for below in [name for name in flat if name.startswith(f"{key}.")]:
        del flat[below]
    flat[key] = value
