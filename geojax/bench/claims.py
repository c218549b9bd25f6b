# SPDX-License-Identifier: Apache-2.0
"""What was published of the three methods, and what each claim comes to in figures of our own.

A claim names the part of `geojax bench paper` whose figures it reads. What is found is compared by
one rule for all: a bound is reproduced where our figure keeps it with all of its spread, a value
where it is within a tenth. Nothing here holds a figure of ours. Published figures are those of the
abstracts and of public notes on the papers; units are in the forms.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from geojax.bench.cona_tables import LATE, LEAST_GAIN, MOST_OVER_ORACLE
from geojax.bench.geomesh import PUBLISHED_HOURS
from geojax.simulate.tables import ABOUT, PUBLISHED_IDLE, PUBLISHED_TO_TARGET

Relation = Literal["at least", "at most", "about"]


@dataclass(frozen=True)
class Figure:
    """A figure of ours, and its spread where there is one."""

    value: float
    low: float | None = None
    high: float | None = None
    basis: str = ""
    """What it was made from, and so what the spread is over."""


@dataclass(frozen=True)
class Claim:
    """One figure that was published."""

    method: Literal["GeoMesh", "CONA", "BiCache"]
    text: str
    relation: Relation
    published: float
    form: str
    """Of both figures, for `format`."""
    part: str = ""
    """Of `geojax bench paper`; empty: it cannot be tested here."""
    find: Callable[[Any], Figure | None] | None = None
    """The figure, from what that part wrote; None where it is not in it."""
    note: str = ""
    """What differs from the published setting, or why it is not tested."""
    missed: str = ""
    """Why, where it is not reproduced."""

    def verdict(self, figure: Figure) -> str:
        """A bound is judged by that end of the spread which is nearer to breaking it."""
        low = figure.value if figure.low is None else figure.low
        high = figure.value if figure.high is None else figure.high
        kept = {
            "at least": low >= self.published,
            "at most": high <= self.published,
            "about": abs(figure.value / self.published - 1) <= ABOUT,
        }[self.relation]
        return "reproduced" if kept else "not reproduced"

    def show(self, value: float) -> str:
        return format(value, self.form)


def _of_seeds(values: Iterable[float]) -> Figure | None:
    """Their mean, least and most."""
    found = list(values)
    if not found:
        return None
    if len(found) == 1:
        return Figure(found[0], basis="one seed")
    return Figure(
        statistics.mean(found), min(found), max(found), f"{len(found)} seeds, least to most"
    )


def _by_seed(content: Any, method: str) -> dict[int, Mapping[str, Any]]:
    return {r["seed"]: r for r in content["results"] if r["method"] == method}


def _pairs(content: Any, method: str) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Runs of DiLoCo and of `method`, by seed."""
    mine = _by_seed(content, method)
    return [(theirs, mine[s]) for s, theirs in _by_seed(content, "diloco").items() if s in mine]


def _saved(content: Any) -> Figure | None:
    pairs = _pairs(content, "geomesh")
    if not all(a["hours_to_target"] and b["hours_to_target"] for a, b in pairs):
        return None
    return _of_seeds(1 - b["hours_to_target"] / a["hours_to_target"] for a, b in pairs)


def _idle(kind: str) -> Callable[[Any], Figure | None]:
    return lambda content: _of_seeds(r[kind] for r in _by_seed(content, "geomesh").values())


def _idle_ratio(kind: str) -> Callable[[Any], Figure | None]:
    return lambda content: _of_seeds(a[kind] / b[kind] for a, b in _pairs(content, "geomesh"))


def _simulated_idle_ratio(content: Any) -> Figure:
    """Of the WAN; nothing is drawn by chance."""
    idle = content["idle"]
    return Figure(idle["diloco"][1] / idle["geomesh"][1])


def _payload(content: Any) -> Figure | None:
    return _of_seeds(r["payload_ratio"] for r in _by_seed(content, "geomesh").values())


