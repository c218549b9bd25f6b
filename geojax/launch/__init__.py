# SPDX-License-Identifier: Apache-2.0
"""Runs whose slices are processes: the coordinator's, a slice's, and the launcher of both on one
machine.

A run folder holds `config.json`, and what the coordinator writes: `journal.jsonl`, `metrics.jsonl`
and `coordinator.json`, its address. `slices/NAME/` of it, or any folder that the slice is given,
holds that slice's checkpoints. Invariant: any of the processes may end at any moment and be started
again by the same command.
"""
