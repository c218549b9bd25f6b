# SPDX-License-Identifier: Apache-2.0
"""Joining the processes of one JAX cluster.

Invariant: JAX is told to connect only when every process has called in under a number of its own.
It ends the process, with a stack of C++ calls, where one is missing or two share a number; the roll
call on the coordinator's port finds that first, and says which.
"""

import contextlib
import functools
import socket
import time

from geojax.config import ClusterConfig, PlatformConfig, RunError

_CALL, _ROLL = "geojax-call", "geojax-roll"
"""First words of a line, which differ, as a socket can connect to itself on a free port."""
_LINE_BYTES = 1000
_RETRY_SECONDS = 0.2
_HEARING_SECONDS = 5.0
"""Patience with a connection that says nothing, such as a port scanner's."""


def initialize(config: PlatformConfig) -> list[tuple[str, str]]:
    """Join the cluster of `config`, before JAX's backends start; rows of (name, value) for the
    console, none for a single process.

    Collectives of CPU devices go over gloo. RunError, in one line, where the coordinator cannot be
    reached or cannot listen, where processes are missing, share a number or disagree on how many
    they are, and where JAX has started already.
    """
    import jax

    cluster = config.cluster
    if not cluster.coordinator:
        return []
    if jax.distributed.is_initialized():
        raise RunError("this process is in a JAX cluster already; initialize it once")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    given: dict = {}
    if cluster.coordinator != "auto":
        roll_call(cluster)
        given = {
            "coordinator_address": cluster.coordinator,
            "num_processes": cluster.processes,
            "process_id": cluster.process_id,
        }
    try:
        jax.distributed.initialize(**given, initialization_timeout=int(cluster.connect_seconds))
    except (RuntimeError, ValueError) as error:
        raise RunError(_advice(cluster, error)) from error
    from jax._src import distributed

    state = distributed.global_state
    if interface := config.interface or _loopback(str(state.coordinator_address)):
        _use_interface(interface, state.client)
    return [
        ("coordinator", str(state.coordinator_address)),
        ("process", f"{state.process_id} of {state.num_processes}"),
    ]


def roll_call(cluster: ClusterConfig) -> None:
    """Wait until all processes have called in at the coordinator, process 0; RunError otherwise.

    Over TCP on the coordinator's port, which is free again afterwards: a process sends its number
    and the count of processes, and gets 'ok' or what is wrong, as all the others do.
    """
    deadline = time.monotonic() + cluster.connect_seconds
    if cluster.process_id == 0:
        _take_roll(cluster, deadline)
    else:
        _answer(cluster, deadline)


def _take_roll(cluster: ClusterConfig, deadline: float) -> None:
    _, port = cluster.address()
    present: dict[int, socket.socket] = {}
    try:
        listener = _listen(port)
    except OSError as error:
        raise RunError(
            f"process 0 cannot listen on port {port} ({error.strerror}); another process 0 may run "
            "here: give each process its own platform.cluster.process_id, or choose another port"
        ) from error
    with listener:
        fault = ""
        while not fault and len(_alive(present)) < cluster.processes - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                caller, _ = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, cluster.processes)) - set(present))
                fault = (
                    f"processes {missing} of {cluster.processes} did not call in within "
                    f"{cluster.connect_seconds:g} s; start them, or raise "
                    "platform.cluster.connect_seconds"
                )
                break
            fault = _admit(caller, cluster, present)
        for caller in present.values():
            with caller:
                _tell(caller, _ROLL, fault or "ok")
    if fault:
        raise RunError(fault)


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _admit(caller: socket.socket, cluster: ClusterConfig, present: dict[int, socket.socket]) -> str:
    """Add the caller to those present; what is wrong, if anything. Strangers are sent away."""
    caller.settimeout(_HEARING_SECONDS)
    numbers = _hear(caller, _CALL).split()
    if len(numbers) != 2 or not all(word.isdecimal() for word in numbers):
        caller.close()
        return ""
    number, count = map(int, numbers)
    fault = ""
    if count != cluster.processes:
        fault = (
            f"process {number} was started for {count} processes and process 0 for "
            f"{cluster.processes}; give all the same platform.cluster.processes"
        )
    elif number == 0 or number in _alive(present):
        fault = (
            f"two processes have platform.cluster.process_id {number}; number them "
            f"0..{cluster.processes - 1}"
        )
    if fault:
        with caller:
            _tell(caller, _ROLL, fault)
    else:
        present[number] = caller
    return fault


def _answer(cluster: ClusterConfig, deadline: float) -> None:
    address = cluster.address()
    reason, verdict = "", ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as call:
                _tell(call, _CALL, f"{cluster.process_id} {cluster.processes}")
                call.settimeout(left + _HEARING_SECONDS)
                verdict = _hear(call, _ROLL)
            reason = "what listens there takes no calls: the cluster may be complete already"
        except OSError as error:
            reason = error.strerror or str(error)
        if verdict == "ok":
            return
        if verdict:
            raise RunError(verdict)
        time.sleep(_RETRY_SECONDS)
    raise RunError(
        f"process {cluster.process_id} cannot reach the coordinator {cluster.coordinator} within "
        f"{cluster.connect_seconds:g} s ({reason}); start process 0 there, and see that the port "
        "is open between the machines"
    )


def _tell(connection: socket.socket, first: str, line: str) -> None:
    with contextlib.suppress(OSError):  # whoever left will be missed later
        connection.sendall(f"{first} {line}\n".encode())


def _hear(connection: socket.socket, first: str) -> str:
    """What the other side tells; empty where it closes, is a stranger or says nothing in time."""
    heard = b""
    try:
        while not heard.endswith(b"\n") and len(heard) < _LINE_BYTES:
            part = connection.recv(_LINE_BYTES)
            if not part:
                return ""
            heard += part
    except OSError:
        return ""
    word, _, line = heard.decode(errors="replace").strip().partition(" ")
    return line if word == first else ""


def _alive(present: dict[int, socket.socket]) -> dict[int, socket.socket]:
    """`present` without those that have hung up; one that was started again calls in again."""
    for number, caller in list(present.items()):
        caller.setblocking(False)
        try:
            gone = caller.recv(1) == b""
        except BlockingIOError:
            gone = False
        except OSError:
            gone = True
        caller.settimeout(_HEARING_SECONDS)
        if gone:
            present.pop(number).close()
    return present


def first_host() -> str:
    """Host of process 0, as the others of this cluster reach it."""
    from jax._src import distributed

    host, _, _ = str(distributed.global_state.coordinator_address).rpartition(":")
    return host.strip("[]")


def _loopback(coordinator: str) -> str:
    """The interface of processes that are all on this machine; empty where they may not be."""
    local = coordinator.startswith(("127.", "localhost:", "[::1]:"))
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if local and name in names), "")


def _use_interface(name: str, client) -> None:
    """Let gloo listen on `name`; by itself it takes the address that the host's name stands for."""
    from jax._src import xla_bridge
    from jax._src.lib import _jax

    collectives = _jax.make_gloo_tcp_collectives(distributed_client=client, interface=name)
    make_client = functools.partial(xla_bridge.make_cpu_client, collectives)
    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def _advice(cluster: ClusterConfig, error: Exception) -> str:
    said = " ".join(str(error).split())
    if cluster.coordinator == "auto" and isinstance(error, ValueError):
        return (
            f"no launcher that JAX knows has started this process ({said}); start it by Slurm or "
            "Open MPI, or set platform.cluster.coordinator, processes and process_id"
        )
    return f"JAX cannot join the cluster at {cluster.coordinator}: {said}"
