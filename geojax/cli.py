# SPDX-License-Identifier: Apache-2.0
"""The command line: one function a command.

Commands import what they need when they run, so that `geojax --help` answers at once. A mistake of
the user's ends in one message and exit code 2; a run that fails for another reason, in exit code 1.
"""

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from geojax.arguments import (
    Convert,
    Prepare,
    ProfileStrategies,
    ProfileTrace,
    Resume,
    Train,
    has,
    need_extra,
    parse,
    parse_config,
    presets_help,
    steered,
)
from geojax.config import ConfigError, RunConfig, RunError, require


def train(args: list[str]) -> int:
    """Train a preset or a config file, or continue a run with --resume RUN."""
    from geojax import runs

    if has(args, "--slice") or has(args, "--coordinator"):
        return _train_slice(args)
    if args and args[0] == "--resume":
        options = parse(Resume, args[1:], "geojax train --resume")
        return runs.exit_code(runs.resume(options.run, None, options.strategy, options.cluster))
    if not args or args[0].startswith("-"):
        return presets_help("train", args)
    args, config = steered(args)
    options = parse_config(Train, args, "train", config)
    folder = options.out or Path("runs") / options.config.name
    return runs.exit_code(runs.start(options.config, folder))


def _train_slice(args: list[str]) -> int:
    """One slice of a run whose slices are processes."""
    from geojax.launch import processes
    from geojax.launch.options import ResumeSlice, TrainSlice

    if args[0] == "--resume":
        options = parse(ResumeSlice, args[1:], "geojax train --resume")
        config = _runs().read_config(options.run / "config.json")
        config = _runs().with_cluster(config, options.cluster)
        folder = options.run / "slices" / options.slice
        done = processes.take_part(config, folder, options.slice, options.coordinator)
        return _runs().exit_code(done)
    options = parse_config(TrainSlice, args, "train", _processes(args[0]))
    require(
        options.slice and options.coordinator,
        "--slice NAME and --coordinator HOST:PORT go together; give both, or neither",
    )
    folder = options.out or Path("runs") / options.config.name / "slices" / options.slice
    done = processes.take_part(options.config, folder, options.slice, options.coordinator)
    return _runs().exit_code(done)


def coordinator(args: list[str]) -> int:
    """Say who is in which round of a run whose slices are processes, and keep its records."""
    from geojax.launch import processes
    from geojax.launch.options import ResumeCoordinator

    if args and args[0] == "--resume":
        options = parse(ResumeCoordinator, args[1:], "geojax coordinator --resume")
        config = _runs().read_config(options.run / "config.json")
        if options.port is not None:
            config = replace(config, grpc=replace(config.grpc, port=options.port))
        return _runs().exit_code(processes.coordinate(config, options.run))
    if not args or args[0].startswith("-"):
        return presets_help("coordinator", args)
    options = parse_config(Train, args, "coordinator", _processes(args[0]))
    folder = options.out or Path("runs") / options.config.name
    if not (folder / "config.json").exists():
        _runs().begin_folder(options.config, folder)
    return _runs().exit_code(processes.coordinate(options.config, folder))


def launch(args: list[str]) -> int:
    """Train with a process a slice on this machine: geojax launch --local N PRESET_OR_FILE."""
    from geojax.launch import local
    from geojax.launch.options import Launch, Relaunch

    if args and args[0] == "--resume":
        options = parse(Relaunch, args[1:], "geojax launch --resume")
        return _runs().exit_code(local.relaunch(options.run, options.restarts))
    if len(args) < 3 or args[0] != "--local" or args[2].startswith("-"):
        if args and args[0] in ("-h", "--help"):
            return presets_help("launch", args)
        raise ConfigError(
            "geojax launch wants --local N PRESET_OR_FILE, or --resume RUN, not "
            f"{' '.join(args[:3]) or 'nothing'!r}"
        )
    require(args[1].isdecimal(), f"--local {args[1]}: say how many slices, each a process")
    options = parse_config(Launch, args[2:], "launch --local N", _processes(args[2]))
    folder = options.out or Path("runs") / options.config.name
    done = local.launch_local(options.config, folder, int(args[1]), options.restarts)
    return _runs().exit_code(done)


