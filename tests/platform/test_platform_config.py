# SPDX-License-Identifier: Apache-2.0
"""Platform settings refuse contradictions, and survive a file."""

import pytest
from pydantic import TypeAdapter, ValidationError

from geojax.config import ClusterConfig, ConfigError, PlatformConfig, WatchdogConfig


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        (PlatformConfig, {"memory_fraction": 0.0}, r"memory_fraction 0.0 must lie in \(0, 1\]"),
        (PlatformConfig, {"memory_fraction": 1.5}, "memory_fraction 1.5"),
        (PlatformConfig, {"interface": "eth0,eth1"}, "must be the name of one interface"),
        (WatchdogConfig, {"factor": 1.0}, "factor 1.0 must be above 1"),
        (WatchdogConfig, {"minimum_seconds": 0.0}, "minimum_seconds 0.0 must be above 0"),
        (WatchdogConfig, {"first_seconds": 10.0}, "at least minimum_seconds 300"),
        (ClusterConfig, {"processes": 2}, "go with a coordinator's HOST:PORT"),
        (ClusterConfig, {"coordinator": "auto", "process_id": 0}, "not with 'auto'"),
        (ClusterConfig, {"coordinator": "node0", "process_id": 0}, "must be HOST:PORT"),
        (ClusterConfig, {"coordinator": "a:1", "processes": 2}, "process_id None must lie in 0..1"),
        (ClusterConfig, {"coordinator": "a:1", "processes": 2, "process_id": 2}, "process_id 2"),
        (ClusterConfig, {"connect_seconds": 0.0}, "connect_seconds 0.0 must lie in"),
    ],
)
def test_contradictions_are_refused(part, settings, message):
    with pytest.raises(ConfigError, match=message):
        part(**settings)


def test_addresses_of_both_families():
    cluster = ClusterConfig("[::1]:9876", processes=2, process_id=1)
    assert cluster.address() == ("::1", 9876)
    assert ClusterConfig("node0:9876", processes=2, process_id=0).address() == ("node0", 9876)


def test_a_stored_config_is_read_back_and_unknown_fields_are_refused():
    adapter = TypeAdapter(PlatformConfig)
    config = PlatformConfig(
        xla_preset="throughput",
        memory_fraction=0.9,
        cluster=ClusterConfig("node0:9876", 2, 1),
        watchdog=WatchdogConfig(enabled=True),
    )
    assert adapter.validate_json(adapter.dump_json(config)) == config
    with pytest.raises(ValidationError, match="presets"):
        adapter.validate_json('{"presets": "none"}')
