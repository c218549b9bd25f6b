# SPDX-License-Identifier: Apache-2.0
"""The lab of benchmarks/wan: its links and quotas are what a WAN says, and it leaves nothing."""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.wan import network, quota
from benchmarks.wan.__main__ import main
from benchmarks.wan.lab import clean, open_lab
from benchmarks.wan.traffic import traffic_report
from benchmarks.wan.world import PORT, Weather, loss_limit, make_world
from geojax.config import ConfigError
from geojax.meshes.wan import get_wan

ROOT = os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "sysctl")))


def needs_root(test):
    """And one after another: each cleans up after all that have died."""
    skip = pytest.mark.skipif(not ROOT, reason="namespaces need root, ip and tc")
    return pytest.mark.xdist_group("namespaces")(skip(test))


AZURE = get_wan("geomesh-azure")
TWO = [("east", "eastus"), ("korea", "koreacentral")]


def two(weather=None, wan=AZURE):
    return make_world(wan, TWO, "eastus", weather or Weather())


def test_every_ordered_pair_has_its_own_rate_and_delay(tmp_path):
    path = tmp_path / "links.csv"
    path.write_text("src,dst,gbit_per_second,rtt_ms\neast,west,0.8,60\nwest,east,0.2,\n")
    slices = [("a", "east"), ("b", "west")]
    world = make_world(get_wan(str(path)), slices, "west", Weather(0.01))
    there, back = world.links[1, 2], world.links[2, 1]
    assert (there.bits_per_second, back.bits_per_second) == pytest.approx((8e6, 2e6))
    assert there.delay_seconds == back.delay_seconds == 0.03
    assert len(world.links) == 6
    assert len({world.address(node) for node in world.nodes}) == 3


def test_only_a_world_with_delays_has_proxies():
    assert two().proxied
    near = two(wan=get_wan("geomesh-azure-no-latency"))
    assert not near.proxied  # half a round trip inside a region is less than a proxy takes
    assert near.address(near.nodes[1]) == f"{near.nodes[1].wire}:{PORT}"


def test_what_a_wan_does_not_say_is_refused_by_name(tmp_path):
    path = tmp_path / "links.csv"
    path.write_text("src,dst,gbit_per_second,rtt_ms\neastus,koreacentral,1,\n")
    with pytest.raises(ConfigError, match="eastus -> koreacentral has no rtt_ms"):
        two(wan=get_wan(str(path)))
    with pytest.raises(ConfigError, match="'mars' is not in the WAN; use one of eastus"):
        make_world(AZURE, TWO, "mars", Weather())
    with pytest.raises(ConfigError, match="no latency"):
        two(Weather(loss=0.01), get_wan("geomesh-azure-no-latency"))
    with pytest.raises(ConfigError, match="--rate-scale 0"):
        Weather(rate_scale=0)


def test_loss_limits_a_stream_as_the_square_root_law_says():
    assert loss_limit(0.1, 0.01) == pytest.approx(1.419e6, rel=1e-3)
    assert loss_limit(0.1, 0.02) == pytest.approx(loss_limit(0.1, 0.01) / math.sqrt(2))
    assert loss_limit(0.1, 0.0) == math.inf
    assert two(Weather(loss=0.01)).links[1, 2].loss_bits_per_second == loss_limit(0.192, 0.01)


