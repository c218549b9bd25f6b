# SPDX-License-Identifier: Apache-2.0
"""The examples for clusters start what they say, under schedulers that do nothing but start."""

import os
import re
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from jobset_schema import JobSet
from pydantic import ValidationError

from geojax.cli import main
from geojax.platform import EXIT_CODE
from geojax.track.metrics import read_records

EXAMPLES = Path(__file__).parents[2] / "docs" / "launch"
CONFIG = """
from geojax.config import *
from geojax.models.config import TransformerConfig

def config():
    return RunConfig(
        name="apart",
        model=TransformerConfig(257, dim=16, layers=1, heads=2, kv_heads=2, mlp_dim=24),
        data=DataConfig(
            source=SourceConfig(kind="files", paths=("words.txt",)),
            tokenizer=TokenizerConfig(vocab_size=257),
            seq_len=16,
            valid_fraction=0.2,
        ),
        train=TrainConfig(
            total_tokens=4 * 8 * 4 * 16,
            optimizer=OptimizerConfig(name="lion", learning_rate=1e-3),
            compute_dtype="float32",
        ),
        slices=(
            SliceConfig("east", region="eastus", speed=1.0),
            SliceConfig("west", region="westus2", speed=1.0),
        ),
        balance=BalanceConfig(inner_steps=4, batch_sizes=(4,)),
        exchange=ExchangeConfig(schedule="gather"),
        clock=ClockConfig(
            kind="modelled", wan="geomesh-azure", base_step_seconds=1.0, base_batch=4
        ),
        eval=EvalConfig(sequences=16, batch=8),
    )
"""


@pytest.fixture
def place(tmp_path):
    """A folder with a config, a text, and `geojax` and `srun` on the path."""
    (tmp_path / "run.py").write_text(CONFIG)
    lines = (f"{i} quick brown foxes jump over {i % 7} lazy dogs" for i in range(900))
    (tmp_path / "words.txt").write_text("\n\n".join(lines))
    programs = {"geojax": f'exec {sys.executable} -m geojax "$@"', "srun": 'exec "$@"'}
    (tmp_path / "bin").mkdir()
    for name, line in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


@pytest.fixture
def place_of_echo(place):
    """The same, where `srun` says what it would start."""
    (place / "bin" / "srun").write_text('#!/bin/sh\necho "$@"\n')
    return place


