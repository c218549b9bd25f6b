# SPDX-License-Identifier: Apache-2.0
"""lm-eval's own client of completions, where it is installed (the extra `lm-eval`)."""

import pytest
from tiny_serve import letters


def test_lm_evals_local_completions_generates(quick):
    pytest.importorskip("lm_eval", reason="needs the extra lm-eval")
    pytest.importorskip("tenacity", reason="needs lm-eval[api]")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    model = get_model("local-completions")(
        base_url=f"{quick.url}/v1/completions", model="tiny", tokenizer_backend=None
    )
    answer = letters(4, 12, 1234)  # the seed that it sends
    settings = {"until": [answer[7:9]], "max_gen_toks": 12, "do_sample": False}
    asked = [
        Instance("generate_until", {}, (prompt, settings), i)
        for i, prompt in enumerate(["Once", "More"])
    ]
    assert model.generate_until(asked) == [answer[:7], answer[:7]]
