# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods of choices against those of PyTorch and `transformers` for the same weights:

    python benchmarks/choice.py MODEL --items 3 --tasks strategyqa socialiqa wikihow_step

MODEL is a folder of a causal model that `geojax convert` wrote. Needs torch and transformers, which
geojax does not depend on.
"""

import argparse
from pathlib import Path

import numpy as np

from geojax.choice.items import pick
from geojax.choice.load import load_subject
from geojax.choice.tasks import load_items
from geojax.data import cache_dir


def theirs(folder: Path, pairs) -> np.ndarray:
    """Each pair in a row of its own, nothing padded or shared."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    with torch.no_grad():
        for pair in pairs:
            ids = torch.tensor(np.concatenate([pair.context, pair.continuation])[None].astype("i8"))
            logs = torch.log_softmax(model(ids).logits[0, len(pair.context) - 1 : -1].double(), -1)
            own = torch.tensor(pair.continuation.astype("i8"))[:, None]
            found.append(float(logs.gather(1, own).sum()))
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--items", type=int, default=3, help="items of each task")
    parser.add_argument("--tasks", nargs="+", default=["strategyqa", "socialiqa", "wikihow_step"])
    options = parser.parse_args()
    subject = load_subject(options.model)
    items = [i for t in options.tasks for i in pick(load_items(t, cache_dir()), options.items)]
    pairs = subject.pairs([(item.context, text) for item in items for text in item.continuations])
    ours = np.array([found.log for found in subject.likelihood()(pairs)])
    other = theirs(options.model, pairs)
    differ = np.abs(ours - other) / np.abs(other)
    sizes = f"{len(pairs)} choices of {len(items)} items"
    print(f"{sizes}: relative difference at most {differ.max():.1e}")


if __name__ == "__main__":
    main()
