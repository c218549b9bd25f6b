# SPDX-License-Identifier: Apache-2.0
"""Zero-shot multiple choice: which of several continuations a model finds the likeliest.

Arrows run one way: {command, harness} -> run -> {tasks -> items, load, pairs -> likelihood}, and
likelihood -> {causal, diffusion} -> rows.
"""