@pytest.fixture
def ports():
    """Three in a row that are free."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for first in range(10_000 + 10_000 * (worker % 2) + os.getpid() % 5_000, 30_000, 7):
        try:
            for port in range(first, first + 3):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no ports are free")


def start(place, script, *args, **environment):
    inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    inherited["PATH"] = f"{place / 'bin'}{os.pathsep}{inherited['PATH']}"
    shell = "bash" if script.endswith(".sbatch") else "sh"
    return subprocess.Popen(
        [shell, str(EXAMPLES / script), *args],
        cwd=place,
        env=inherited | {"CONFIG": "run.py", "BIND": "127.0.0.1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(started, run):
    try:
        for process in reversed(started):  # slices first: the coordinator would wait for them
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output
    finally:
        for process in started:
            process.kill()
            process.communicate()
    records = list(read_records(run / "metrics.jsonl"))
    assert records[-1]["kind"] == "end"
    assert {r["slice"] for r in records if r["kind"] == "slice"} == {"east", "west"}


@pytest.mark.runs
def test_slurm_jobs_of_two_slices(place, ports):
    started = [start(place, "coordinator.sh", PORT=str(ports))]
    for i, name in enumerate(("east", "west"), 1):
        at = {"COORDINATOR": f"127.0.0.1:{ports}", "PORT": str(ports + i)}
        started.append(start(place, "slice.sbatch", SLICE=name, **at))
    wait_for(started, place / "runs" / "apart")


@pytest.mark.runs
def test_ranks_of_open_mpi(place, ports):
    started = [
        start(
            place,
            *("rank.sh", "127.0.0.1", "east", "west"),
            PORT=str(ports),
            OMPI_COMM_WORLD_RANK=str(rank),
        )
        for rank in range(3)
    ]
    wait_for(started, place / "runs" / "apart")


def test_a_slurm_job_without_a_slice_says_what_is_missing(place):
    job = start(place, "slice.sbatch")
    output, _ = job.communicate(timeout=60)
    assert job.returncode
    assert "SLICE: which slice of the config this job is" in output


@pytest.mark.parametrize(("tasks", "cluster"), [("1", ""), ("2", "auto")])
def test_the_nodes_of_a_slurm_job_are_one_slice(place_of_echo, tasks, cluster):
    job = start(place_of_echo, "slice.sbatch", SLICE="east", COORDINATOR="a:1", SLURM_NTASKS=tasks)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    words = output.split()
    assert words[:4] == ["geojax", "train", "run.py", "--slice"]
    options = dict(pairwise(words))
    assert options.get("--platform.cluster.coordinator", "") == cluster


@pytest.mark.parametrize("code", [0, 1, os.EX_TEMPFAIL, EXIT_CODE])
def test_a_slurm_job_that_was_stopped_is_queued_again(place, code):
    for name, line in (("srun", f"exit {code}"), ("scontrol", 'echo scontrol "$@"')):
        (place / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (place / "bin" / name).chmod(0o755)
    job = start(place, "slice.sbatch", SLICE="east", COORDINATOR="a:1", SLURM_JOB_ID="17")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == code
    assert output == ("scontrol requeue 17\n" if code > 1 else "")


def test_the_job_set_is_one_for_kubernetes():
    """Its fields are of the API's, and its addresses those that JobSet gives to pods: name of the
    set, of the job, number of the job, of the pod; below the set's name."""
    text = (EXAMPLES / "jobset.yaml").read_text()
    jobs = JobSet.model_validate(yaml.safe_load(text))
    assert jobs.spec.network.enable_dns_hostnames  # or pods have no addresses
    pods = {
        f"{jobs.metadata.name}-{job.name}-{i}-{j}.{jobs.metadata.name}"
        for job in jobs.spec.replicated_jobs
        for i in range(job.replicas)
        for j in range(job.template.spec.completions)
    }
    for job in jobs.spec.replicated_jobs:
        (container,) = job.template.spec.template.spec.containers
        words = " ".join(container.command)
        ports = {int(port) for port in re.findall(r"grpc\.port=(\d+)", words)}
        inside = re.search(r"cluster\.coordinator=\S+:(\d+)", words)
        ports |= {int(inside[1])} if inside else set()
        assert {p.container_port for p in container.ports} == ports or job.name == "coordinator"
        spec = job.template.spec
        assert spec.parallelism == spec.completions  # all at once: they wait for each other
        if spec.completions > 1:
            assert spec.completion_mode == "Indexed"  # or they have no numbers
    named = set(re.findall(r"[\w-]+\.apart\b", text))
    assert named <= pods, named - pods
    with pytest.raises(ValidationError, match="restartpolicy"):
        JobSet.model_validate(yaml.safe_load(text.replace("restartPolicy", "restartpolicy", 1)))


def test_commands_of_the_job_set_are_ours(capsys):
    """Each slice's command is one that `geojax train` understands: it asks for help at its end."""
    jobs = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())["spec"]["replicatedJobs"]
    pods = {job["name"]: job["template"]["spec"]["template"]["spec"] for job in jobs}
    assert set(pods) == {"coordinator", "east", "west"}
    for name, pod in pods.items():
        (container,) = pod["containers"]
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}
        if name == "coordinator":
            assert (EXAMPLES / container["command"][-1]).is_file()
            continue
        program, *args = container["command"]
        assert program == "geojax"
        options = dict(arg.split("=") for arg in args[2:])
        assert options["--slice"] == name
        assert options["--grpc.advertise"] == f"apart-{name}-0-0.apart"
        index = "$(JOB_COMPLETION_INDEX)"  # Kubernetes puts the pod's number in its place
        if name == "east":
            job = next(job["template"]["spec"] for job in jobs if job["name"] == name)
            assert options["--platform.cluster.processes"] == str(job["completions"])
            assert options["--platform.cluster.process-id"] == index
        with pytest.raises(SystemExit) as ended:
            main([*(arg.replace(index, "1") for arg in args), "--help"])
        assert ended.value.code == 0
        assert "--grpc.advertise" in capsys.readouterr().out
