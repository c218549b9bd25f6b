# SPDX-License-Identifier: Apache-2.0
"""HALoS and Streaming DiLoCo without their training: the times that `geojax.baselines` makes.

Invariant: with neither jitter, loss nor changes of speed, and the config's own slices, a run takes
what the trained one says.
"""

from collections.abc import Sequence

from geojax.baselines.halos_events import halos_events
from geojax.baselines.ledger import Ledger, Span
from geojax.baselines.streaming_times import StreamClock, fragment_bytes, parts
from geojax.config import require
from geojax.simulate.outcome import Outcome, budget_sequences
from geojax.simulate.setting import Setting
from geojax.simulate.speeds import Change, Speeds


def baseline_outcome(setting: Setting, changes: Sequence[Change] = ()) -> Outcome:
    """To the token budget. ConfigError where the config's method is none of the two."""
    config = setting.config
    require(
        config.halos or config.streaming, f"{config.name} has rounds that all slices begin together"
    )
    speeds = Speeds([w.name for w in setting.plan.work], changes)
    return _halos(setting, speeds) if config.halos else _streaming(setting, speeds)


def _halos(setting: Setting, speeds: Speeds) -> Outcome:
    config, network = setting.config, setting.network
    assert config.halos is not None
    message, hubs = setting.traffic.payload_bytes, [int(hub) for hub in network.hubs]
    ledger = Ledger(setting.slices)
    seconds, updated, pushes, done = 0.0, 0.0, [0] * setting.slices, 0
    exchanges: list[float] = []
    sent_at: dict[int, float] = {}
    for event in halos_events(
        setting.plan.work,
        hubs,
        config.halos.updates_per_push,
        budget_sequences(setting),
        speeds.end,
        lambda src, dst, number: network.link_seconds(src, dst, message, (number,)),
    ):
        seconds = event.seconds
        if event.kind == "begin":
            ledger.compute(event.who, event.seconds, event.computed)
            ledger.transfer(event.who, event.computed, event.arrives)
        elif event.kind == "update":
            ledger.transfer(event.who, event.seconds, event.arrives)
            updated = seconds
            done += len(event.samples)
            if event.sends:
                pushes[hubs[event.who]] += 1
                sent_at[hubs[event.who]] = event.seconds
        elif event.kind == "pull":
            exchanges.append(event.seconds - sent_at[event.who])
    span = ledger.close(seconds, updated)
    rounds = -(-done // setting.plan.sequences)
    sent = [message * count / rounds for count in pushes]
    return _outcome(
        setting, "servers", span, span.transfer, rounds, sum(exchanges) / len(exchanges), sent
    )


def _streaming(setting: Setting, speeds: Speeds) -> Outcome:
    config, network = setting.config, setting.network
    streaming, pattern = config.streaming, setting.pattern
    assert streaming is not None
    took = [network.exchange(pattern, size) for size in fragment_bytes(config)]
    jitter = network.jitter_seconds

    def exchange(round_: int, fragment: int) -> float:
        if not jitter:
            return took[fragment].seconds
        draw = round_ * streaming.fragments + fragment
        return network.exchange(pattern, fragment_bytes(config)[fragment], draw).seconds

    clock = StreamClock(
        [w.seconds_per_step for w in setting.plan.work],
        parts(setting.plan.work[0].inner_steps, streaming.fragments, streaming.lag_steps),
        speeds.end,
        exchange,
    )
    rounds = -(-budget_sequences(setting) // setting.plan.sequences)
    spans = [clock.round(number + 1) for number in range(rounds)]
    count = setting.slices
    waits = [min(span.idle) for span in spans]

    def total(part: str) -> list[float]:
        return [sum(getattr(span, part)[i] for span in spans) for i in range(count)]

    idle = [seconds - sum(waits) for seconds in total("idle")]
    whole = Span(clock.seconds, total("compute"), total("transfer"), idle)
    sent = [float(sum(t.sent_bytes[i] for t in took)) for i in range(count)]
    seconds = sum(t.seconds for t in took)
    return _outcome(setting, pattern, whole, [sum(waits)] * count, rounds, seconds, sent)


def _outcome(
    setting: Setting,
    pattern: str,
    span: Span,
    wan: Sequence[float],
    rounds: int,
    exchange_seconds: float,
    sent: Sequence[float],
) -> Outcome:
    config, count = setting.config, setting.slices
    return Outcome(
        method=config.name,
        slices=count,
        regions=len(set(setting.network.regions)),
        wan=config.clock.wan,
        pattern=pattern,
        overlap=True,
        round_seconds=span.seconds / rounds,
        exchange_seconds=exchange_seconds,
        compute=sum(span.compute) / count / span.seconds,
        straggler_idle=max(span.idle) / span.seconds,
        wan_idle=max(wan) / span.seconds,
        payload_bytes=setting.traffic.payload_bytes,
        sent_bytes=sum(sent) / count,
        most_sent_bytes=round(max(sent)),
        tokens_per_round=setting.plan.sequences * config.data.seq_len,
        rounds=rounds,
        hours=span.seconds / 3600,
        lag_rounds=0,
    )
