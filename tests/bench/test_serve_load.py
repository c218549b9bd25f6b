# SPDX-License-Identifier: Apache-2.0
"""The load generator: what it sends, and figures that follow from what came."""

import asyncio
import json
import math

import httpx2
import numpy as np
import pytest

from geojax.bench.serve import LoadOptions, Sent, arrivals, figures_of, make_prompts
from geojax.bench.serve_client import send
from geojax.cli import main
from geojax.config import ConfigError


def test_prompts_share_prefixes_as_asked():
    options = LoadOptions(requests=400, prefixes=4, prefix_tokens=8, suffix_tokens=3, shared=0.5)
    prompts = make_prompts(options, 50, 49)
    assert {len(p) for p in prompts} == {11}
    assert max(max(p) for p in prompts) < 49
    heads = [tuple(p[:8]) for p in prompts]
    popular = [h for h in set(heads) if heads.count(h) > 10]
    assert len(popular) == 4
    assert 0.4 < sum(heads.count(h) for h in popular) / 400 < 0.6
    assert make_prompts(options, 50, 49) == prompts
    assert all(isinstance(p, str) for p in make_prompts(options, None, None))


def test_arrivals_have_the_rate_that_was_asked_for():
    assert not arrivals(LoadOptions(requests=5)).any()
    for burstiness in (1.0, 0.2):
        times = arrivals(LoadOptions(requests=4000, rate=8.0, burstiness=burstiness))
        gaps = np.diff(times)
        assert gaps.mean() == pytest.approx(1 / 8, rel=0.1)
        # Of a gamma distribution; 1 of a Poisson process.
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.15)


def test_throughput_counts_new_tokens_of_answered_requests():
    sent = [
        Sent(200, 0.5, 1.5, [0.5, 0.5], given=100, cached=64, new=11),
        Sent(200, 0.1, 2.1, [2.0], given=100, new=21),
        Sent(429, error="full"),
    ]
    found = figures_of(sent, 4.0, LoadOptions(requests=3), "m")
    assert (found["completed"], found["failed"]) == (2, 1)
    assert found["output_throughput"] == 32 / 4
    assert found["total_token_throughput"] == 232 / 4
    assert found["median_ttft_ms"] == pytest.approx(300)
    assert found["mean_tpot_ms"] == pytest.approx((1000 / 10 + 2000 / 20) / 2)
    assert found["mean_itl_ms"] == pytest.approx(1000)
    assert found["total_cached_tokens"] == 64
    assert found["statuses"] == {"200": 2, "429": 1}
    nobody = figures_of(sent[2:], 4.0, LoadOptions(requests=1), "m")
    assert math.isnan(nobody["median_e2el_ms"])
    assert json.dumps(found["errors"]) == '["full"]'


def stream_of(*lines):
    """What a client makes of a server's lines."""

    def answer(request):
        return httpx2.Response(200, content="".join(f"{line}\n\n" for line in lines).encode())

    async def one():
        transport = httpx2.MockTransport(answer)
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
            return await send(client, {})

    return asyncio.run(one())


def test_a_line_that_is_no_chunk_is_that_requests_error():
    text = 'data: {"choices": [{"text": "a\u2028b\u0085"}]}'  # these end no line of a stream
    usage = 'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}'
    good = stream_of(text, ": waiting", usage, "data: [DONE]")
    assert good.good
    assert (good.given, good.new, good.gaps) == (3, 2, [])
    assert good.first > 0
    for line in ("data: {", "data: 3", 'data: {"choices": [{}]}', 'data: {"choices": 3}'):
        broken = stream_of(text, line, "data: [DONE]")
        assert not broken.good
        assert line in broken.error
    assert "ended before" in stream_of(text).error
    assert stream_of('data: {"error": {"message": "too late"}}').error == "too late"


def test_bad_options_are_refused(capsys):
    with pytest.raises(ConfigError, match="shared 2 must lie in"):
        LoadOptions(shared=2)
    for name, value in (("concurrency", 0), ("concurrency", -1), ("steps", 0), ("seed", -1)):
        with pytest.raises(ConfigError, match=f"{name} {value} must be"):
            LoadOptions(**{name: value})
    with pytest.raises(ConfigError, match="burstiness inf"):
        LoadOptions(burstiness=math.inf)
    assert main(["bench", "serve", "http://127.0.0.1:9"]) == 2
    assert "no model is served at http://127.0.0.1:9" in " ".join(capsys.readouterr().err.split())