def test_what_cannot_be_run_is_refused_in_a_line(capsys):
    assert main(["run", "demo-geomeshh"]) == 2
    said = capsys.readouterr().out
    assert "demo-geomesh" in said if ROOT else "needs root" in said


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("run demo-geomesh --wan bad", "--wan: no WAN named 'bad'"),
        ("run demo-geomesh --wan nowhere.csv", "WAN file 'nowhere.csv' cannot be read"),
        ("run demo-geomesh --tokens 0", "train.total_tokens 0 must be at least 1"),
        ("run demo-geomesh --shares 4 3 2 1 --cores 0", "--cores 0.0 must be above 0"),
        ("run demo-geomesh --shares 0 3 2 1", "give one above 0 for each of the 4 slices"),
        (
            "run demo-geomesh --shares 9 9 9 1",
            "slice rtx-6000-ada: a quota of 0.036 cores",
        ),
        ("run demo-geomesh --cores 1", "--cores is divided by --shares"),
        ("run demo-geomesh --out FILE", "is, or holds, something that is no run"),
        ("compare --wan bad", "--wan: no WAN named 'bad'"),
        ("compare --cores 0", "--cores 0.0 must be above 0"),
        ("compare --cores 0.3", "under the kernel's least"),
        ("compare --methods diloco sgd", "no method 'sgd'"),
        ("compare --round-seconds 0", "--round-seconds 0.0 must be above 0"),
        ("throttle --wan bad", "--wan: no WAN named 'bad'"),
        ("throttle --cores 0", "--cores 0.0 must be above 0"),
        ("throttle --slice rtx-6000-ada --factor 0.1 --cores 1", "a quota of 0.016 cores is under"),
        ("throttle --at-round 24", "--at-round 24 must lie in 1..23"),
        ("throttle --rounds 2", "--rounds 2 must be at least 9"),
        ("failures --wan bad", "--wan: no WAN named 'bad'"),
        ("failures --slices 2", "neither goes on without the other"),
        ("failures --hang-seconds 0", "--hang-seconds 0.0 must be above 0"),
        ("failures --moments 0", "--moments 0: nothing is asked for"),
        ("failures --seeds 0", "--seeds 0 must be at least 1"),
        ("failures --out FILE", "is, or holds, something else"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_made(
    command, says, tmp_path, monkeypatch, capsys
):
    """On machines of any kind: nothing here gets as far as needing root."""

    def made(*_):
        raise AssertionError("something was made")

    for module in ("__main__", "compare", "throttle", "failures"):
        monkeypatch.setattr(f"benchmarks.wan.{module}.require_tools", lambda: None)
    monkeypatch.setattr("benchmarks.wan.session._prepare_text", made)
    monkeypatch.setattr("benchmarks.wan.session.open_lab", made)
    monkeypatch.setattr("benchmarks.wan.calibrate.run", made)
    (tmp_path / "file").write_text("")
    where = [] if "--out" in command else ["--out", str(tmp_path / "out")]
    command = command.replace("FILE", str(tmp_path / "file"))
    assert main([*command.split(), *where]) == 2
    assert says in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


TAKE = """
import socket, sys, time
s = socket.create_server((sys.argv[1], int(sys.argv[2]))); c, _ = s.accept(); n = 0
c.recv(1); t = time.monotonic()
while b := c.recv(65536): n += len(b)
print(n, time.monotonic() - t, flush=True); time.sleep(60)
"""
GIVE = """
import socket, sys, time
c = socket.create_connection((sys.argv[1], int(sys.argv[2])))
c.sendall(bytes(300000)); c.shutdown(1)
end = time.monotonic() + 1.5
while time.monotonic() < end: pass
print(time.process_time(), flush=True)
"""


def sent_through(lab):
    """From east to korea: bytes, seconds, processor seconds of east, and counters around it."""
    _, east, korea = lab.world.nodes
    python, port = [sys.executable, "-S", "-c"], str(PORT)
    server = lab.start(korea, [*python, TAKE, korea.wire, port], "korea.log")
    while not lab.listens(korea):
        assert server.poll() is None
        time.sleep(0.02)
    before = lab.counters()
    lab.limit(east)
    lab.start(east, [*python, GIVE, korea.delayed, port], "east.log").wait()
    while not (lab.folder / "korea.log").read_text():
        time.sleep(0.05)
    size, seconds = map(float, (lab.folder / "korea.log").read_text().split())
    used = float((lab.folder / "east.log").read_text())
    return size, seconds, used, before, lab.counters()


@needs_root
def test_links_and_quotas_are_what_the_world_says(tmp_path):
    world = two(Weather(2e6 / 650e6))
    with open_lab(world, tmp_path, cores={"east": 0.15}) as lab:
        size, seconds, used, before, after = sent_through(lab)
        report = traffic_report(world, before, after, lab.proxy_counts(), [], 0)
    assert size == 299_999
    # With headers 1.25 s at 2 Mbit/s, after a burst; what a full queue lost comes later.
    assert 1.0 < seconds < 1.25 + 1.5
    assert used < 0.5  # 0.15 of 1.5 s, starting Python, and what a period may overrun
    sent = after[1].sent[2] - before[1].sent[2]
    assert sent == pytest.approx(300_000 * (1 + 66 / 1448), rel=0.01)
    assert report.exchange_payload_bytes == 300_000


@needs_root
def test_an_error_leaves_nothing(tmp_path):
    processes = []

    def fail():
        with open_lab(two(), tmp_path) as lab:
            processes.append(lab.start(lab.world.nodes[1], ["sleep", "60"], "east.log"))
            assert set(network.existing().values()) >= {os.getpid()}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert processes[0].poll() is not None
    assert os.getpid() not in network.existing().values()
    assert not quota.groups(f"{network.PREFIX}{os.getpid()}-")


LAB = """
import sys, time
from pathlib import Path
from benchmarks.wan.lab import open_lab
from benchmarks.wan.world import Weather, make_world
from geojax.meshes.wan import get_wan
wan = get_wan("geomesh-azure-no-latency")
world = make_world(wan, [("a", "eastus")], "eastus", Weather())
with open_lab(world, Path(sys.argv[1]), cores={"a": 0.5}) as lab:
    child = lab.start(world.nodes[1], ["sleep", "60"], "a.log")
    print(child.pid, flush=True)
    time.sleep(60)
"""


@needs_root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_lab_that_is_ended_removes_itself_and_a_killed_one_is_removed(number, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", LAB, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        child = int(process.stdout.readline())
        mine = {n for n, owner in network.existing().items() if owner == process.pid}
        assert len(mine) == 2
        clean()  # of others; this one lives
        assert mine <= set(network.existing())
        process.send_signal(number)
        process.wait()
    if number == signal.SIGKILL:
        assert mine <= set(network.existing())
        assert mine < set(clean())
    assert not mine & set(network.existing())
    assert not quota.groups(f"{network.PREFIX}{process.pid}-")
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
