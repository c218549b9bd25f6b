# SPDX-License-Identifier: Apache-2.0
"""Processes find each other, or each says in one line why not, in bounded time."""

import os
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest

from geojax.config import ClusterConfig, PlatformConfig, RunError
from geojax.platform import initialize
from geojax.platform.cluster import roll_call

MEMBER = """
import sys
import jax
from jax.sharding import NamedSharding, PartitionSpec
from geojax.config import ClusterConfig, PlatformConfig
from geojax.platform import initialize

cluster = ClusterConfig(sys.argv[1], processes=2, process_id=int(sys.argv[2]), connect_seconds=30)
rows = dict(initialize(PlatformConfig(interface="lo", cluster=cluster)))
assert rows == {"coordinator": sys.argv[1], "process": sys.argv[2] + " of 2"}, rows
mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("x"))
values = jax.make_array_from_callback((8,), sharding, lambda index: jax.numpy.arange(8.0)[index])
specs = {"in_specs": PartitionSpec("x"), "out_specs": PartitionSpec()}
total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, **specs))(values)
print("devices", jax.device_count(), jax.local_device_count(), "sum", float(total[0]))
"""


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_two_processes_form_one_mesh():
    address = free_address()
    flags = "--xla_force_host_platform_device_count=4"
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, address, str(i)],
            env=os.environ | {"XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        for member in members:
            out, err = member.communicate(timeout=60)
            assert member.returncode == 0, err[-3000:]
            assert "devices 8 4 sum 28.0" in out
    finally:
        for member in members:
            member.kill()
            member.wait()


def call_in(*numbers, processes=2, seconds=2.0, address=None):
    """What each process (a thread here) says: '' for a complete roll, or its error."""
    address = address or free_address()
    said = [""] * len(numbers)

    def call(i):
        cluster = ClusterConfig(address, processes, numbers[i], connect_seconds=seconds)
        try:
            roll_call(cluster)
        except RunError as error:
            said[i] = str(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(numbers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    return said


def test_a_complete_roll_frees_the_port_and_can_be_called_again():
    address = free_address()
    for _ in range(3):
        assert call_in(2, 0, 1, processes=3, address=address) == ["", "", ""]


def test_a_missing_process_is_named_to_all():
    said = call_in(0, 1, processes=4, seconds=1.0)
    assert all("processes [2, 3] of 4 did not call in within 1 s" in line for line in said)


def test_an_absent_coordinator_is_an_error_in_the_time_given():
    start = time.monotonic()
    (said,) = call_in(1, seconds=1.0)
    assert "process 1 cannot reach the coordinator 127.0.0.1:" in said
    assert "Connection refused" in said
    assert "\n" not in said
    assert time.monotonic() - start < 5


def test_a_shared_number_is_named_to_those_who_share_it():
    zero, *twins = call_in(0, 1, 1, processes=3)
    assert zero == "two processes have platform.cluster.process_id 1; number them 0..2"
    assert twins == [zero, zero]


def test_two_coordinators_cannot_share_a_port():
    said = sorted(call_in(0, 0, seconds=1.0))
    assert "cannot listen on port" in said[0]
    assert "did not call in" in said[1]


def test_processes_that_disagree_on_their_count_are_told():
    address = free_address()
    said = []
    other = threading.Thread(
        target=lambda: said.extend(call_in(1, processes=3, address=address)), daemon=True
    )
    other.start()
    said.extend(call_in(0, processes=2, address=address))
    other.join(timeout=30)
    assert len(said) == 2
    assert all("was started for 3 processes and process 0 for 2" in line for line in said)


@pytest.mark.parametrize("again", [(1, 2), (2, 1)])
def test_strangers_and_processes_that_died_do_not_count(again):
    address = free_address()
    host, port = address.rsplit(":", 1)
    said = []
    zero = threading.Thread(
        target=lambda: said.extend(call_in(0, processes=3, address=address, seconds=10))
    )
    zero.start()
    for line in (b"GET / HTTP/1.1\r\n", b"geojax-call 1 3\n"):
        for _ in range(100):
            try:
                with socket.create_connection((host, int(port)), timeout=1) as caller:
                    caller.sendall(line)
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
    first = threading.Thread(
        target=lambda: said.extend(call_in(again[0], processes=3, address=address))
    )
    first.start()
    time.sleep(0.2)
    said.extend(call_in(again[1], processes=3, address=address))
    first.join(timeout=30)
    zero.join(timeout=30)
    assert said == ["", "", ""]


def test_a_single_process_has_nothing_to_join_and_a_started_one_is_too_late():
    assert initialize(PlatformConfig()) == []
    jax.devices()
    cluster = ClusterConfig(free_address(), processes=1, process_id=0, connect_seconds=5)
    with pytest.raises(RunError, match=r"JAX cannot join the cluster at 127\.0\.0\.1"):
        initialize(PlatformConfig(cluster=cluster))


def test_auto_needs_a_launcher(monkeypatch):
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    monkeypatch.setattr("jax._src.clusters.ClusterEnv._cluster_types", [])
    with pytest.raises(RunError, match="no launcher that JAX knows has started this process"):
        initialize(PlatformConfig(cluster=ClusterConfig("auto")))