def _processes(name: str) -> RunConfig:
    """A preset or file, with a process a slice."""
    from geojax.configs import load_config
    from geojax.launch.processes import with_grpc

    return with_grpc(load_config(name))


def _runs():
    from geojax import runs

    return runs


def _asks_help(args: list[str]) -> bool:
    return args[:1] in (["-h"], ["--help"])


def _parts_help(command: str, parts: Iterable[str]) -> int:
    """Of a command that is several."""
    print(f"usage: geojax {command} {{{','.join(parts)}}} ...\n\n{COMMANDS[command].__doc__}")
    print(f"\n`geojax {command} NAME --help` says more.")
    return 0


def data(args: list[str]) -> int:
    """Tokenise ahead of time: geojax data prepare PRESET_OR_FILE."""
    if _asks_help(args):
        return _parts_help("data", ["prepare"])
    if args[:1] != ["prepare"]:
        raise ConfigError(
            f"geojax data knows only `prepare`, not {' '.join(args[:1]) or 'nothing'!r}"
        )
    if len(args) < 2 or args[1].startswith("-"):
        return presets_help("data prepare", args[1:])
    from rich.console import Console

    from geojax.data import describe, prepare

    config = parse_config(Prepare, args[1:], "data prepare").config
    console = Console(highlight=False)
    corpus = prepare(config.data, config.model.vocab_size, progress=console.print)
    for label, value in describe(corpus):
        console.print(f"  {label:<22}{value}", soft_wrap=True)
    return 0


def report(args: list[str]) -> int:
    """Runs and results side by side: tables, pictures, a page, JSON; --watch follows a run."""
    from geojax.report.command import ReportOptions, run_report, with_seconds

    run_report(parse(ReportOptions, with_seconds(args), "geojax report"))
    return 0


def demo(args: list[str]) -> int:
    """Train one small model by four methods over four unequal slices, and compare them."""
    from geojax.bench.commands import DemoOptions, run_demo

    run_demo(parse(DemoOptions, args, "geojax demo"))
    return 0


_BENCHES = {
    "geomesh": ("geojax.bench.commands", "GeomeshOptions", "run_geomesh"),
    "tune": ("geojax.bench.commands", "TuneOptions", "run_tune"),
    "cona": ("geojax.bench.commands", "ConaOptions", "run_cona"),
    "bicache": ("geojax.bench.bicache", "BicacheOptions", "run_bicache"),
    "throughput": ("geojax.bench.throughput", "ThroughputOptions", "run_throughput"),
    "guard": ("geojax.bench.guard", "GuardOptions", "run_guard"),
    "serve": ("geojax.bench.serve", "LoadOptions", "run_load"),
    "paper": ("geojax.bench.paper", "PaperOptions", "run_paper"),
}
"""By name: a module, its options and what runs them."""


def bench(args: list[str]) -> int:
    """Longer comparisons: geomesh, tune METHOD, cona, bicache, throughput, guard, serve, paper."""
    if _asks_help(args):
        return _parts_help("bench", _BENCHES)
    if not args or args[0] not in _BENCHES:
        raise ConfigError(f"geojax bench wants one of {[*_BENCHES]}, not {(args or [''])[0]!r}")
    if args[0] == "serve":
        need_extra("serve", "httpx2")
    module, options, run = _BENCHES[args[0]]
    found = import_module(module)
    getattr(found, run)(parse(getattr(found, options), args[1:], f"geojax bench {args[0]}"))
    return 0


def convert(args: list[str]) -> int:
    """Weights from a run, Hugging Face safetensors or GGUF, to safetensors."""
    from geojax.convert import run_convert

    options = parse(Convert, args, "geojax convert")
    run_convert(options.source, options.target, options.dtype)
    return 0


def evaluate(args: list[str]) -> int:
    """Perplexity of a model's weights on held-out text, or multiple choice with --tasks."""
    from geojax.score import EvalOptions, run_eval

    run_eval(parse(EvalOptions, args, "geojax eval"))
    return 0


def generate(args: list[str]) -> int:
    """Text from a diffusion model, shown while it is being denoised."""
    from geojax.generate import GenerateOptions, run_generate

    run_generate(parse(GenerateOptions, args, "geojax generate"))
    return 0


