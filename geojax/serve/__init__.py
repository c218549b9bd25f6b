# SPDX-License-Identifier: Apache-2.0
"""`geojax serve`: a diffusion model behind the HTTP interface that OpenAI's clients speak.

    HTTP (one event loop)                               app, guard, protocol, answers, page
        tickets: what is wanted, what is certain so far ticket
    engine (one thread)                                 loop
        who is next: fair over tenants                  waiting
        Engine.admit, run, result, leave                geojax.bicache.engine

Invariant: the event loop never computes, the engine's thread never waits for a client; between them
lie tickets alone.
"""