def _hours(method: str) -> Callable[[Any], Figure | None]:
    """For the same tokens, on the scale of DiLoCo's published ones."""

    def find(content: Any) -> Figure | None:
        return _of_seeds(
            PUBLISHED_HOURS["diloco"] * (b["hours"] / b["tokens"]) / (a["hours"] / a["tokens"])
            for a, b in _pairs(content, method)
        )

    return find


def _to_target(method: str) -> Callable[[Any], Figure | None]:
    def find(content: Any) -> Figure | None:
        hours = content["hours_by_size"]["150m"].get(method)
        return _of_seeds(hours * share for share in content["tokens_to_target"].get(method, ()))

    return find


def _late(result: Mapping[str, Any], name: str, shares: Sequence[float]) -> list[Any]:
    """Times over CONA's to the targets that count, each with whether it was reached."""
    pairs = zip(result["ratios"].get(name, ()), shares, strict=False)
    return [r for r, share in pairs if share >= LATE]


def _of_models(model: str, measure: Callable[[Any, Sequence[float]], float | None]):
    """A figure of each seed's run of a model; of any, `model` being empty."""

    def find(content: Any) -> Figure | None:
        mine = [r for r in content["results"] if model in ("", r["model"])]
        found = (measure(r, content["shares"]) for r in mine)
        return _of_seeds(x for x in found if x is not None)

    return find


def _least_gain(result: Mapping[str, Any], shares: Sequence[float]) -> float | None:
    """Over the shortest iteration; one that never came to a target took longer still."""
    return min((r["ratio"] for r in _late(result, "shortest iteration", shares)), default=None)


def _most_over_oracle(result: Mapping[str, Any], shares: Sequence[float]) -> float | None:
    return max(result["over_oracle"], default=None)


def _planner_over_best(result: Mapping[str, Any], shares: Sequence[float]) -> float | None:
    """The shortest iteration's time over that of the best of all other ways, at the late target
    where it is largest."""
    ways = [_late(result, n, shares) for n in result["ratios"] if n != "shortest iteration"]
    best = [
        min((r["ratio"] for r in column if r["reached"]), default=None)
        for column in zip(*(way for way in ways if way), strict=True)
    ]
    mine = _late(result, "shortest iteration", shares)
    found = [m["ratio"] / b for m, b in zip(mine, best, strict=False) if b is not None]
    return max(found, default=None)


def _most(measure: Callable[[Any, Sequence[float]], float | None]):
    """The most that a run of any model comes to."""

    def find(content: Any) -> Figure | None:
        found = [measure(r, content["shares"]) for r in content["results"]]
        known = [x for x in found if x is not None]
        return Figure(max(known), basis=f"{len(known)} runs, the most") if known else None

    return find


def _most_gain(result: Mapping[str, Any], shares: Sequence[float]) -> float | None:
    return max((r["ratio"] for r in _late(result, "shortest iteration", shares)), default=None)


def _throughput(policy: str, every: int | None, share: float) -> Callable[[Any], Figure | None]:
    """At batch 1, as published."""

    def find(content: Any) -> Figure | None:
        for point in content["points"]:
            for row in point["rows"]:
                asked = (policy, every) == (row["policy"], row["every"])
                if asked and point["batch"] == 1 and point["share"] == share:
                    basis = f"{point['rounds']} rounds, quartiles"
                    return Figure(row["ratio"] - 1, row["low"] - 1, row["high"] - 1, basis)
        return None

    return find


def _loss(content: Any) -> Figure | None:
    """The largest loss of accuracy at the profiled depth, with its bound; where that is all layers
    the policy that shares all, and where it is none nothing is lost."""
    found = [
        r
        for r in content["results"]
        if r["cell"]["policy"] in ("bicache", "full")
        and r["cell"]["depth"] == content["depths"].get(str(r["cell"]["share"]))
    ]
    if not found:
        return None
    worst = max(found, key=lambda r: r["bound"])
    places = len({(r["cell"]["task"], r["cell"]["share"]) for r in found})
    basis = f"{places} tasks and shares, {content['examples']:,} requests each; one-sided 95 %"
    return Figure(worst["loss"], None, worst["bound"], basis)


