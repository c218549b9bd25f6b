# SPDX-License-Identifier: Apache-2.0
"""What clients send and get, on an engine that answers at once."""

import json
from dataclasses import replace

import httpx2
import openai
import pytest
from tiny_serve import QuickEngine, letters, running


def ask(**kwargs):
    return {"model": "tiny", "prompt": "Once", "max_tokens": 12, "seed": 0, **kwargs}


@pytest.fixture(scope="module")
def client(quick):
    with openai.OpenAI(base_url=quick.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


def test_a_completion(quick):
    found = quick.post(ask()).json()
    assert found["object"] == "text_completion"
    assert found["model"] == "tiny"
    (choice,) = found["choices"]
    assert choice["text"] == letters(4, 12)
    assert choice["finish_reason"] == "length"
    assert choice["geojax"]["reuse"] == "refresh"
    assert choice["geojax"]["policy"] == "confidence"
    assert choice["geojax"]["steps"] == 12
    assert found["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 12,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_openais_client_completes_and_streams(client):
    whole = client.completions.create(**ask())
    assert whole.choices[0].text == letters(4, 12)
    chunks = list(
        client.completions.create(**ask(), stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({c.id for c in chunks}) == 1


def test_openais_client_chats_and_streams(client):
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    asked = {"model": "tiny", "messages": messages, "max_completion_tokens": 7, "seed": 99}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant"
    assert len(whole.choices[0].message.content) == 5  # seed 99 ends
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == 5
    chunks = list(client.chat.completions.create(**asked, stream=True))
    said = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert said == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"


def test_every_chunk_has_a_usage_where_the_last_one_has(quick):
    for options in ({"include_usage": True}, {}):
        chunks = events(quick.post(ask(stream=True, stream_options=options)))
        assert {"usage" in chunk for chunk in chunks} == {bool(options)}


@pytest.mark.parametrize("as_sent", [lambda m: m, lambda m: m.model_dump()])
def test_what_was_answered_is_sent_back_as_it_came(client, as_sent):
    """The usual loop of a conversation."""
    messages = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"Turn {turn}"})
        found = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5)
        messages.append(as_sent(found.choices[0].message))


NEUTRAL = {
    "top_p": 1,
    "stop": None,
    "ignore_eos": None,
    "exact": None,
    "priority": None,
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "tools": [],
    "stream": True,
    "stream_options": {"continuous_usage_stats": False},
}


def test_what_asks_for_nothing_is_accepted(quick):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **NEUTRAL}
    assert quick.post(body, "/v1/chat/completions").status_code == 200


def test_the_models_context_is_a_limit(model):
    with running(replace(model, config=replace(model.config, context=32)), QuickEngine(model)) as s:
        found = s.post(ask(prompt="x" * 20, max_tokens=13))
        assert (found.status_code, found.json()["error"]["code"]) == (
            400,
            "context_length_exceeded",
        )
        assert s.post(ask(prompt="x" * 20)).json()["usage"]["completion_tokens"] == 12
        unsaid = s.post(ask(prompt="x" * 20, max_tokens=None)).json()
        assert unsaid["usage"]["completion_tokens"] == 12


def test_models_are_listed(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny") == next(iter(client.models.list()))
    for other in ("huge", "tiny/x"):
        with pytest.raises(openai.NotFoundError, match=f"no model is named '{other}'") as caught:
            client.models.retrieve(other)
        assert caught.value.code == "model_not_found"


def test_openais_client_reads_errors(client):
    with pytest.raises(openai.NotFoundError, match="no model is named 'huge'") as caught:
        client.completions.create(**ask(model="huge"))
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="a")


