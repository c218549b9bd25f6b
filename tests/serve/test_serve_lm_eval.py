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
    settings = {"until": [letters(4, 9)[7:9]], "max_gen_toks": 12, "do_sample": False}
    asked = [
        Instance("generate_until", {}, (prompt, settings), i)
        for i, prompt in enumerate(["Once", "More"])
    ]
    # Its seed is its own; of the answer, what comes before the stop string is left.
    for said in model.generate_until(asked):
        assert 0 < len(said) <= 12
        assert said in letters(4, 60, 0) * 2 or said in letters(4, 60, 1234) * 2
