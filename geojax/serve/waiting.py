# SPDX-License-Identifier: Apache-2.0
"""Who is next: tickets that wait, fair over tenants.

Each tenant has a virtual time, which grows by the cost of what it was given; the tenant whose time
is least is next (start-time fair queueing, Goyal et al. 1996). What is given is one canvas, so a
long answer is weighed against others again at each. A tenant that was idle begins at the present,
so it neither saves up nor owes. Within a tenant, answers that have begun come first; then lower
priorities, and waiting counts as priority.

Invariant: every ticket is at some time the next one: costs are positive, and no newcomer's priority
outweighs waiting for ever.
"""

from collections.abc import Iterator, Sequence

from geojax.serve.ticket import Ticket


class Waiting:
    """Tickets that were accepted and are not running."""

    def __init__(self, most: int, aging_seconds: float):
        """`most` of each tenant; `aging_seconds` of waiting are one level of priority."""
        self._most, self._aging = most, aging_seconds
        self._of: dict[str, list[Ticket]] = {}
        self._time: dict[str, float] = {}
        self._now = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __iter__(self) -> Iterator[Ticket]:
        return (ticket for tickets in self._of.values() for ticket in tickets)

    def count(self, tenant: str) -> int:
        return len(self._of.get(tenant, ()))

    def room(self, tenant: str) -> int:
        """Tickets that the tenant may add."""
        return self._most - self.count(tenant)

    def add(self, ticket: Ticket) -> None:
        name = ticket.tenant.name
        if name not in self._of:
            self._of[name] = []
            self._time[name] = max(self._time.get(name, 0.0), self._now)
        self._of[name].append(ticket)

    def next(self, now: float, skipped: set[str], growing: Sequence[Ticket] = ()) -> Ticket | None:
        """The next ticket of a tenant that is not `skipped`; it stays until `take`. `growing`:
        those that ran, and want another canvas."""
        begun = {ticket.tenant.name: ticket for ticket in reversed(growing)}
        names = [name for name in dict.fromkeys([*self._of, *begun]) if name not in skipped]
        if not names:
            return None
        name = min(names, key=lambda name: self._time[name])
        if name in begun:
            return begun[name]
        return min(self._of[name], key=lambda t: (self._urgency(t, now), t.arrived))

    def take(self, ticket: Ticket) -> None:
        """It runs: its tenant pays for it."""
        self.charge(ticket)
        self.drop(ticket)

    def charge(self, ticket: Ticket) -> None:
        """Its tenant pays for its next canvas, and that is the present."""
        name = ticket.tenant.name
        self._now = max(self._now, self._time[name])
        self._time[name] += ticket.cost

    def drop(self, ticket: Ticket) -> None:
        """It goes without having run."""
        name = ticket.tenant.name
        self._of[name].remove(ticket)
        if not self._of[name]:
            del self._of[name]

    def _urgency(self, ticket: Ticket, now: float) -> float:
        return ticket.ask.priority - (now - ticket.arrived) / self._aging