def test_prompts_come_in_four_forms(quick):
    as_text = quick.post(ask(prompt=["ab", "abc"])).json()
    assert [c["text"] for c in as_text["choices"]] == [letters(2, 12), letters(3, 12)]
    ids = [quick.service.prompts.encode(text).tolist() for text in ("ab", "abc")]
    as_ids = quick.post(ask(prompt=ids)).json()
    assert [c["text"] for c in as_ids["choices"]] == [c["text"] for c in as_text["choices"]]
    assert quick.post(ask(prompt=ids[0])).json()["choices"][0]["text"] == letters(2, 12)
    assert as_text["usage"]["prompt_tokens"] == as_ids["usage"]["prompt_tokens"] == 5


def test_n_answers_have_seeds_of_their_own(quick):
    found = quick.post(ask(n=3, prompt=["ab", "abc"], seed=5)).json()
    assert [c["index"] for c in found["choices"]] == list(range(6))
    assert [c["geojax"]["seed"] for c in found["choices"]] == [5, 6, 7, 5, 6, 7]
    assert [c["text"] for c in found["choices"][:3]] == [letters(2, 12, s) for s in (5, 6, 7)]
    assert found["usage"]["prompt_tokens"] == 5
    assert found["usage"]["completion_tokens"] == 72
    seeds = {quick.post(ask(seed=None)).json()["choices"][0]["geojax"]["seed"] for _ in range(4)}
    assert len(seeds) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_an_answer_before_them(quick, stream):
    text = letters(4, 40)
    stop = ["zzz", text[9:12]]
    body = ask(stop=stop, max_tokens=40, stream=stream, stream_options={"include_usage": True})
    if not stream:
        del body["stream_options"]
        found = quick.post(body).json()
        said, end, used = (
            found["choices"][0]["text"],
            found["choices"][0]["finish_reason"],
            found["usage"],
        )
    else:
        chunks = events(quick.post(body))
        said = "".join(c["text"] for chunk in chunks for c in chunk["choices"])
        end = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-1]
        used = chunks[-1]["usage"]
    assert (said, end) == (text[:9], "stop")
    assert used["completion_tokens"] == 12  # those that spell the stop string


def test_longer_answers_grow_canvas_by_canvas(model):
    engine = QuickEngine(model)
    engine.step_seconds = 0.02
    body = ask(max_tokens=30, canvas=8, stream=True, stream_options={"include_snapshots": True})
    with running(model, engine) as live:
        chunks = events(live.post(body))
    said = "".join(c["text"] for chunk in chunks for c in chunk["choices"])
    assert said == letters(4, 30)
    shown = [chunk["geojax"]["snapshot"] for chunk in chunks if "geojax" in chunk]
    assert {len(s["text"]) for s in shown} <= {8, 16, 24, 30}
    assert [s["step"] for s in shown] == sorted(s["step"] for s in shown)
    assert any("░" in s["text"] for s in shown)
    assert shown[-1]["text"] == said


@pytest.mark.parametrize(("tokens", "steps"), [(32, 8), (30, 8), (31, 31), (30, 4), (29, 17)])
def test_steps_are_of_the_whole_answer(quick, tokens, steps):
    """Whatever canvases it is divided into."""
    found = quick.post(ask(max_tokens=tokens, canvas=8, steps=steps)).json()
    assert found["choices"][0]["geojax"]["steps"] == steps
    assert found["choices"][0]["text"] == letters(4, tokens)


@pytest.mark.parametrize("change", [{"steps": 1}, {"block_length": 5}, {"block_length": 0}])
def test_as_many_tokens_as_were_asked_for(quick, change):
    """Also in one step, and where blocks do not divide the answer."""
    found = quick.post(ask(**change)).json()
    assert found["choices"][0]["text"] == letters(4, 12)
    assert found["usage"]["completion_tokens"] == 12


def test_end_of_text_ends_unless_it_is_ignored(quick):
    ended = quick.post(ask(seed=99)).json()
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] == 5
    ignored = quick.post(ask(seed=99, ignore_eos=True)).json()
    assert ignored["choices"][0]["finish_reason"] == "length"
    assert ignored["usage"]["completion_tokens"] == 12


