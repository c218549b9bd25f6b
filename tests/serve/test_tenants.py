# SPDX-License-Identifier: Apache-2.0
"""Keys, and the salts that follow from them."""

import pytest

from geojax.config import ConfigError
from geojax.serve.options import ServeOptions, check, names_only
from geojax.serve.tenants import Tenants

KEYS = "alice first-0123456789abcdef\nbob other-0123456789abcdef\nalice second-0123456789abcdef\n"


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "keys"
    found.write_text(KEYS)
    return found


def test_keys_of_one_name_are_one_tenant(path):
    tenants = Tenants(path)
    alice = tenants.of("Bearer first-0123456789abcdef")
    assert alice == tenants.of("bearer second-0123456789abcdef")
    bob = tenants.of("Bearer other-0123456789abcdef")
    assert (alice.name, bob.name) == ("alice", "bob")
    assert alice.salt != bob.salt
    # Whoever knows names and keys does not know the salt.
    assert Tenants(path).of("Bearer first-0123456789abcdef").salt != alice.salt


WRONG = ["", "Bearer", "Bearer ", "first-0123456789abcdef", "Basic first-0123456789abcdef"]


@pytest.mark.parametrize(
    "header", [None, *WRONG, "Bearer first-0123456789abcde", "Bearer alice", "Bearer \udcff"]
)
def test_nothing_else_is_a_key(path, header):
    assert Tenants(path).of(header) is None


def test_only_at_a_lines_start_or_after_a_space_a_comment_begins(tmp_path):
    text = "# all\n  # keys\nalice abcdefghijklmnop#qrstuv\nbob other-0123456789abcdef # b's\r\n"
    (tmp_path / "keys").write_text(text)
    tenants = Tenants(tmp_path / "keys")
    assert tenants.of("Bearer abcdefghijklmnop") is None
    assert tenants.of("Bearer abcdefghijklmnop#qrstuv").name == "alice"
    assert tenants.of("Bearer other-0123456789abcdef").name == "bob"


def test_without_a_file_anyone_is_one_tenant():
    tenants = Tenants()
    assert tenants.of(None) == tenants.of("Bearer whatever")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alice\n", "keys:1 is not `NAME KEY`"),
        ("# nobody\n", "has no key"),
        ("alice short\n", "5 characters; use 16 or more"),
        ("alice short #long-0123456789abcdef\n", "5 characters"),
        ("\nalice s\u00e4me-0123456789abc\n", "keys:2: the key has a character that is not ASCII"),
        ("alice a-key\u00a0of-two-0123456789\n", "keys:1 is not `NAME KEY`"),
        ("alice same-0123456789abc\nbob same-0123456789abc", "alice have the same key"),
    ],
)
def test_files_that_mean_nothing_are_refused_and_show_no_key(tmp_path, text, message):
    (tmp_path / "keys").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        Tenants(tmp_path / "keys")
    assert "same-0123" not in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.evil.example", "127.0.0.1.evil.com"])
def test_other_machines_are_answered_with_keys_only(path, host):
    with pytest.raises(ConfigError, match=f"'{host}' can be reached from other machines"):
        check(ServeOptions(path, host=host))
    check(ServeOptions(path, host=host, keys=path))
    check(ServeOptions(path, host=host, open=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_this_machine_needs_no_key(path, host):
    check(ServeOptions(path, host=host))


def test_who_opens_a_server_is_asked_by_other_names_too(tmp_path):
    """A proxy on the same machine sends on the name that it was asked by."""
    path = tmp_path / "keys"
    assert names_only(ServeOptions(path))
    assert not names_only(ServeOptions(path, open=True))
    assert not names_only(ServeOptions(path, keys=path))
    assert not names_only(ServeOptions(path, host="0.0.0.0", open=True))