def serve(args: list[str]) -> int:
    """Answer HTTP requests as OpenAI's clients send them, by a diffusion model."""
    need_extra("serve", "fastapi", "prometheus_client", "uvicorn")
    from geojax.serve.command import run_serve
    from geojax.serve.options import ServeOptions

    run_serve(parse(ServeOptions, args, "geojax serve"))
    return 0


def plan(args: list[str]) -> int:
    """Strategies that fit a cluster, or with --cluster FILE a whole run; needs no GPU."""
    if has(args, "--cluster"):
        return _plan_whole(args)
    from geojax.plan.command import PlanOptions, run_plan

    run_plan(parse(PlanOptions, args, "geojax plan"))
    return 0


def _plan_whole(args: list[str]) -> int:
    """A preset on a cluster of regions."""
    if args[0].startswith("-"):
        return presets_help("plan", args)
    from geojax.configs import load_config
    from geojax.configs.geomesh import over_slices
    from geojax.plan.whole_command import WholeOptions, run_whole

    preset = load_config(args[0])
    preset = preset if preset.slices else over_slices(preset)
    run_whole(parse_config(WholeOptions, args, "plan", preset), preset)
    return 0


def simulate(args: list[str]) -> int:
    """A run's times without the run: up to 256 slices, other links; or `simulate tables`."""
    if args and args[0] == "tables":
        from geojax.simulate.tables import TablesOptions, run_tables

        run_tables(parse(TablesOptions, args[1:], "geojax simulate tables"))
        return 0
    if not args or args[0].startswith("-"):
        return presets_help("simulate", args)
    from geojax.simulate.command import SimulateOptions, run_simulate

    run_simulate(parse_config(SimulateOptions, args, "simulate"))
    return 0


def profile(args: list[str]) -> int:
    """Time steps, or find how deep prefixes may be shared: profile strategies, trace, depth."""
    known = {"strategies": ProfileStrategies, "trace": ProfileTrace}
    if _asks_help(args):
        return _parts_help("profile", [*known, "depth"])
    if args and args[0] == "depth":
        from geojax.bicache.table import DepthOptions, run_depth

        run_depth(parse(DepthOptions, args[1:], "geojax profile depth"))
        return 0
    if not args or args[0] not in known:
        every = [*known, "depth"]
        raise ConfigError(f"geojax profile wants one of {every}, not {(args or [''])[0]!r}")
    if len(args) < 2 or args[1].startswith("-"):
        return presets_help(f"profile {args[0]}", args[1:])
    options = parse_config(known[args[0]], args[1:], f"profile {args[0]}")
    from geojax import platform
    from geojax import profile as profiles

    platform.apply(options.config.platform)
    if isinstance(options, ProfileTrace):
        out = options.out or Path("runs") / f"trace-{options.config.name}"
        profiles.profile_trace(options.config, options.steps, out)
    else:
        profiles.profile_strategies(options.config, options.strategies, options.steps, options.out)
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "launch": launch,
    "coordinator": coordinator,
    "data": data,
    "report": report,
    "plan": plan,
    "simulate": simulate,
    "profile": profile,
    "convert": convert,
    "eval": evaluate,
    "demo": demo,
    "bench": bench,
    "generate": generate,
    "serve": serve,
}


def main(args: list[str] | None = None) -> int:
    """Run a command; the process's exit code."""
    args = sys.argv[1:] if args is None else args
    if not args or args[0] in ("-h", "--help"):
        print("usage: geojax COMMAND ...\n\ncommands:")
        for name, command in COMMANDS.items():
            print(f"  {name:<12}{(command.__doc__ or '').splitlines()[0]}")
        print("\n`geojax COMMAND --help` says more.")
        return 0 if args else 2
    try:
        if args[0] not in COMMANDS:
            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"use one of {list(COMMANDS)}"
            raise ConfigError(f"no command named {args[0]!r}; {hint}")
        return COMMANDS[args[0]](args[1:])
    except ConfigError as error:
        print(f"geojax: error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"geojax: the run stopped: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # of the machine, such as a full disk: a new start may do
        print(f"geojax: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