def test_a_suffix_is_filled_up_to(quick):
    found = quick.post(ask(suffix=" the end", max_tokens=6)).json()
    assert found["choices"][0]["text"] == letters(4, 6)
    assert found["usage"]["prompt_tokens"] == 12


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 10_000}, "max_tokens", "2048 may be"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": 1e-9}, "temperature", "must be 0, which is greedy"),
        ({"top_p": 0.5}, "top_p", "greater than or equal to 1"),
        ({"logprobs": 3}, "logprobs", "should be False"),
        ({"best_of": 2}, "best_of", "should be 1"),
        ({"n": 17}, "n", "16 may be"),
        ({"policy": "best"}, "policy", "confidence"),
        ({"threshold": 0.5, "policy": "margin"}, "threshold", "goes with policy 'threshold' only"),
        ({"steps": 4, "threshold": 0.5}, "steps", "mean nothing to policy 'threshold'"),
        ({"canvas": 512}, "canvas", "256 may be"),
        ({"suffix": "x", "max_tokens": 257}, "max_tokens", "256 or fewer"),
        ({"suffix": "x", "max_tokens": 5, "canvas": 4}, "max_tokens", "4 or fewer"),
        ({"prompt": [1, 264]}, "prompt", "token 264 is not in 0..263"),
        ({"prompt": [1, 256]}, "prompt", "token 256 is the mask"),
        ({"prompt": []}, "prompt", ""),
        ({"prompt": "\ud800"}, "prompt", "half of a surrogate pair"),
        ({"prefix_tokens": 5}, "prefix_tokens", "has 4 tokens that can be shared"),
        ({"prompt": "x" * 9000}, "prompt", "9000 tokens, and 8192 may be"),
        ({"guess": 1}, "guess", "there is no such field"),
        ({"stream_options": {"guess": 1}}, "stream_options.guess", "there is no such field"),
        ({"max_tokens": 0}, "max_tokens", "; it is 0"),
        ({"prompt": 3}, "prompt", "prompt: must be a text, a list of 1 to 128 texts"),
        ({"prompt": 3}, "prompt", "; it is 3"),
        ({"prompt": [1, "a"]}, "prompt", '; it is [1, "a"]'),
        ({"prompt": [["a"], [1]]}, "prompt", '; it is [["a"], [1]]'),
        ({"prompt": [True]}, "prompt", "; it is [true]"),
        ({"prompt": [-1] * 99}, "prompt", "-1, -1, -1"),
        ({"prompt": None}, "prompt", "; it is null"),
        ({"prompt": ["a"] * 17}, "prompt", "16 may be"),
        ({"stop": ""}, "stop", "must be a text of 1 to 256 characters, or at most 16 of them"),
        ({"stop": [""]}, "stop", '; it is [""]'),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"suffix": "\ud800"}, "suffix", "half of a surrogate pair"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "without stream: true"),
        ({"prefix_tokens": 2, "exact": True}, "prefix_tokens", "nothing is shared where exact"),
    ],
)
def test_what_cannot_be_done_is_refused_and_named(quick, change, param, message):
    body = json.dumps(ask(**change))
    found = httpx2.post(
        quick.url + "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert found.status_code == 400
    error = found.json()["error"]
    assert message in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_a_prompt_is_needed(quick):
    error = quick.post({"max_tokens": 3}).json()["error"]
    assert (error["message"], error["param"]) == ("prompt: it is missing, and is needed", "prompt")


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "; it is 3"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
            'or a list of parts {"type": "text", "text": TEXT}',
        ),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages.0.role", '; it is "tool"'),
        ({"prefix_messages": 1, "exact": True}, "prefix_messages", "nothing is shared"),
        ({"prefix_messages": 2}, "prefix_messages", "there are 1 messages"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "two names of one setting"),
    ],
)
def test_what_a_chat_cannot_be_is_named_too(quick, change, param, message):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **change}
    found = quick.post(body, "/v1/chat/completions")
    assert found.status_code == 400
    assert message in found.json()["error"]["message"]
    assert found.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "kwargs",
    [
        {"content": json.dumps(ask()).encode(), "headers": {"content-type": "text/plain"}},
        {"content": json.dumps(ask()).encode()},
        {"content": b"null", "headers": {"content-type": "application/json"}},
        {"content": b"[1]", "headers": {"content-type": "application/json"}},
        {"content": b"", "headers": {"content-type": "application/json"}},
    ],
)
def test_a_body_that_is_no_object_is_told_what_to_send(quick, kwargs):
    found = httpx2.post(quick.url + "/v1/completions", **kwargs)
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, None)
    assert "Content-Type: application/json" in error["message"]