def _collapse(content: Any) -> Figure | None:
    """The largest loss of reuse in all layers against the same refreshes without sharing."""
    results = content["results"]
    plain = {
        (r["cell"]["task"], r["cell"]["share"]): r["accuracy"]
        for r in results
        if r["cell"]["policy"] == "refresh"
    }
    losses = [
        plain[r["cell"]["task"], r["cell"]["share"]] - r["accuracy"]
        for r in results
        if r["cell"]["policy"] == "full"
    ]
    basis = f"{len(losses)} tasks and shares, {content['examples']:,} requests each"
    return Figure(max(losses), basis=basis) if losses else None


_TEXT = (
    "C4, and models of this size trained on billions of tokens, want GPUs for hours; the presets "
    "are here (`geojax train geomesh-150m`)"
)
_TESTS = (
    "these test sets come in no package that a machine without the network can install, and a "
    "model trained here is at chance on them; `geojax eval --tasks` scores others by the same rule"
)
_MODELLED = "a small model trained for real on Wikipedia extracts (docs/geomesh.md); times modelled"
_SET = (
    "the slices' speeds and the WAN share are set so that DiLoCo idles as published "
    f"({PUBLISHED_IDLE['diloco'][0]:.1%} and {PUBLISHED_IDLE['diloco'][1]:.1%}); what GeoMesh's "
    "idle comes to is found; the links have no latency, of which nothing was published"
)
_LATENCY = "the same links with the latency that was measured between those regions; simulated"
_BYTES = (
    "compute and bytes alone, by the speeds and the WAN share that were published, do not give the "
    "published hours"
)
_CURVES = "small models trained for real (docs/cona.md); times modelled, of the published models"
_ORACLE = (
    "the oracle looks at the very held-out loss that is reported, and ahead: larger batches spend "
    "tokens faster and are further down the schedule at the same time (docs/cona.md)"
)
_RANDOM = (
    "a small model of random weights on a CPU (docs/bicache.md), not LLaDA-8B on a B200; that the "
    "ends of the published range are those of prefixes of 70 and 90 % is our reading"
)
_MODELS = (("GPT-3 1.3B", "gpt"), ("BERT-Large", "bert"), ("Llama-3.2-1B", "llama"))

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "GeoMesh",
        "time to the target perplexity, saved over DiLoCo",
        "at least",
        0.702,
        ".1%",
        "geomesh",
        _saved,
        _MODELLED,
    ),
    *(
        Claim(
            "GeoMesh",
            f"{name} idle of GeoMesh, share of the run",
            "at most",
            published,
            ".1%",
            "geomesh",
            _idle(kind),
            _SET,
        )
        for name, kind, published in zip(
            ("straggler", "WAN"),
            ("straggler_idle", "wan_idle"),
            PUBLISHED_IDLE["geomesh"],
            strict=True,
        )
    ),
    *(
        Claim(
            "GeoMesh",
            f"{name} idle, DiLoCo over GeoMesh",
            "at least",
            published,
            ".1f",
            "geomesh",
            _idle_ratio(kind),
            _SET,
        )
        for name, kind, published in (
            ("straggler", "straggler_idle", 8.0),
            ("WAN", "wan_idle", 5.6),
        )
    ),
    Claim(
        "GeoMesh",
        "WAN idle, DiLoCo over GeoMesh, where the links have latency",
        "at least",
        5.6,
        ".1f",
        "latency",
        _simulated_idle_ratio,
        _LATENCY,
    ),
    Claim(
        "GeoMesh",
        "bytes a round, float32 over signs",
        "about",
        32.0,
        ".1f",
        "geomesh",
        _payload,
        "counted; magnitudes and headers are in it",
    ),
    *(
        Claim(
            "GeoMesh",
            f"hours to the target perplexity at 150M, {name}",
            "about",
            PUBLISHED_TO_TARGET[method],
            ".2f",
            "tables",
            _to_target(method),
            f"DiLoCo's are the scale, {PUBLISHED_TO_TARGET['diloco']} for all of its tokens; what "
            "share of its tokens another takes was measured with a small model",
        )
        for name, method in (("HALoS", "halos"), ("GeoMesh", "geomesh"))
    ),
    *(
        Claim(
            "GeoMesh",
            f"hours for the same tokens, {name}",
            "about",
            PUBLISHED_HOURS[method],
            ".1f",
            "geomesh",
            _hours(method),
            f"DiLoCo's are the scale, {PUBLISHED_HOURS['diloco']}",
            _BYTES,
        )
        for name, method in (
            ("balancing only", "balancing-only"),
            ("signs only", "signs-only"),
            ("GeoMesh", "geomesh"),
            ("float16", "fp16"),
            ("8-bit", "int8"),
        )
    ),
    *(
        Claim("GeoMesh", f"final perplexity on C4 at {size}", "at most", value, ".1f", note=_TEXT)
        for size, value in (("150M", 23.0), ("300M", 25.7), ("500M", 23.4))
    ),
    *(
        Claim(
            "GeoMesh",
            f"mean zero-shot accuracy of six test sets at {size}",
            "at least",
            value,
            ".2f",
            note=_TESTS,
        )
        for size, value in (("150M", 37.88), ("300M", 37.39), ("500M", 37.58))
    ),
    *(
        Claim(
            "CONA",
            f"times as fast as the shortest iteration, late target where it is least, {name}",
            "at least",
            LEAST_GAIN,
            ".2f",
            "cona",
            _of_models(model, _least_gain),
            _CURVES,
        )
        for name, model in _MODELS
    ),
    Claim(
        "CONA",
        "times as fast as the shortest iteration, the most at any late target of any model",
        "at least",
        9.6,
        ".2f",
        "cona",
        _most(_most_gain),
        _CURVES,
    ),
    *(
        Claim(
            "CONA",
            f"perplexity over the oracle's at the same time, where it is most, {name}",
            "at most",
            MOST_OVER_ORACLE,
            ".1%",
            "cona",
            _of_models(model, _most_over_oracle),
            _CURVES,
            _ORACLE,
        )
        for name, model in _MODELS
    ),
    *(
        Claim(
            "CONA",
            f"a planner's strategy (shortest iteration) over the best way, at the worst, {name}",
            "at least",
            1.8,
            ".2f",
            "cona",
            _of_models(model, _planner_over_best),
            _CURVES,
        )
        for name, model in _MODELS
    ),
    Claim(
        "CONA",
        "a planner's strategy over the best way, the most of any model",
        "at least",
        11.4,
        ".2f",
        "cona",
        _most(_planner_over_best),
        _CURVES,
    ),
    *(
        Claim(
            "BiCache",
            f"throughput over no cache, refreshes every 16 steps, prefix {share:.0%}",
            "at least",
            gain,
            "+.1%",
            "throughput",
            _throughput("bicache", 16, share),
            f"{_RANDOM}; what sharing adds to not computing the prefix every step is in "
            "docs/bicache.md",
        )
        for share, gain in ((0.7, 0.363), (0.9, 0.828))
    ),
    Claim(
        "BiCache",
        "throughput over no cache with Fast-dLLM's dual cache, prefix 90%",
        "at least",
        0.983,
        "+.1%",
        "throughput",
        _throughput("bicache-dual", None, 0.9),
        _RANDOM,
    ),
    Claim(
        "BiCache",
        "loss of accuracy at the profiled depth, worst task and share",
        "at most",
        0.018,
        ".1%",
        "bicache",
        _loss,
        "generated tasks, and a small model trained on them (docs/diffusion.md)",
    ),
    Claim(
        "BiCache",
        "loss of accuracy of reuse in all layers, worst task and share",
        "at least",
        0.2,
        ".1%",
        "bicache",
        _collapse,
        "published as a collapse, without a figure: 20 points are our bound for the word",
    ),
)
