# SPDX-License-Identifier: Apache-2.0
"""One GPU measured in minutes: kernels, training, step times, the engine, attention.

Invariant: the process that the user starts never touches the GPU. Every stage is a process of its
own, which may crash, hang or be ended, and what it had found by then is kept.
"""