def test_a_body_that_is_not_json_is_told_where(quick):
    found = httpx2.post(
        quick.url + "/v1/completions",
        content=b'{"prompt": }',
        headers={"content-type": "application/json"},
    )
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, None)
    assert "the body is not JSON" in error["message"]
    assert "character 11" in error["message"]


@pytest.mark.parametrize(
    ("kwargs", "status"),
    [
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"[" * 100_000, "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"\xff\xfe", "headers": {"content-type": "application/json"}}, 400),
        ({"content": b'{"prompt": NaN}', "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"9" * 5000, "headers": {"content-type": "application/json"}}, 400),
        ({"content": json.dumps(ask()).encode(), "headers": {"content-type": "text/plain"}}, 400),
        ({"json": ask(prompt="x" * 2**21)}, 413),
        ({"content": iter([b"x" * 2**19] * 5)}, 413),
    ],
)
def test_bodies_that_are_none_are_refused(quick, kwargs, status):
    found = httpx2.post(quick.url + "/v1/completions", **kwargs)
    assert found.status_code == status
    assert found.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("127.9.9.9", 200),
        ("LocalHost:1", 200),
        ("[::1]:8000", 200),
        ("evil.example:8000", 403),
        # Names that somebody else may own, and lead here.
        ("127.evil.example:8000", 403),
        ("127.0.0.1.evil.com", 403),
        ("localhost.evil.com", 403),
        ("127.0.0.1@evil.com", 403),
        ("evil.com@127.0.0.1", 403),
        ("[::1]evil.com", 403),
        ("::1", 403),
        ("10.0.0.1", 403),
        ("", 403),
    ],
)
def test_only_names_of_this_machine_are_answered(quick, host, status):
    found = httpx2.get(quick.url + "/v1/models", headers={"Host": host})
    assert found.status_code == status


def test_other_sites_cannot_ask_through_a_browser(quick):
    found = httpx2.options(
        quick.url + "/v1/completions",
        headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"},
    )
    assert "access-control-allow-origin" not in found.headers


def test_metrics_add_up_to_what_clients_were_told(quick):
    names = ["vllm:generation_tokens_total", "vllm:prompt_tokens_total"]
    names += ["vllm:request_success_total", "geojax_refused_total"]
    before = [quick.metric(name) for name in names]
    told = [quick.post(ask(seed=s, n=2)).json()["usage"] for s in (0, 98)]
    asked = ask(stream=True, n=2, prompt=["ab", "c"], stream_options={"include_usage": True})
    told.append(events(quick.post(asked))[-1]["usage"])
    assert quick.post(ask(n=17)).status_code == 400
    after = [quick.metric(name) for name in names]
    new, given = (
        sum(usage[key] for usage in told) for key in ("completion_tokens", "prompt_tokens")
    )
    assert [a - b for a, b in zip(after, before, strict=True)] == [new, given, 8, 1]
    assert given == 4 + 4 + 3
    assert "anyone" not in quick.get("/metrics").text


def events(response):
    """Chunks of a stream that was read to its end."""
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
