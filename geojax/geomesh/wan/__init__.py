# SPDX-License-Identifier: Apache-2.0
"""Slices as processes: who is in which round, and bytes between them, over gRPC. No JAX in here.

A coordinator (journal, decide, coordinator, ledger) says which slices a round merges; slices
(member, mail, peers, link) follow its journal and send each other their messages directly. What a
slice's work asks of all this is one protocol (seat).

Invariant: what all slices must agree on is a pure function of the journal's entries.
"""
