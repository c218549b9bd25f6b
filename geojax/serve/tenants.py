# SPDX-License-Identifier: Apache-2.0
"""Who asks: API keys, and the tenants that they belong to.

Invariant: a tenant's salt is made here, from a secret of this process and the tenant's name, so
that no caller can choose or learn it. Keys are compared in constant time, all of them, and are kept
as digests.
"""

import hashlib
import hmac
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from geojax.config import ConfigError, require

_SHORTEST = 16  # characters of a key
_COMMENT = re.compile(r"(?:^|\s)#")


class Tenant(NamedTuple):
    name: str
    salt: str
    """Prefixes are shared among requests of one salt only."""


class Tenants:
    """All who may ask. Without a file there is one, and it needs no key."""

    def __init__(self, path: Path | None = None):
        """`path`: lines of `NAME KEY`; keys of one name are one tenant's. # begins a comment, at a
        line's start or after a space.

        ConfigError where a line is none of these, a key is short or not ASCII, or two tenants have
        it.
        """
        self._secret = secrets.token_bytes(32)
        self._digests: dict[bytes, Tenant] = {}
        self.anyone = None if path else self._make("anyone")
        if path is None:
            return
        try:
            lines = path.read_text("utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the keys {path}: {error}") from error
        for number, line in enumerate(lines, 1):
            words = _COMMENT.split(line, maxsplit=1)[0].split()
            if not words:
                continue
            place = f"{path}:{number}"
            require(len(words) == 2, f"{place} is not `NAME KEY`; write one key a line")
            name, key = words
            require(
                len(key) >= _SHORTEST,
                f"{place}: a key has {len(key)} characters; use {_SHORTEST} or more, such as "
                "those of `openssl rand -hex 24`",
            )
            require(
                key.isascii() and key.isprintable(),
                f"{place}: the key has a character that is not ASCII, and no header can hold it; "
                "use letters and digits",
            )
            known = self._digests.setdefault(_digest(key), self._make(name))
            require(known.name == name, f"{place}: {name} and {known.name} have the same key")
        require(self._digests, f"{path} has no key; write lines of `NAME KEY`")

    @property
    def count(self) -> int:
        return len(set(self._digests.values())) or 1

    def of(self, authorization: str | None) -> Tenant | None:
        """The tenant of an Authorization header, `Bearer KEY`; None where it has no right one."""
        if self.anyone:
            return self.anyone
        scheme, _, key = (authorization or "").partition(" ")
        given, found = _digest(key.strip()), None
        for digest, tenant in self._digests.items():
            if hmac.compare_digest(digest, given):
                found = tenant
        return found if scheme.lower() == "bearer" else None

    def _make(self, name: str) -> Tenant:
        return Tenant(name, hmac.digest(self._secret, name.encode(), "sha256").hex())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
