# SPDX-License-Identifier: Apache-2.0
"""A cluster file means what it says, and what makes no sense in it is refused with a fix."""

import re

import pytest

from geojax.cli import main
from geojax.config import ConfigError
from geojax.meshes.hardware import get_gpu
from geojax.meshes.wan import LOCAL_BITS_PER_SECOND, get_wan
from geojax.plan.cluster import read_cluster

SLICES = """
[[slices]]
name = "a"
region = "eastus"
gpu = "h100"
gpus_per_node = 8
[[slices]]
name = "b"
region = "lab"
gpu = "mine"
nodes = 2
gpus_per_node = 4
network_gbit_per_second = 100
price_per_gpu_hour = 0.5
"""
MINE = """
[gpus.mine]
bf16_flops_per_second = 1e14
memory_bytes = 24e9
memory_bytes_per_second = 1e12
link_bytes_per_second = 3e10
"""
LINK = """
[[links]]
src = "lab"
dst = "eastus"
gbit_per_second = 0.5
rtt_ms = 40
"""
WHOLE = SLICES + MINE + LINK


@pytest.fixture
def read(tmp_path):
    def from_text(text):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return read_cluster(path)

    return from_text


def test_slices_gpus_links_and_prices_are_read(read):
    found = read(WHOLE + "[prices]\nh100 = 3\nmine = 9\n")
    assert found.name == "mine"
    a, b = found.sites
    assert (a.name, a.region, a.cluster.gpu, a.cluster.gpus) == ("a", "eastus", get_gpu("h100"), 8)
    assert (b.cluster.nodes, b.cluster.gpus_per_node) == (2, 4)
    assert b.cluster.network_bytes_per_second == 100e9 / 8
    assert b.cluster.gpu.memory_bytes == 24 * 10**9
    assert (a.price_per_gpu_hour, b.price_per_gpu_hour) == (3, 0.5)  # its own before its kind's
    assert found.cost(10) == pytest.approx(10 * (8 * 3 + 8 * 0.5))
    assert found.wan.regions == ("eastus", "lab")
    for src, dst in (("lab", "eastus"), ("eastus", "lab")):
        assert found.wan.link_seconds(src, dst, 10**6) == pytest.approx(0.02 + 8e6 / 0.5e9)
    assert found.wan.bits_per_second[0][0] == LOCAL_BITS_PER_SECOND
    assert read(WHOLE).cost(10) is None


def test_a_pair_has_its_own_link_or_the_wans_or_the_default(read, tmp_path):
    third = '[[slices]]\nname = "c"\nregion = "westus2"\ngpu = "h100"\n'
    top = 'wan = "geomesh-azure"\ndefault_link = { gbit_per_second = 0.1, rtt_ms = 10 }\n'
    found, wan = read(top + WHOLE + third).wan, get_wan("geomesh-azure")
    assert found.regions == ("eastus", "lab", "westus2")
    size = 10**6
    known = wan.link_seconds("eastus", "westus2", size)
    assert found.link_seconds("eastus", "westus2", size) == known
    assert found.link_seconds("lab", "eastus", size) == pytest.approx(0.02 + 8e6 / 0.5e9)
    assert found.link_seconds("westus2", "lab", size) == pytest.approx(0.005 + 8e6 / 0.1e9)
    assert found.shared
    assert not read("shared = false\n" + top + WHOLE).wan.shared
    (tmp_path / "links.csv").write_text("src,dst,gbit_per_second,rtt_ms\nlab,eastus,2,8\n")
    beside = read('wan = "links.csv"\n' + SLICES + MINE).wan  # found beside the cluster file
    assert beside.link_seconds("lab", "eastus", 0) == pytest.approx(0.004)
    near = read(WHOLE.replace("eastus", "lab").replace(LINK.replace("eastus", "lab"), ""))
    assert near.wan.regions == ("lab",)


BAD = [
    (SLICES + MINE, "no link between eastus and lab.*add \\[\\[links\\]\\]"),
    (WHOLE.replace('"mine"', '"h1000"'), "slice b: no GPU named 'h1000'; did you mean 'h100'"),
    (WHOLE.replace('"b"', '"a"'), "two slices are named 'a'; rename one"),
    (WHOLE.replace("= 0.5\n\n[gpus", "= -1\n\n[gpus"), "slice b: price_per_gpu_hour -1 .* least 0"),
    (WHOLE + "[prices]\nh100 = -2\n", r"\[prices\]: h100 -2 must be a finite number, at least 0"),
    (WHOLE + "[prices]\nh101 = 2\n", r"\[prices\]: no GPU named 'h101'; did you mean 'h100'"),
    (WHOLE.replace("nodes = 2", "node = 2"), "slice b: no key 'node'; did you mean 'nodes'"),
    (WHOLE.replace("nodes = 2", "nodes = 100000000000"), "slice b: 100,000,000,000 nodes of"),
    (WHOLE.replace("rtt_ms = 40", f"rtt_ms = {10**401}"), "must be a finite number"),
    (WHOLE.replace("nodes = 2", "nodes = 0"), "slice b: nodes 0 must be a whole number"),
    (WHOLE.replace("nodes = 2", "nodes = true"), "slice b: nodes True must be a whole number"),
    (WHOLE.replace('region = "lab"', ""), "slice b: region None must be a text"),
    (WHOLE.replace('src = "lab"', 'src = "lob"'), "link 1: no slice is in region 'lob'; did you"),
    (WHOLE + LINK, "link 2: lab -> eastus stands twice; remove one"),
    (WHOLE.replace("= 0.5\nrtt", "= 0\nrtt"), "link 1: gbit_per_second 0 .* above 0"),
    (WHOLE.replace("rtt_ms = 40", ""), "link 1: rtt_ms None must be a finite number, at least 0"),
    (WHOLE.replace("rtt_ms = 40", "rtt_ms = nan"), "link 1: rtt_ms nan must be a finite number"),
    (WHOLE.replace("gpus.mine", "gpus.h100"), r"\[gpus.h100\] is known already"),
    (WHOLE.replace("memory_bytes = 24e9", ""), r"\[gpus.mine\]: memory_bytes None must be"),
    ('wan = "azure"\n' + WHOLE, "no WAN named 'azure'; did you mean"),
    ("shared = 1\n" + WHOLE, "shared 1 must be true or false"),
    ("wann = 1\n" + WHOLE, "file: no key 'wann'; did you mean 'wan'"),
    ("slices = 3\n", "slices must be tables"),
    (MINE, "0 slices; give 2 to 256"),
    ("[[slices]\n", "cannot be read .*; it is TOML"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_what_makes_no_sense_is_refused_by_name(read, text, message):
    with pytest.raises(ConfigError, match=f"mine.toml.*{message}"):
        read(text)


def test_the_command_ends_in_one_line(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text(WHOLE)
    cases = [
        (["geomesh-150m", "--cluster", str(tmp_path / "none.toml")], "cannot be read"),
        (["cona-gpt-tiny", "--cluster", str(path)], "take a preset with one, or with slices, such"),
        (["demo-halos", "--cluster", str(path)], "have loops of their own"),
        (["demo-geomesh", "--clock.wan", "azure-many", "--cluster", str(path)], "would be ignored"),
        (["geomesh-150m", "--tokens", "5", "--cluster", str(path)], "tokens 5.0 must be .* 1024"),
        (["--cluster", str(path)], "wants a preset or a file first"),
    ]
    for arguments, message in cases:
        assert main(["plan", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert re.search(message, error), error
