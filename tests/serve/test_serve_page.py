# SPDX-License-Identifier: Apache-2.0
"""The page: one file that loads nothing else, and a generation driven to its end."""

import base64
import hashlib
import re

import pytest
from browser import CHROMIUM, browser
from tiny_serve import QuickEngine, letters, running

from geojax.serve.page import PAGE


def test_it_is_one_file_and_runs_nothing_else(quick):
    found = quick.get("/")
    assert found.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?:|//[a-z]|<link|<img|<iframe|@import|url\(|src=", found.text)
    assert "innerHTML" not in found.text  # what a model says is text
    policy = found.headers["content-security-policy"]
    for tag in ("script", "style"):
        (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", found.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert not re.search(r"\son\w+=|\sstyle=", found.text)  # the policy forbids them


def test_what_it_asks_for_is_there(quick):
    paths = set(re.findall(r'"(v1/[\w/]+|ready|metrics)"', PAGE))
    assert paths == {"v1/completions", "v1/chat/completions", "v1/models", "ready", "metrics"}
    text = quick.get("/metrics").text
    for name in re.findall(r'value\("([\w:]+)"\)', PAGE):
        assert f"\n{name}{{" in text, name


@pytest.mark.runs
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_generation_is_watched_to_its_end(model, tmp_path):
    engine = QuickEngine(model)
    engine.step_seconds = 0.03
    with running(model, engine) as live, browser(tmp_path / "profile") as page:
        page.open(live.url)
        page.wait("document.readyState === 'complete' && model === 'tiny'")
        page.run("document.getElementById('prompt').value = 'Once <b>upon</b>'")
        page.run("document.getElementById('tokens').value = '40'")
        page.run("document.getElementById('seed').value = '7'")
        page.run("document.getElementById('form').requestSubmit()")
        page.wait("!!document.querySelector('.hidden') && !!document.querySelector('.new')")
        page.picture(tmp_path / "during.png")
        page.wait("document.body.dataset.state === 'done'")
        said = page.run("document.getElementById('canvas').textContent")
        assert said == "Once <b>upon</b>" + letters(16, 40, 7)
        assert page.run("document.querySelectorAll('#canvas .hidden, #canvas b').length") == 0
        assert page.run("document.getElementById('step').textContent") == "40"
        assert float(page.run("document.getElementById('speed').textContent")) > 0
        page.picture(tmp_path / "after.png")
        # Stopped half way, the server computes no further.
        page.run("document.getElementById('tokens').value = '2000'")
        page.run("document.getElementById('form').requestSubmit()")
        page.wait("!!document.querySelector('.new')")
        page.run("document.getElementById('stop').click()")
        page.wait("document.body.dataset.state === 'failed'")
        page.wait("!document.getElementById('go').disabled")
        assert page.run("document.getElementById('error').textContent") == ""
        # What is wrong is said.
        page.run("document.getElementById('tokens').value = '99999'")
        page.run("document.getElementById('form').requestSubmit()")
        page.wait("document.getElementById('error').textContent.includes('2048 may be')")
        assert all(url.startswith(live.url) for url in page.requested)
        unexpected = [line for line in page.logged if "400" not in line and "favicon" not in line]
        assert not unexpected
    assert (tmp_path / "during.png").stat().st_size > 1000
