# SPDX-License-Identifier: Apache-2.0
"""What was published of the three methods, and what each claim comes to in figures of our own.

A claim names the part of `geojax bench paper` whose figures it reads. What is found is compared by
one rule for all: a bound is reproduced where our figure keeps it with all of its spread, a value
where it is within a tenth. Nothing here holds a figure of ours. Published figures are those of the
abstracts and of public notes on the papers; units are in the forms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from geojax.bench.cona_tables import LEAST_GAIN, MOST_OVER_ORACLE
from geojax.bench.figures import (
    Figure,
    collapse,
    hours,
    idle,
    idle_ratio,
    least_gain,
    loss,
    most,
    most_gain,
    most_over_oracle,
    of_models,
    payload,
    planner_over_best,
    saved,
    simulated_idle_ratio,
    throughput,
    to_target,
)
from geojax.bench.published import ABOUT, PUBLISHED_HOURS, PUBLISHED_IDLE, PUBLISHED_TO_TARGET

Relation = Literal["at least", "at most", "about"]


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
    "the oracle is the best run in hindsight: of a greedy one that looks at the very held-out loss "
    "that is reported, the predicted chain and all fixed strategies (docs/cona.md)"
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
        saved,
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
            idle(kind),
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
            idle_ratio(kind),
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
        simulated_idle_ratio,
        _LATENCY,
    ),
    Claim(
        "GeoMesh",
        "bytes a round, float32 over signs",
        "about",
        32.0,
        ".1f",
        "geomesh",
        payload,
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
            to_target(method),
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
            hours(method),
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
            of_models(model, least_gain),
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
        most(most_gain),
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
            of_models(model, most_over_oracle),
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
            of_models(model, planner_over_best),
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
        most(planner_over_best),
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
            throughput("bicache", 16, share),
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
        throughput("bicache-dual", None, 0.9),
        _RANDOM,
    ),
    Claim(
        "BiCache",
        "loss of accuracy at the profiled depth, worst task and share",
        "at most",
        0.018,
        ".1%",
        "bicache",
        loss,
        "generated tasks, and a small model trained on them (docs/diffusion.md)",
    ),
    Claim(
        "BiCache",
        "loss of accuracy of reuse in all layers, worst task and share",
        "at least",
        0.2,
        ".1%",
        "bicache",
        collapse,
        "published as a collapse, without a figure: 20 points are our bound for the word",
    ),
)
